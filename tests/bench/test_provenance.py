"""Figures name the commit that they are of, and what was taken from the machine meanwhile."""

from __future__ import annotations

import json
import os
import subprocess
from pathlib import Path

import pytest

from bench.harness.code_digest import changes_section, changes_since
from bench.harness.provenance import Watch, commit, stolen_seconds


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


def test_stolen_time_is_the_eighth_figure_of_all_processors(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    stat = tmp_path / "stat"
    monkeypatch.setattr("bench.harness.provenance.STAT", stat)
    assert stolen_seconds(stat) is None
    assert Watch().stolen() is None, "not every system counts it"
    ticks = os.sysconf("SC_CLK_TCK")
    stat.write_text(f"cpu  1 2 3 4 5 6 7 {3 * ticks} 9 10\ncpu0 0 0 0 0 0 0 0 0 0 0\n")
    assert stolen_seconds(stat) == 3.0
    monkeypatch.setattr("bench.harness.provenance.monotonic", lambda: 110.0)
    watch = Watch(began=100.0, before=1.0)
    assert watch.stolen() == pytest.approx(0.2 / (os.cpu_count() or 1))


def test_outcomes_of_earlier_code_hold_where_only_declared_changes_lie_between(tmp_path: Path) -> None:
    declared = tmp_path / "same_speed.json"
    steps = [{"before": "a", "after": "b", "why": "One."}, {"before": "b", "after": "c", "why": "Two."}]
    declared.write_text(json.dumps(steps))
    assert changes_since("c", "c", declared) == []
    assert changes_since("a", "c", declared) == ["One.", "Two."]
    assert changes_since("b", "c", declared) == ["Two."]
    for measured, packages in (("c", "a"), ("x", "c"), (None, "c"), ("a", "x")):
        assert changes_since(measured, packages, declared) is None
    assert changes_section(["a", "b", "c", None], "c", declared).splitlines()[-2:] == ["- One.", "- Two."]
    assert changes_section(["c", "x"], "c", declared) == ""
