"""Prompt files are known by their hashes: fetched, copied and checked alike."""

from __future__ import annotations

import gzip
import hashlib
import json
from pathlib import Path

import pytest

from bench import prompts
from bench.fixtures.prompts.prompt_files import SHARED
from bench.prompts import FILES, ROWS, PromptFile, all_rows, odd_questions, provide
from ssd_profiles.errors import UserError

QUESTIONS = [{"question_id": number, "turns": [f"Why {number}? é"]} for number in range(4)]
PUBLIC = "".join(json.dumps(each) + "\n" for each in QUESTIONS).encode()
ODD = "".join(json.dumps(QUESTIONS[number], ensure_ascii=False) + "\n" for number in (1, 3)).encode()


def odd_file(url: str = "https://example.org/q.jsonl", content: bytes = ODD) -> PromptFile:
    return PromptFile("set/odd.jsonl", url, "MIT", hashlib.sha256(content).hexdigest(), odd_questions)


@pytest.fixture
def web(monkeypatch: pytest.MonkeyPatch) -> dict[str, bytes]:
    """Answers of the network, by address."""
    answers = dict[str, bytes]()
    monkeypatch.setattr(prompts, "_fetched", answers.__getitem__)
    return answers


def test_a_file_is_fetched_selected_and_then_only_checked(
    tmp_path: Path, web: dict[str, bytes], capsys: pytest.CaptureFixture[str]
) -> None:
    file = odd_file()
    web[file.url] = PUBLIC
    assert provide([file], tmp_path) == []
    assert (tmp_path / file.name).read_bytes() == ODD
    assert "fetched from https://example.org" in capsys.readouterr().out
    web.clear()
    assert provide([file], tmp_path) == []
    assert "as measured" in capsys.readouterr().out
    (tmp_path / file.name).write_bytes(ODD + b"\n")
    [wrong] = provide([file], tmp_path)
    assert "SHA-256" in wrong
    assert "delete it" in wrong


def test_a_packed_file_is_unpacked() -> None:
    file = odd_file("https://example.org/q.jsonl.gz")
    assert file.made_of(gzip.compress(PUBLIC)) == ODD


@pytest.mark.parametrize("content", [b"<html>", b'{"id": 1}\n'])
def test_another_file_at_the_address_is_one_line(content: bytes) -> None:
    with pytest.raises(UserError, match="not the file that was expected"):
        odd_file().made_of(content)


def test_other_prompts_are_not_written(tmp_path: Path, web: dict[str, bytes]) -> None:
    file = odd_file(content=b"others")
    web[file.url] = PUBLIC
    [wrong] = provide([file], tmp_path)
    assert "not those that were measured" in wrong
    assert not (tmp_path / file.name).exists()


def test_check_neither_copies_nor_fetches(tmp_path: Path) -> None:
    wrong = provide(FILES, tmp_path, check=True)
    assert len(wrong) == len(FILES)
    assert not list(tmp_path.iterdir())


def test_the_listed_rows_are_as_many_as_the_files_have() -> None:
    rows = json.loads(ROWS.read_text(encoding="utf-8"))
    assert {name: len(set(numbers)) for name, numbers in rows.items()} == {
        "gsm8k/test.jsonl": 100,
        "gsm8k/train.jsonl": 400,
    }
    assert all(name in {file.name for file in FILES} for name in rows)


@pytest.mark.skipif(not SHARED.is_dir(), reason="a developer's folder of prompts")
def test_the_shared_folder_holds_these_files(tmp_path: Path) -> None:
    assert provide(FILES, tmp_path) == []
    assert provide(FILES, tmp_path, check=True) == []
    assert all_rows([]) == []
