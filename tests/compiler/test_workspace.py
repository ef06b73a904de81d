from __future__ import annotations

from pathlib import Path

import pytest

from ssd_compiler.settings import CompileSettings
from ssd_compiler.workspace import Workspace
from ssd_profiles.errors import UserError

SETTINGS = CompileSettings("m", ("cnn",))


def test_finished_stages_are_not_redone(tmp_path: Path) -> None:
    work = Workspace(tmp_path / "out", SETTINGS, "model", resume=False)
    assert work.stage("one", lambda: {"a": [1, 2.5]}) == {"a": [1, 2.5]}
    again = Workspace(tmp_path / "out", SETTINGS, "model", resume=True)
    assert again.stage("one", lambda: pytest.fail("redone")) == {"a": [1, 2.5]}
    afresh = Workspace(tmp_path / "out", SETTINGS, "model", resume=False)
    assert afresh.stage("one", lambda: "new") == "new"


def test_a_failed_stage_is_not_finished(tmp_path: Path) -> None:
    work = Workspace(tmp_path / "out", SETTINGS, "model", resume=False)
    with pytest.raises(ZeroDivisionError):
        work.stage("one", lambda: 1 // 0)
    assert work.stage("one", lambda: 3) == 3


@pytest.mark.parametrize("changed", ["model", "seed"])
def test_other_settings_are_not_resumed(tmp_path: Path, changed: str) -> None:
    Workspace(tmp_path / "out", SETTINGS, "model", resume=False)
    other = CompileSettings("m", ("cnn",), seed=int(changed == "seed"))
    with pytest.raises(UserError, match="--resume"):
        Workspace(tmp_path / "out", other, "another" if changed == "model" else "model", resume=True)


def test_resuming_nothing_begins(tmp_path: Path) -> None:
    work = Workspace(tmp_path / "out", SETTINGS, "model", resume=True)
    work.remove()
    assert list(tmp_path.iterdir()) == []
