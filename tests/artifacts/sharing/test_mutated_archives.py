"""Mutated archives: what is accepted differs from the bundle in free text alone, or names another model by its hash."""

from __future__ import annotations

import re
from collections.abc import Iterator
from pathlib import Path
from random import Random
from typing import Any

from ssd_artifacts.bundle import Bundle
from ssd_artifacts.integrity import SIGNATURE
from ssd_artifacts.manifest import MANIFEST
from ssd_artifacts.sharing.archive import pack, unpack
from ssd_profiles.errors import UserError
from tests.bundles import bundle
from tests.damage import contents, load

MUTATIONS = 300
TEXTS = frozenset({"tool_version", "created", "name", "revision", "architecture", "dtype", "quantization"})
"""Fields of the manifest that are shown, or compared with the model; a change costs speed at most."""
HASHED = re.compile(r"(weights|weights_sample|config|tokenizer)_sha256")
"""The model by its content: another hash is that of another model, and the bundle is refused for this one."""
CHARACTERS = b"0123456789abcdef :-'\"{}[]#&*!|>%\n"


def mutated(content: bytes, random: Random) -> bytes:
    """The archive with one to four changes, half of them in its manifest."""
    changed = bytearray(content)
    for _ in range(random.choice((1, 1, 2, 4))):
        place = random.randrange(512, 2048) if random.random() < 0.5 else random.randrange(len(changed))
        length = random.choice((1, 2, 16, 512))
        kind = random.choice(("bit", "byte", "character", "zero", "cut", "double", "insert", "swap"))
        if kind == "bit":
            changed[place] ^= 1 << random.randrange(8)
        elif kind == "byte":
            changed[place] = random.randrange(256)
        elif kind == "character":
            changed[place] = random.choice(CHARACTERS)
        elif kind == "zero":
            changed[place : place + length] = bytes(length)
        elif kind == "cut":
            del changed[place : place + length]
        elif kind == "double":
            changed[place:place] = changed[place : place + length]
        elif kind == "insert":
            changed.insert(place, random.choice(CHARACTERS))
        else:
            other = random.randrange(len(changed))
            changed[place], changed[other] = changed[other], changed[place]
    return bytes(changed)


def differences(before: dict[str, bytes], after: dict[str, bytes]) -> Iterator[tuple[str, Any]]:
    """Names of the files, and fields of the manifest, in which two bundles differ, with the later values."""
    for name in before.keys() | after.keys():
        if name != MANIFEST and before.get(name) != after.get(name):
            yield name, after.get(name)
    old, new = load(before[MANIFEST].decode()), load(after[MANIFEST].decode())
    for part, other in ((old.pop("model"), new.pop("model")), (old, new)):
        yield from ((name, other.get(name)) for name in part.keys() | other.keys() if part.get(name) != other.get(name))


def test_what_is_accepted_differs_in_free_text_alone(tmp_path: Path) -> None:
    bundle().save(tmp_path / "bundle")
    (tmp_path / "bundle" / SIGNATURE).write_text("signed")
    pack(tmp_path / "bundle", tmp_path / "whole.ssd.tar")
    content, before = (tmp_path / "whole.ssd.tar").read_bytes(), contents(tmp_path / "bundle")
    accepted = 0
    for seed in range(MUTATIONS):
        folder, archive = tmp_path / f"in{seed}", tmp_path / "mutated.ssd.tar"
        folder.mkdir()
        archive.write_bytes(mutated(content, Random(seed)))
        try:
            unpack(archive, folder)
            Bundle.load(folder)
        except UserError:
            continue
        accepted += 1
        for place, value in differences(before, contents(folder)):
            if HASHED.fullmatch(place):
                assert re.fullmatch("[0-9a-f]{64}", value), (seed, place, value)
            else:
                assert place in TEXTS or place == SIGNATURE, (seed, place, value)
    assert accepted, "the law was put to the test"
