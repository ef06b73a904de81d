"""Files of prompts, the packaged domains, and the line of another program's error."""

from __future__ import annotations

from pathlib import Path

import pytest

from ssd_profiles.domain import domain_names, load_domain, starter_set
from ssd_profiles.errors import MAX_LINE, MAX_MESSAGE, UserError, first_line
from ssd_profiles.prompts import read_prompts


def write(tmp_path: Path, text: str | bytes) -> Path:
    path = tmp_path / "prompts.jsonl"
    path.write_bytes(text if isinstance(text, bytes) else text.encode())
    return path


def test_all_three_forms(tmp_path: Path) -> None:
    path = write(
        tmp_path,
        '{"prompt": "Hi", "id": "a", "category": "chat", "domain": "d"}\n\n'
        '{"question_id": 81, "category": "writing", "turns": ["One", "Two"]}\n'
        '{"messages": [{"role": "system", "content": ""}, {"role": "user", "content": "Ho"}]}\n',
    )
    one, two, three = read_prompts(path)
    assert (one.id, one.turns, one.category, one.domain) == ("a", ("Hi",), "chat", "d")
    assert (two.id, two.turns) == ("81", ("One",))
    assert (three.id, three.turns, three.messages) == ("4", (), (("system", ""), ("user", "Ho")))
    assert read_prompts(path, all_turns=True)[1].turns == ("One", "Two")


@pytest.mark.parametrize(
    ("text", "says"),
    [
        ("", "no prompts"),
        ("hello", ":1: not JSON"),
        ('{"prompt": "a"}\n[1]', ":2: expected a JSON object"),
        ('{"prompt": "  "}', "empty"),
        ('{"prompt": 3}', "needs"),
        ('{"turns": []}', "needs"),
        ('{"prompt": "a", "turns": ["b"]}', "both"),
        ('{"prompt": "a", "id": ' + "1" * 5000 + "}", ":1: not JSON"),
        ('{"messages": [{"role": "user"}]}', "messages"),
        ('{"prompt": "a", "category": 3}', "category"),
        (b'{"prompt": "\xff"}', "UTF-8"),
        ('{"prompt": "a"}\n{"prompt": "half \\ud83d"}', ":2: holds half of a character"),
    ],
)
def test_bad_files_name_the_line(tmp_path: Path, text: str | bytes, says: str) -> None:
    with pytest.raises(UserError, match=says) as error:
        read_prompts(write(tmp_path, text))
    assert "\n" not in str(error.value)


@pytest.mark.parametrize("name", domain_names())
def test_every_domain_is_complete(name: str) -> None:
    domain, starter = load_domain(name), starter_set(name)
    assert domain.name == name
    assert len(starter.shots) >= domain.shots
    prompts = [domain.render(record, starter.shots) for record in starter.records]
    assert len(set(prompts)) == len(prompts) >= 24
    shown = [str(shot) for shot in starter.shots]
    assert not any(str(record) in shown for record in starter.records)
    asked = {domain.ask(record, way) for record in starter.records for way in range(3)}
    assert len(asked) == 3 * len(prompts)
    assert not asked & set(prompts) or domain.shots == 0


def test_rows_become_records() -> None:
    story = load_domain("tinystories").record({"text": " ".join(f"w{i}" for i in range(99))})
    assert len(story["beginning"].split()) == 30
    assert story["story"].startswith(story["beginning"])
    row = {"translation": {"de": "Guten Tag", "en": "Hello"}}
    assert load_domain("wmt16").record(row) == {"german": "Guten Tag", "english": "Hello"}
    with pytest.raises(KeyError):
        load_domain("cnn").record(row)


def test_render_puts_shots_first() -> None:
    domain = load_domain("gsm8k")
    text = domain.render(
        {"question": "Q?", "answer": "no"}, [{"question": f"q{i}", "answer": f"a{i}"} for i in range(9)]
    )
    assert text.count("Question:") == 6
    assert text.endswith("Question: Q?\nAnswer:")
    assert "a4" in text
    assert "a5" not in text
    assert "no" not in text


def test_unknown_domains_are_named() -> None:
    with pytest.raises(UserError, match=r"cnn, gsm8k, humaneval"):
        load_domain("nope")


@pytest.mark.parametrize("quoted", ["x" * 10**6, "x\n" * 10**6])
def test_an_error_that_quotes_a_long_text_says_where_and_what_to_do(quoted: str) -> None:
    line = str(UserError(f"here: has {quoted}; download it again"))
    assert len(line) <= MAX_MESSAGE
    assert line.startswith("here: has x")
    assert line.endswith("; download it again")


def test_an_error_of_usual_length_is_whole() -> None:
    assert str(UserError("x" * MAX_MESSAGE)) == "x" * MAX_MESSAGE


@pytest.mark.parametrize(
    ("error", "line"),
    [
        (ValueError("\n one \ntwo"), "one"),
        (ValueError("x" * 999), "x" * MAX_LINE),
        (TimeoutError(), "TimeoutError"),
        (OSError(" \n"), "OSError"),
    ],
)
def test_an_error_without_a_message_is_named(error: Exception, line: str) -> None:
    assert first_line(error).strip() == line
