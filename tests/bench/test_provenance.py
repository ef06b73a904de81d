"""Figures name the commit that they are of."""

from __future__ import annotations

import subprocess
from pathlib import Path

import pytest

from bench.provenance import commit


def test_a_commit_is_marked_where_anything_but_documents_has_changed(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def git(*arguments: str) -> None:
        who = ("-c", "user.name=a", "-c", "user.email=a@b")
        subprocess.run(["git", "-C", str(tmp_path), *who, *arguments], check=True, capture_output=True)

    files = [tmp_path / "bench" / "tool.py", tmp_path / "docs" / "page.md", tmp_path / "runtime" / "engine.py"]
    monkeypatch.setattr("bench.provenance.__file__", str(files[0]))
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
