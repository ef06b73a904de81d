"""Figures name their commit, and prompts and commands are those that texts name."""

from __future__ import annotations

import hashlib
import json
import re
import subprocess
from importlib.util import find_spec
from pathlib import Path

import pytest

from bench import prompts
from bench.harness.provenance import commit
from bench.prompts import FILES, SHARED, PromptFile, odd_questions, provide
from ssd_profiles.errors import UserError


def test_a_commit_is_marked_where_anything_but_documents_has_changed(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def git(*arguments: str) -> None:
        who = ("-c", "user.name=a", "-c", "user.email=a@b")
        subprocess.run(["git", "-C", str(tmp_path), *who, *arguments], check=True, capture_output=True)

    files = [tmp_path / "bench" / "tool.py", tmp_path / "docs" / "page.md", tmp_path / "runtime" / "engine.py"]
    monkeypatch.setattr("bench.harness.provenance.__file__", str(files[0]))
    for file in files:
        file.parent.mkdir()
        file.write_text("one")
    assert commit() is None
    git("init")
    git("add", "-A")
    git("commit", "-m", "first")
    clean = commit()
    assert clean is not None
    files[1].write_text("two")
    (tmp_path / "new").write_text("not of the repository")
    assert commit() == clean
    files[2].write_text("two")
    assert commit() == f"{clean}+"


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


@pytest.mark.skipif(not SHARED.is_dir(), reason="a developer's folder of prompts")
def test_the_shared_folder_holds_these_files(tmp_path: Path) -> None:
    assert provide(FILES, tmp_path) == []
    assert provide(FILES, tmp_path, check=True) == []
    assert FILES[-1].select([]) == []


ROOT = Path(__file__).parents[2]
NAMED = re.compile(r"(?<![\w./])bench(?:\.[a-z_]+){1,3}(?![\w(])")


def named(path: Path) -> set[str]:
    return {name.removesuffix(".py") for name in NAMED.findall(path.read_text(encoding="utf-8"))}


def test_modules_that_texts_name_are_there() -> None:
    texts = [*ROOT.glob("*.md"), *ROOT.glob("docs/**/*.md"), ROOT / "Makefile", *ROOT.glob("bench/**/*.py")]
    commands = {name: path for path in texts if path.name != "CHANGELOG.md" for name in named(path)}
    assert len(commands) > 10
    missing = {name: path.name for name, path in commands.items() if find_spec(name) is None}
    assert not missing
