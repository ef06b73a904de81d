from __future__ import annotations

import errno
from pathlib import Path

import pytest

from ssd_artifacts.files import new_folder, write_atomically


def test_a_failed_write_leaves_nothing(tmp_path: Path) -> None:
    path = tmp_path / "f.txt"
    write_atomically(path, "old")
    with pytest.raises(TypeError):
        write_atomically(path, None)  # type: ignore[arg-type]
    assert path.read_text() == "old"
    assert list(tmp_path.iterdir()) == [path]


def test_a_folder_appears_whole_or_not_at_all(tmp_path: Path) -> None:
    path = tmp_path / "sub" / "folder"
    with pytest.raises(KeyboardInterrupt), new_folder(path) as folder:
        (folder / "a").write_text("half")
        raise KeyboardInterrupt
    assert list(path.parent.iterdir()) == []
    with new_folder(path) as folder:
        (folder / "a").write_text("whole")
    assert (path / "a").read_text() == "whole"


def test_a_full_disk_says_where(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def full(*_: object) -> None:
        raise OSError(errno.ENOSPC, "No space left on device")

    monkeypatch.setattr("os.chmod", full)
    with pytest.raises(OSError, match=r"No space left on device: .*f\.txt"):
        write_atomically(tmp_path / "f.txt", "x")
    monkeypatch.undo()
    with pytest.raises(OSError, match=r"No space left on device: .*folder"), new_folder(tmp_path / "folder"):
        full()
    assert list(tmp_path.iterdir()) == []
