"""`kill -9` at random moments, full disks and folders that cannot be written: nothing half-written counts as whole."""

from __future__ import annotations

import os
import resource
import signal
import time
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from random import Random

import numpy as np
import pytest

from ssd_artifacts.bundle import Bundle
from ssd_artifacts.integrity import SIGNATURE
from ssd_artifacts.sharing.archive import pack, unpack
from ssd_artifacts.sharing.opening import open_bundle
from ssd_artifacts.sharing.receiving import receive
from ssd_artifacts.sharing.reference import read_reference
from ssd_artifacts.sharing.registry import push_to_registry
from ssd_artifacts.sharing.signature import require_signature, sign
from tests.bundles import WIDTH, bundle
from tests.keys import key_pair

KILLS = int(os.environ.get("SSD_KILLS", "10"))
OLD, NEW = "0.1.0", "0.2.0"
"""Versions of the tool, by which the two bundles are told apart."""


def large(version: str) -> Bundle:
    """A bundle of some megabytes, so that a kill falls into the writing."""
    plain = bundle()
    rows = 40_000
    others = np.full((rows, WIDTH), 0.5, np.float16)
    anchors = replace(plain.anchors, others=others, other_labels=np.zeros(rows, np.int64))
    return replace(plain, tool_version=version, anchors=anchors)


@pytest.fixture
def room(tmp_path: Path) -> Path:
    """A folder with an old and a new bundle, both packed and signed."""
    private, _ = key_pair(tmp_path, "mine")
    for name, version in (("old", OLD), ("new", NEW)):
        large(version).save(tmp_path / name)
        sign(tmp_path / name, private)
        pack(tmp_path / name, tmp_path / f"{name}.ssd.tar")
    return tmp_path


def killed(work: Callable[[], object], seconds: float) -> bool:
    """Run `work` in a forked process that is killed after so many seconds; returns whether it ended before."""
    child = os.fork()
    if child == 0:
        try:
            work()
        finally:
            os._exit(0)
    time.sleep(seconds)
    os.kill(child, signal.SIGKILL)
    _, status = os.waitpid(child, 0)
    return os.WIFEXITED(status)


def torment(work: Callable[[int], object], check: Callable[[], str | None]) -> set[str | None]:
    """Kill `work(number)` at `KILLS` moments of the time that it takes; returns what `check` found after each."""
    began = time.perf_counter()
    work(0)
    whole = time.perf_counter() - began
    random = Random(KILLS)
    found = set()
    cut = 0
    for number in range(1, KILLS + 1):
        cut += not killed(lambda number=number: work(number), random.uniform(0, 1.2 * whole))  # type: ignore[misc]
        found.add(check())
    assert cut, "some were killed before they ended"
    return found


def version_at(folder: Path) -> str | None:
    """The version of the bundle in a folder; None where there is none. A damaged one raises."""
    return Bundle.load(folder).tool_version if folder.exists() else None


def test_a_killed_compile_leaves_the_old_bundle_or_the_new_one(room: Path) -> None:
    """The last stage of a compile, which writes the bundle."""
    new = large(NEW)
    out = room / "out"
    assert torment(lambda _: new.save(out), lambda: version_at(out)) <= {NEW, None}


def test_a_killed_unpack_leaves_the_old_bundle_or_the_new_one(room: Path) -> None:
    out = room / "out"
    new, old = (read_reference(str(room / f"{name}.ssd.tar")) for name in ("new", "old"))
    assert torment(lambda number: receive((new, old)[number % 2], out), lambda: version_at(out)) <= {OLD, NEW, None}
    receive(new, out)
    assert version_at(out) == NEW
    assert not list(room.glob(".out*")), "what the killed ones left is cleared"


def test_a_killed_pull_leaves_no_half_bundle(room: Path, host: str) -> None:
    reference = read_reference(f"oci://{host}/pulled:v1")
    push_to_registry(room / "new", reference, {})
    out = room / "out"
    assert torment(lambda _: receive(reference, out), lambda: version_at(out)) <= {NEW, None}
    receive(reference, out)
    assert version_at(out) == NEW
    assert not list(room.glob(".out*"))


def test_a_killed_push_leaves_the_old_tag_or_the_new_one(room: Path, host: str) -> None:
    reference = read_reference(f"oci://{host}/pushed:v1")
    push_to_registry(room / "old", reference, {})
    found = torment(
        lambda number: push_to_registry(room / ("new", "old")[number % 2], reference, {}),
        lambda: open_bundle(reference.text, room / "mine.pub").bundle.tool_version,
    )
    assert found <= {OLD, NEW}


def test_a_killed_pack_leaves_the_old_archive_or_the_new_one(room: Path) -> None:
    archive = room / "out.ssd.tar"

    def check() -> str | None:
        if not archive.exists():
            return None
        (room / "in").mkdir()
        unpack(archive, room / "in")
        found = version_at(room / "in")
        (room / "in").rename(room / f"in{time.time_ns()}")
        return found

    assert torment(lambda _: pack(room / "new", archive), check) <= {NEW, None}


def test_a_killed_signing_leaves_the_old_signature_or_the_new_one(room: Path) -> None:
    def check() -> str | None:
        require_signature(room / "new", room / "mine.pub", "new")
        return None

    torment(lambda _: sign(room / "new", room / "mine.pem"), check)
    assert (room / "new" / SIGNATURE).is_file()


def test_a_disk_that_is_full_leaves_the_old_bundle(room: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    out = room / "out"
    receive(read_reference(str(room / "old.ssd.tar")), out)
    before = sorted(path.name for path in room.iterdir())
    works = {
        "unpack": lambda: receive(read_reference(str(room / "new.ssd.tar")), out),
        "pack": lambda: pack(room / "new", room / "more.ssd.tar"),
        "compile": lambda: large(NEW).save(out),
    }
    usual = resource.getrlimit(resource.RLIMIT_FSIZE)
    handler = signal.signal(signal.SIGXFSZ, signal.SIG_IGN)
    for name, work in works.items():
        resource.setrlimit(resource.RLIMIT_FSIZE, (1 << 20, usual[1]))
        try:
            with pytest.raises(OSError, match="too large"):
                work()
        finally:
            resource.setrlimit(resource.RLIMIT_FSIZE, usual)
        assert sorted(path.name for path in room.iterdir()) == before, name
        assert version_at(out) == OLD
    signal.signal(signal.SIGXFSZ, handler)
