"""Which library is loaded: the wheel's for this processor, else a compiled one that no other user put there."""

from __future__ import annotations

import os
import shutil
import subprocess
import time
from collections.abc import Callable
from pathlib import Path

import pytest

from ssd_runtime.weights.native import forms
from ssd_runtime.weights.native import library as native
from ssd_runtime.weights.native.forms import FORMS, SOURCES, form_name
from ssd_runtime.weights.native.library import library, missing_note
from tests.compiled import seeded

OTHER = 12345
"""Another user's number."""
needs_root = pytest.mark.skipif(os.geteuid() != 0, reason="only root gives files away")
pytestmark = pytest.mark.skipif(library() is None, reason="needs AVX2 and a C compiler")


@pytest.fixture(scope="module")
def compiled(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A compiled library, under its name."""
    cache = tmp_path_factory.mktemp("compiled")
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("SSD_CACHE", seeded(cache))
        found = library.__wrapped__()
    assert found is not None
    # The present cache may have that of another form too, which tests of AVX2 compile.
    return cache / "native" / form_name(found.instructions.removesuffix("-"))


@pytest.fixture
def folder(compiled: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A cache's folder of libraries; the compiler is one that takes no time."""
    compiler = tmp_path / "compiler"
    compiler.write_text(f'#!/bin/sh\nwhile [ "$1" != -o ]; do shift; done\ncp {compiled} "$2"\n')
    compiler.chmod(0o700)
    monkeypatch.setenv("CC", str(compiler))
    monkeypatch.setenv("SSD_CACHE", str(tmp_path / "cache"))
    return tmp_path / "cache" / "native"


@pytest.fixture
def planted(compiled: Path, folder: Path) -> Path:
    """A library under the right name that leaves a file when it is loaded; the path of that file."""
    folder.mkdir(parents=True, mode=0o700)
    loaded = folder.parent / "loaded"
    code = f'#include <fcntl.h>\n__attribute__((constructor)) static void f(void) {{ creat("{loaded}", 0600); }}\n'
    command = ["gcc", "-shared", "-fPIC", "-x", "c", "-", "-o", str(folder / compiled.name)]
    subprocess.run(command, input=code, text=True, check=True)
    (folder / compiled.name).chmod(0o700)
    return loaded


def give_away_folder(kept: Path) -> None:
    os.chown(kept.parent, OTHER, OTHER)


def link_folder(kept: Path) -> None:
    kept.parent.rename(kept.parent.with_name("elsewhere"))
    kept.parent.symlink_to("elsewhere")


def link_file(kept: Path) -> None:
    shutil.move(kept, kept.parent.parent)
    kept.symlink_to(kept.parent.parent / kept.name)


PLANTS: dict[str, Callable[[Path], object]] = {
    "a folder that others may write to": lambda kept: kept.parent.chmod(0o777),
    "a folder that the group may write to": lambda kept: kept.parent.chmod(0o770),
    "a file that others may write to": lambda kept: kept.chmod(0o702),
    "a file that the group may write to": lambda kept: kept.chmod(0o720),
    "a link to a folder": link_folder,
    "a link to a file": link_file,
    "another user's folder": give_away_folder,
    "another user's file": lambda kept: os.chown(kept, OTHER, OTHER),
}


@pytest.mark.parametrize("plant", [pytest.param(name, marks=needs_root if "user" in name else ()) for name in PLANTS])
def test_what_another_user_may_have_planted_is_compiled_again(
    plant: str, folder: Path, planted: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    PLANTS[plant](next(folder.glob("*.so")))
    found = library.__wrapped__()
    assert found is not None
    assert not planted.exists()
    # Where the folder cannot be made the user's own, nothing is kept there, and a line says so.
    monkeypatch.setattr(native, "library", lambda: found)
    note = missing_note()
    if "link to a folder" in plant or "user's folder" in plant:
        assert note is not None
        assert str(folder) in note
    else:
        assert note is None
        assert folder.stat().st_mode & 0o777 == 0o700
        monkeypatch.setenv("CC", "false")
        assert library.__wrapped__() is not None
        assert not planted.exists()


def test_what_this_user_has_compiled_is_loaded(folder: Path, planted: Path) -> None:
    """The test's own library; it has none of the functions, so it is not the one that is found."""
    library.__wrapped__()
    assert planted.exists()


@pytest.mark.parametrize("kept", [0, 40, 1000, 60_000, 600_000, -1, None])
def test_a_library_that_ends_early_or_is_another_machines_is_compiled_again(
    folder: Path, compiled: Path, kept: int | None
) -> None:
    """To load most of those that end early would kill the process."""
    folder.mkdir(parents=True, mode=0o700)
    whole = compiled.read_bytes()
    other = whole[:18] + b"\xff\xff" + whole[20:]  # the kind of machine
    (folder / compiled.name).write_bytes(other if kept is None else whole[:kept])
    found = library.__wrapped__()
    assert found is not None
    assert found.note is None
    assert (folder / compiled.name).read_bytes() == whole


def test_a_compiler_may_come_with_arguments(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("CC", f"/usr/bin/env {os.environ['CC']}")
    assert library.__wrapped__() is not None


def test_a_compiler_that_is_older_than_the_processor_compiles_slower_code(
    folder: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    compiler = Path(os.environ["CC"])
    compiler.write_text(compiler.read_text().replace("\n", '\ncase "$*" in *-mavxvnni*) exit 1;; esac\n', 1))
    monkeypatch.setattr(native, "processor_flags", lambda: FORMS["avxvnni"].needed)
    assert library.__wrapped__() is not None
    assert [kept.name for kept in folder.iterdir()] == [form_name("avx2")]
    assert capsys.readouterr().err.count("note: compiling C code") == 1
    assert library.__wrapped__() is not None
    assert capsys.readouterr().err == "", "what is kept is loaded without a word"


def test_where_the_cache_cannot_be_written_code_is_compiled_for_this_run(
    folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("SSD_CACHE", "/proc/nowhere")
    found = library.__wrapped__()
    assert found is not None
    assert found.note is not None
    assert "/proc/nowhere/native" in found.note
    assert "set SSD_CACHE" in found.note


def test_folder_and_file_are_private_whatever_the_process_allows_others(folder: Path) -> None:
    before = os.umask(0)
    try:
        assert library.__wrapped__() is not None
    finally:
        os.umask(before)
    (kept,) = folder.iterdir()
    assert [path.stat().st_mode & 0o777 for path in (folder, kept)] == [0o700, 0o700]


@pytest.mark.parametrize("there", [False, True], ids=["compiled now", "compiled before"])
def test_a_start_removes_what_killed_ones_left_and_tells_of_a_compile(
    there: bool, folder: Path, compiled: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    folder.mkdir(parents=True, mode=0o700)
    if there:
        shutil.copy2(compiled, folder)
    left, running = folder / "tmpleft", folder / "tmprunning"
    for each in (left, running):
        each.mkdir()
        (each / "compiled.o").touch()
    before = time.time() - 7200
    os.utime(left, (before, before))
    assert library.__wrapped__() is not None
    assert not left.exists()
    assert running.exists()
    assert ("note: compiling C code" in capsys.readouterr().err) != there


ALL = FORMS["vnni"].needed


@pytest.mark.parametrize(
    ("flags", "setting", "form"),
    [
        (ALL, "1", "vnni"),
        (ALL, "avx2", "avx2"),
        *((ALL - {each}, "1", "avx2") for each in sorted(ALL - FORMS["avx2"].needed)),
        (ALL | FORMS["avxvnni"].needed, "1", "vnni"),
        (ALL | FORMS["avxvnni"].needed, "avxvnni", "avxvnni"),
        (FORMS["avxvnni"].needed, "1", "avxvnni"),
        (FORMS["neon"].needed, "1", "neon"),
    ],
)
def test_the_wheels_library_for_the_processor_is_loaded_and_none_is_compiled(
    flags: frozenset[str], setting: str, form: str, compiled: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("SSD_CACHE", str(tmp_path / "cache"))
    monkeypatch.setenv("CC", "false")
    monkeypatch.setenv("SSD_NATIVE", setting)
    monkeypatch.setattr(native, "processor_flags", lambda: flags)
    monkeypatch.setattr(native, "FOLDER", tmp_path)
    shutil.copy(compiled, tmp_path / form_name(form))
    assert library.__wrapped__() is not None
    assert not (tmp_path / "cache").exists()
    (tmp_path / form_name(form)).rename(tmp_path / "sublayers-of-other-sources.so")
    assert library.__wrapped__() is None


def test_every_source_and_flag_is_in_the_name_of_the_wheels_library(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    names = {form_name(form) for form in FORMS}
    for name in SOURCES:
        shutil.copy(forms.FOLDER / name, tmp_path)
    monkeypatch.setattr(forms, "FOLDER", tmp_path)
    assert {form_name(form) for form in FORMS} == names
    for name in SOURCES:
        with (tmp_path / name).open("a") as source:
            source.write("\n")
        names.add(form_name("vnni"))
    monkeypatch.setattr(forms, "FLAGS", ("-O1",))
    names.add(form_name("vnni"))
    assert len(names) == len(FORMS) + len(SOURCES) + 1
