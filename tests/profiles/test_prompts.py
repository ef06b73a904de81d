from __future__ import annotations

from pathlib import Path

import pytest

from ssd_profiles.errors import UserError
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
