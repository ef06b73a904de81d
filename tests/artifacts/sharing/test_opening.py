"""Bundles are opened from wherever they are, and what is not reachable is said."""

from __future__ import annotations

import os
import socket
from pathlib import Path
from typing import Any

import pytest

from ssd_artifacts.bundle import Bundle
from ssd_artifacts.integrity import ORIGIN
from ssd_artifacts.sharing import reachable as module
from ssd_artifacts.sharing.archive import pack
from ssd_artifacts.sharing.opening import open_bundle, open_given, trusted_bundle
from ssd_artifacts.sharing.reachable import reachable
from ssd_compiler.bundles.summary import origin_text
from ssd_profiles.errors import UserError
from ssd_profiles.printable import printable
from tests.bundles import bundle


def linked(saved: Path, folder: Path, blobs: Path) -> None:
    """The bundle as links to its files under other names."""
    blobs.mkdir(parents=True)
    for number, file in enumerate(sorted(path for path in saved.rglob("*") if path.is_file())):
        os.replace(file, blobs / str(number))
        link = folder / file.relative_to(saved)
        link.parent.mkdir(parents=True, exist_ok=True)
        link.symlink_to(os.path.relpath(blobs / str(number), link.parent))


def test_a_snapshot_of_the_hubs_cache_is_a_bundle(saved: Path, tmp_path: Path) -> None:
    repository = tmp_path / "models--org--name"
    linked(saved, repository / "snapshots" / "abc", repository / "blobs")
    assert open_bundle(repository / "snapshots" / "abc").bundle.domains == bundle().domains
    (tmp_path / "shortcut").symlink_to(repository / "snapshots" / "abc")
    assert Bundle.load(tmp_path / "shortcut").domains == bundle().domains


def test_links_to_anywhere_else_are_refused(saved: Path, tmp_path: Path) -> None:
    """Also to blobs that lie as a snapshot's do, beside a folder of another name."""
    linked(saved, tmp_path / "folders" / "abc", tmp_path / "blobs")
    with pytest.raises(UserError, match="a link out of the bundle"):
        open_bundle(tmp_path / "folders" / "abc")


def test_only_a_bundle_of_ones_own_decides_how_the_model_is_loaded(saved: Path, tmp_path: Path) -> None:
    """A `.gguf` file that stays packed has other output than its dense form."""
    pack(saved, tmp_path / "b.ssd.tar")
    assert trusted_bundle(open_given(saved)) is not None
    assert trusted_bundle(open_given(tmp_path / "b.ssd.tar")) is None
    assert trusted_bundle(open_given(None)) is None


@pytest.mark.parametrize("text", ["a\x1b[2Jb", "a\x07b", "a\x9b31mb", "a\u202eb", "a\x00b", "a\udcffb"])
def test_no_error_carries_what_a_terminal_obeys(text: str) -> None:
    assert str(UserError(text)) == f"a?{text[2:]}"
    assert printable(text).isprintable()


def test_no_origin_carries_it_either(saved: Path) -> None:
    (saved / ORIGIN).write_text('source: "\\e]0;owned\\a"\nrevision: a\nreceived: b\n')
    with pytest.raises(UserError, match="source"):
        origin_text(saved)


def test_an_error_keeps_the_letters_of_all_languages() -> None:
    assert str(UserError("Größe: 日本語 — “x”\n  next")) == "Größe: 日本語 — “x” next"


HUB = "https://hub.example"


@pytest.mark.parametrize(
    ("environment", "address"),
    [
        ({}, ("hub.example", 443)),
        ({"https_proxy": "http://proxy.example:3128"}, ("proxy.example", 3128)),
        ({"https_proxy": "proxy.example:3128"}, ("proxy.example", 3128)),
        ({"https_proxy": "proxy.example:3128", "no_proxy": ".example"}, ("hub.example", 443)),
    ],
)
def test_a_proxy_counts_where_it_is_used(
    environment: dict[str, str], address: tuple[str, int], monkeypatch: pytest.MonkeyPatch
) -> None:
    for name in ("https_proxy", "HTTPS_PROXY", "no_proxy", "NO_PROXY", "all_proxy", "ALL_PROXY"):
        monkeypatch.delenv(name, raising=False)
    for name, value in environment.items():
        monkeypatch.setenv(name, value)
    asked = list[Any]()

    def connect(place: Any, timeout: float) -> Any:
        asked.append(place)
        raise OSError

    monkeypatch.setattr(module, "socket", type("socket", (), {"create_connection": staticmethod(connect)}))
    assert not reachable(HUB)
    assert asked == [address]
    assert socket.create_connection is not connect
