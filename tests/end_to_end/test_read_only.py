"""Folders that may only be read: models are used from them, caches are done without, and outputs are refused."""

from __future__ import annotations

import json
import os
import shutil
import stat
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from functools import partial
from pathlib import Path

import pytest

from ssd_artifacts.files import new_folder, write_atomically
from ssd_artifacts.reference_bundle import bundle_path
from ssd_compiler.bundles.cli import main as bundle_main
from ssd_runtime.commands.run import main as run_main
from tests.commands import Within, assert_refused
from tests.folders import save_tiny_model

NOBODY = 65534
READ_ONLY = stat.S_IRUSR | stat.S_IXUSR | stat.S_IRGRP | stat.S_IXGRP | stat.S_IROTH | stat.S_IXOTH


@contextmanager
def another_user() -> Iterator[None]:
    """Another user, if this one is root: root may write anywhere."""
    if os.geteuid():
        yield
        return
    try:
        os.seteuid(NOBODY)
    except OSError as error:
        pytest.skip(f"this machine has no other user to be ({error.strerror})")
    try:
        yield
    finally:
        os.seteuid(0)


@pytest.fixture
def room() -> Iterator[Path]:
    """A folder that other users can reach, with a model and a cache; `closed` is a folder that nobody may write."""
    folder = Path(tempfile.mkdtemp(prefix="ssd-read-only-"))
    save_tiny_model(folder / "model")
    (folder / "cache").mkdir()
    (folder / "closed").mkdir()
    (folder / "closed" / "kept").write_text("as it was")
    folder.chmod(0o755)
    for each in (folder / "model", folder / "closed"):
        each.chmod(READ_ONLY)
    for file in (folder / "model").iterdir():
        file.chmod(0o444)
    yield folder
    for each in (folder, *folder.rglob("*")):
        if each.is_dir():
            each.chmod(0o755)
    shutil.rmtree(folder)


@pytest.fixture
def call(room: Path, within: Within) -> Within:
    return partial(within, room)


def tokens(shown: str) -> object:
    """The token ids of the first answer of `--json`."""
    return json.loads(shown.splitlines()[0])["token_ids"]


def test_without_a_cache_to_write_everything_is_computed_again(room: Path, call: Within) -> None:
    # Without a template: another user may not start this interpreter where it is in a home folder.
    options = ("--model", "model", "-n", "12", "--json", "--raw", "The river")
    expected = call(run_main, *options)  # also imports all there is: others may not read these folders
    assert expected.returncode == 0
    shutil.rmtree(room / "cache")
    (room / "cache").mkdir()
    (room / "cache").chmod(READ_ONLY)
    with another_user():
        found = call(run_main, *options)
    assert found.returncode == 0, found.stderr
    assert "measuring this device" in found.stderr
    assert tokens(found.stdout) == tokens(expected.stdout)
    assert not list((room / "cache").iterdir())


def test_what_cannot_be_written_is_said_in_one_line_and_nothing_is_left(room: Path, call: Within) -> None:
    options = ("unpack", "demo.ssd.tar", "--out", "closed/bundle")
    assert call(bundle_main, "pack", str(bundle_path(Path("demo"))), "--out", "demo.ssd.tar").returncode == 0
    assert call(bundle_main, "unpack", "demo.ssd.tar", "--out", "open").returncode == 0
    (room / "cache").chmod(0o777)
    for each in (room / "cache").rglob("*"):
        each.chmod(0o777)
    with another_user():
        done = call(bundle_main, *options)
        with pytest.raises(PermissionError):
            write_atomically(room / "closed" / "kept", "changed")
        with pytest.raises(PermissionError), new_folder(room / "closed" / "new"):
            pass
    assert_refused(done, "closed.*Permission denied; check the path")
    assert [file.name for file in (room / "closed").iterdir()] == ["kept"]
    assert (room / "closed" / "kept").read_text() == "as it was"
