"""Files appear whole or not at all, and a model is known by its files."""

from __future__ import annotations

import errno
import os
import time
from pathlib import Path

import numpy as np
import pytest
from safetensors.numpy import save_file

from ssd_artifacts.files import clear_leftovers, new_folder, write_atomically
from ssd_artifacts.fingerprint import config_sha256, file_digest, tokenizer_sha256, weight_hashes
from ssd_profiles.errors import UserError


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


def test_a_folder_that_is_not_replaced_is_still_there(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Ctrl-C comes when the old folder has been moved away and the new one is not yet in its place."""
    path, replace = tmp_path / "folder", os.replace
    path.mkdir()
    (path / "a").write_text("old")

    def interrupted(source: Path, target: Path) -> None:
        if ".new." in source.name:
            raise KeyboardInterrupt
        replace(source, target)

    monkeypatch.setattr("os.replace", interrupted)
    with pytest.raises(KeyboardInterrupt), new_folder(path) as folder:
        (folder / "a").write_text("new")
    assert (path / "a").read_text() == "old"
    assert list(tmp_path.iterdir()) == [path]


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
    (tmp_path / "f.txt").mkdir()
    with pytest.raises(IsADirectoryError) as error:
        write_atomically(tmp_path / "f.txt", "x")
    assert error.value.filename == str(tmp_path / "f.txt")


TENSORS = {f"layer.{i}.weight": np.arange(9000, dtype=np.float32) + i for i in range(3)}


class Words:
    def __init__(self, words: list[str]) -> None:
        self.words = words

    def get_vocab(self) -> dict[str, int]:
        return {word: i for i, word in enumerate(self.words)}

    def encode(self, text: str) -> list[int]:
        return [len(text)]


def test_sharding_does_not_matter_and_values_do(tmp_path: Path) -> None:
    one, two, three = tmp_path / "one.safetensors", tmp_path / "a.safetensors", tmp_path / "b.safetensors"
    save_file(TENSORS, one)
    save_file({name: TENSORS[name] for name in list(TENSORS)[2:]}, two)
    save_file({name: TENSORS[name] for name in list(TENSORS)[:2]}, three)
    assert weight_hashes([one]) == weight_hashes([three, two])
    changed = tmp_path / "changed.safetensors"
    middle = TENSORS["layer.1.weight"].copy()
    middle[2000] += 1  # outside the sampled slices
    save_file({**TENSORS, "layer.1.weight": middle}, changed)
    assert weight_hashes([changed]).full != weight_hashes([one]).full
    assert weight_hashes([changed]).sample == weight_hashes([one]).sample


def test_a_sample_has_the_beginning_middle_and_end_of_each_tensor_and_its_dtype(tmp_path: Path) -> None:
    found = list[str]()
    for number, place in enumerate((None, 0, 4600, 8999, None)):
        values = TENSORS["layer.1.weight"].copy()
        if place is not None:
            values[place] += 1
        path = tmp_path / f"{number}.safetensors"
        save_file({**TENSORS, "layer.1.weight": values if number < 4 else values.view(np.int32)}, path)
        found.append(weight_hashes([path]).sample)
    assert len(set(found)) == 5


def test_the_sample_alone_is_quick_and_the_full_hash_remembered(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    path = tmp_path / "m.safetensors"
    save_file(TENSORS, path)
    assert weight_hashes([path], full=False).full == ""
    full = weight_hashes([path])
    monkeypatch.setattr("ssd_artifacts.fingerprint._tensors", lambda _: pytest.fail("read again"))
    assert weight_hashes([path], full=False) == full


@pytest.mark.parametrize("cached", [True, False])
def test_a_file_that_is_rewritten_in_place_is_read_again(tmp_path: Path, cached: bool) -> None:
    """With the same name, size and time of modification, that of the last change says so; what is verified is read
    whatever it is."""
    path = tmp_path / "m.safetensors"
    found = list[tuple[int, str, str]]()
    for added in range(2):
        save_file({name: values + added for name, values in TENSORS.items()}, path)
        os.utime(path, ns=(1, 1))
        digest = file_digest(path, cached=cached)
        found.append((path.stat().st_size, weight_hashes([path], cached=cached).full, digest))
        time.sleep(0.05)  # clocks of disks tick slowly
    (size, full, digest), (same_size, other_full, other_digest) = found
    assert size == same_size
    assert full != other_full
    assert digest != other_digest


def test_a_users_own_folder_is_no_leftover(tmp_path: Path) -> None:
    backup, leftover = tmp_path / ".out.old.20250101", tmp_path / ".out.old.abcdefgh"
    (leftover / "out").mkdir(parents=True)
    backup.mkdir()
    (backup / "manifest.yaml").write_text("mine")
    clear_leftovers(tmp_path / "out")
    assert (backup / "manifest.yaml").read_text() == "mine"
    assert not leftover.exists()
    (leftover / "out").mkdir(parents=True)
    (tmp_path / "out" / "new").mkdir(parents=True, exist_ok=True)
    clear_leftovers(tmp_path / "out")
    assert (tmp_path / "out" / "new").exists(), "what was written since is not replaced"
    assert not leftover.exists()


def test_damaged_files_are_refused(tmp_path: Path) -> None:
    path = tmp_path / "m.safetensors"
    path.write_bytes(b"\xff" * 100)
    with pytest.raises(UserError, match="safetensors"):
        weight_hashes([path])


def test_what_a_configuration_says_about_loading_does_not_count() -> None:
    base = {"hidden_size": 8, "dtype": "float32", "transformers_version": "5.0"}
    assert config_sha256(base) == config_sha256({**base, "dtype": "bfloat16", "transformers_version": "5.1"})
    # What users set when they load a model, and what another release of transformers adds.
    assert config_sha256(base) == config_sha256({**base, "pad_token_id": 2, "output_attentions": True, "new": None})
    assert config_sha256(base) == config_sha256({**base, "rope_scaling": None}), "as if it were not there"
    assert config_sha256(base) != config_sha256({**base, "hidden_size": 9})


def test_tokenizers_differ_by_vocabulary_and_template() -> None:
    one = tokenizer_sha256(Words(["a", "b"]), None)
    assert one == tokenizer_sha256(Words(["a", "b"]), None)
    assert len({one, tokenizer_sha256(Words(["b", "a"]), None), tokenizer_sha256(Words(["a", "b"]), "{{x}}")}) == 3
