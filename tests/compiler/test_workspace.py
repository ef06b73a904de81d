from __future__ import annotations

from concurrent.futures import ThreadPoolExecutor
from hashlib import sha256
from pathlib import Path
from threading import Event
from time import sleep

import pytest

from ssd_artifacts.files import new_folder, write_lock
from ssd_compiler.settings import CompileSettings
from ssd_compiler.workspace import Workspace
from ssd_profiles.errors import UserError
from tests.bundles import fingerprint

SETTINGS = CompileSettings("m", ("cnn",))


def begun(folder: Path, settings: CompileSettings, model: str, resume: bool) -> Workspace:
    work = Workspace(folder / "out", settings, resume)
    work.begin(fingerprint(config_sha256=sha256(model.encode()).hexdigest()))
    return work


def test_finished_stages_are_not_redone(tmp_path: Path) -> None:
    work = begun(tmp_path, SETTINGS, "model", resume=False)
    assert work.stage("one", lambda: {"a": [1, 2.5]}) == {"a": [1, 2.5]}
    again = begun(tmp_path, SETTINGS, "model", resume=True)
    assert again.stage("one", lambda: pytest.fail("redone")) == {"a": [1, 2.5]}
    afresh = begun(tmp_path, SETTINGS, "model", resume=False)
    assert afresh.stage("one", lambda: "new") == "new"


def test_a_failed_stage_is_not_finished(tmp_path: Path) -> None:
    work = begun(tmp_path, SETTINGS, "model", resume=False)
    with pytest.raises(ZeroDivisionError):
        work.stage("one", lambda: 1 // 0)
    assert work.stage("one", lambda: 3) == 3


@pytest.mark.parametrize("changed", ["model", "seed"])
def test_other_settings_are_not_resumed(tmp_path: Path, changed: str) -> None:
    begun(tmp_path, SETTINGS, "model", resume=False)
    other = CompileSettings("m", ("cnn",), seed=int(changed == "seed"))
    with pytest.raises(UserError, match="--resume"):
        begun(tmp_path, other, "another" if changed == "model" else "model", resume=True)


def test_one_compile_at_a_time(tmp_path: Path) -> None:
    with Workspace(tmp_path / "out", SETTINGS, resume=False):
        with (
            pytest.raises(UserError, match=r"out: another compile is writing"),
            Workspace(tmp_path / "out", SETTINGS, resume=True),
        ):
            pytest.fail("two at once")
        with Workspace(tmp_path / "other", SETTINGS, resume=False):
            pass
    with Workspace(tmp_path / "out", SETTINGS, resume=False):
        pass
    assert list(tmp_path.iterdir()) == []


def test_a_compile_that_begins_does_not_clear_away_what_a_pull_writes(tmp_path: Path) -> None:
    """Compiles and pulls into one folder wait for each other's writing."""
    writing, written = Event(), list[str]()

    def pull() -> None:
        with write_lock(tmp_path / "out"), new_folder(tmp_path / "out") as folder:
            writing.set()
            sleep(0.3)
            (folder / "manifest.yaml").write_text("pulled")
            written.append("pulled")

    with ThreadPoolExecutor() as pool:
        pulling = pool.submit(pull)
        writing.wait()
        with Workspace(tmp_path / "out", SETTINGS, resume=False):
            assert written == ["pulled"]
        pulling.result()
    assert (tmp_path / "out" / "manifest.yaml").read_text() == "pulled"


def test_what_a_killed_compile_left_is_cleared_away(tmp_path: Path) -> None:
    """Killed between moving the old bundle aside and moving the new one in."""
    (tmp_path / ".out.old.abcdefgh" / "out").mkdir(parents=True)
    (tmp_path / ".out.old.abcdefgh" / "out" / "manifest.yaml").write_text("old")
    (tmp_path / ".out.new.ijklmnop").mkdir()
    with Workspace(tmp_path / "out", SETTINGS, resume=False):
        assert [path.name for path in tmp_path.iterdir()] == ["out"]
    assert (tmp_path / "out" / "manifest.yaml").read_text() == "old"


def test_resuming_nothing_begins(tmp_path: Path) -> None:
    work = begun(tmp_path, SETTINGS, "model", resume=True)
    work.remove()
    assert list(tmp_path.iterdir()) == []


def test_stages_of_nobody_knows_what_are_not_taken_over(tmp_path: Path) -> None:
    work = begun(tmp_path, SETTINGS, "model", resume=False)
    work.stage("one", lambda: "old")
    (work.folder / "identity.json").unlink()
    assert begun(tmp_path, SETTINGS, "model", resume=True).stage("one", lambda: "new") == "new"


@pytest.mark.parametrize("finished", [False, True])
def test_a_failed_compile_leaves_its_finished_stages_and_nothing_else(tmp_path: Path, finished: bool) -> None:
    with pytest.raises(UserError, match="no such model"), Workspace(tmp_path / "out", SETTINGS, resume=False) as work:
        work.begin(fingerprint())
        if finished:
            work.stage("one", lambda: 1)
        raise UserError("no such model")
    assert sorted(path.name for path in tmp_path.rglob("*.json")) == (["identity.json", "one.json"] if finished else [])
    assert work.folder.exists() == finished


@pytest.mark.parametrize("other", ["out.new", "out.old"])
def test_stages_of_a_bundle_with_a_longer_name_are_another_compiles(tmp_path: Path, other: str) -> None:
    work = Workspace(tmp_path / other, SETTINGS, resume=False)
    work.begin(fingerprint())
    work.stage("one", lambda: 1)
    with Workspace(tmp_path / "out", SETTINGS, resume=False):
        assert (work.folder / "one.json").is_file()
