"""A bundle as one file: a plain tar archive whose bytes depend on the bundle alone.

Nothing is compressed, so that an archive cannot expand, and its bytes do not depend on a version of zlib. The manifest
comes first, then the other files by name, each a regular file of the same mode, owner and date.
"""

from __future__ import annotations

import os
import shutil
import tarfile
from collections.abc import Iterator
from pathlib import Path
from typing import BinaryIO

from ssd_artifacts.files import new_file
from ssd_artifacts.integrity import MAX_SIGNATURE_BYTES, SIGNATURE, check_files, read_manifest
from ssd_artifacts.manifest import MANIFEST, REPORT_PAGE
from ssd_artifacts.texts import MAX_TEXT_BYTES
from ssd_profiles.errors import UserError

_CHUNK = 1 << 20


def pack(folder: Path, archive: Path) -> None:
    """Write a bundle's folder as `archive`, whole or not at all. Raises UserError when the bundle is damaged."""
    manifest = read_manifest(folder)
    check_files(folder, manifest)
    with new_file(archive) as file:
        for name in travelling_files(folder):
            path = folder / name
            file.write(_header(name, path.stat().st_size))
            with path.open("rb") as content:
                shutil.copyfileobj(content, file)
            file.write(bytes(-file.tell() % tarfile.BLOCKSIZE))
        file.write(_end(file.tell()))


def travelling_files(folder: Path) -> list[str]:
    """Names of a bundle's files that are packed and pushed, in order: never a page that was made elsewhere."""
    listed = sorted(set(read_manifest(folder).files) - {REPORT_PAGE})
    signature = [SIGNATURE] if (folder / SIGNATURE).is_file() else []
    return [MANIFEST, *signature, *listed]


def unpack(archive: Path, folder: Path) -> None:
    """Write the bundle of an archive into an empty folder, and check it against its manifest.

    Raises UserError for anything that `pack` does not write: links, compressed or sparse members, other names, orders,
    modes or sizes than the manifest says. No byte is written for a member before its name and size are known.
    """
    if not archive.is_file():
        raise UserError(f"{archive}: no such archive; give a file that ssd-bundle pack wrote")
    with archive.open("rb") as file:
        size = os.fstat(file.fileno()).st_size
        entries = _entries(file, archive)
        name, length = next(entries, ("", 0))
        if name != MANIFEST or length > MAX_TEXT_BYTES:
            raise _refused(archive, f"it does not begin with {MANIFEST}")
        _copy(file, folder / MANIFEST, length, archive)
        manifest = read_manifest(folder)
        expected = sorted(set(manifest.files) - {REPORT_PAGE})
        for name, length in entries:
            if name == SIGNATURE and length <= MAX_SIGNATURE_BYTES and not (folder / SIGNATURE).exists():
                _copy(file, folder / name, length, archive)
                continue
            if not expected or name != expected.pop(0):
                raise _refused(archive, f"unexpected {name!r}")
            if length != manifest.files[name].bytes or length > size:
                raise _refused(archive, f"{name} is not as long as the manifest says")
            (folder / name).parent.mkdir(exist_ok=True)
            _copy(file, folder / name, length, archive)
        if expected:
            raise _refused(archive, f"{expected[0]} is missing")
    check_files(folder, manifest)


def _entries(file: BinaryIO, archive: Path) -> Iterator[tuple[str, int]]:
    """Names and sizes of the members. The caller reads a member's content before it asks for the next one."""
    while True:
        header = file.read(tarfile.BLOCKSIZE)
        if header == bytes(tarfile.BLOCKSIZE):
            break
        try:
            member = tarfile.TarInfo.frombuf(header, "utf-8", "strict")
            # Links, devices, sparse files, extended headers, other owners, modes and dates all differ here.
            plain = member.isreg() and header == _header(member.name, member.size)
        except (tarfile.TarError, ValueError):
            plain = False
        if not plain:
            raise _refused(archive, "a member is no plain file, or the file is cut short")
        yield member.name, member.size
        padding = -file.tell() % tarfile.BLOCKSIZE
        if file.read(padding) != bytes(padding):
            raise _refused(archive, "something stands between two members")
    begin = file.tell() - tarfile.BLOCKSIZE
    if file.read(tarfile.RECORDSIZE + 1) != _end(begin)[tarfile.BLOCKSIZE :]:
        raise _refused(archive, "something stands after its end")


def _copy(file: BinaryIO, target: Path, length: int, archive: Path) -> None:
    with target.open("xb") as out:
        left = length
        while left:
            chunk = file.read(min(left, _CHUNK))
            if not chunk:
                raise _refused(archive, "it is cut short")
            out.write(chunk)
            left -= len(chunk)


def _header(name: str, size: int) -> bytes:
    member = tarfile.TarInfo(name)
    member.size = size
    return member.tobuf(tarfile.USTAR_FORMAT, "utf-8", "strict")


def _end(position: int) -> bytes:
    """The zeros after the last member, which fill a record as tar writes it."""
    blocks = 2 * tarfile.BLOCKSIZE
    return bytes(blocks + -(position + blocks) % tarfile.RECORDSIZE)


def archive_bytes(folder: Path) -> int:
    """Size of the archive that `pack` would write."""
    sizes = [(folder / name).stat().st_size for name in travelling_files(folder)]
    content = sum(tarfile.BLOCKSIZE + size + -size % tarfile.BLOCKSIZE for size in sizes)
    return content + len(_end(content))


def _refused(archive: Path, why: str) -> UserError:
    return UserError(f"{archive}: not an archive of ssd-bundle pack ({why}); fetch it again or pack the bundle again")
