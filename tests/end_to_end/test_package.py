"""The sdist and the wheel, built and installed as users do."""

from __future__ import annotations

import json
import platform
import shutil
import tarfile
import zipfile
from pathlib import Path

import pytest
from gguf import GGMLQuantizationType as Type

from ssd_runtime import Engine, RunSettings
from ssd_runtime.weights.native.forms import COMPILERS, FORMS, form_name
from ssd_runtime.weights.native.library import library
from tests.folders import save_tiny_model
from tests.gguf_files import SIZES, save_gguf
from tests.models import tiny_model
from tests.packages import ROOT, CleanEnvironment, build, build_wheel, required

PACKAGES = ("profiles/ssd_profiles", "artifacts/ssd_artifacts", "runtime/ssd_runtime", "compiler/ssd_compiler")
LIBRARIES = {
    f"ssd_runtime/weights/native/{form_name(name)}"
    for name, form in FORMS.items()
    if form.machine == platform.machine()
}
VOCABULARY = {
    "tokenizer.ggml.tokens": [*(chr(ord("!") + number) for number in range(SIZES["vocab_size"] - 1)), "!!"],
    "tokenizer.ggml.merges": ["! !"],
}
"""Letters, and two of them as one token."""
DECODE = """
import json, os, sys
import ssd_artifacts, ssd_compiler, ssd_profiles, ssd_runtime
from ssd_runtime import Engine, RunSettings
for setting in ("1", "avx2"):
    if os.fork():
        assert os.wait()[1] == 0
        continue
    os.environ["SSD_NATIVE"] = setting
    engine = Engine.open(model=sys.argv[1], weights="packed", draft_bits="none")
    [answer] = engine.generate(["abc"], RunSettings(max_new_tokens=8, strategy="plain"))
    with open("/proc/self/maps") as mapped:
        loaded = {line.split()[-1] for line in mapped if "sublayers" in line}
    print(json.dumps([answer.generation.token_ids, list(loaded)]), flush=True)
    os._exit(0)
print(json.dumps([each.__file__ for each in (ssd_artifacts, ssd_compiler, ssd_profiles, ssd_runtime)]))
"""
"""Prints token ids and the files of our own C code that the process has in its memory, for two settings of
`SSD_NATIVE`; then where the packages are."""


@pytest.fixture(scope="module")
def built(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, Path]:
    return build(tmp_path_factory.mktemp("dist"))


@pytest.fixture(scope="module")
def clean(tmp_path_factory: pytest.TempPathFactory, built: tuple[Path, Path]) -> CleanEnvironment:
    return CleanEnvironment(tmp_path_factory.mktemp("clean"), built[1])


def test_the_wheel_holds_every_file_of_the_packages(built: tuple[Path, Path]) -> None:
    with zipfile.ZipFile(built[1]) as wheel:
        inside = {name for name in wheel.namelist() if ".dist-info/" not in name}
    there = {
        str(file.relative_to((ROOT / package).parent))
        for package in PACKAGES
        for file in (ROOT / package).rglob("*")
        if file.is_file() and "__pycache__" not in file.parts
    }
    assert inside == there | LIBRARIES
    assert "-py3-none-manylinux_2_" in built[1].name
    for needed in (
        "ssd_runtime/weights/native/sublayers.c",
        "ssd_runtime/weights/native/products.h",
        "ssd_runtime/weights/native/avx2.h",
        "ssd_profiles/domains/gsm8k.yaml",
        "ssd_profiles/starter/gsm8k.jsonl",
        "ssd_artifacts/reference/demo/manifest.yaml",
        *(f"{Path(package).name}/py.typed" for package in PACKAGES),
    ):
        assert needed in inside


@pytest.mark.parametrize(("name", "value"), [("SSD_BUILD_NATIVE", "0"), ("CC", "false")])
def test_a_wheel_can_be_built_without_a_compiler(
    name: str, value: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv(name, value)
    wheel = build_wheel(ROOT, tmp_path)
    assert wheel.name.endswith("-py3-none-any.whl")
    assert not [name for name in zipfile.ZipFile(wheel).namelist() if name.endswith(".so")]


def test_the_sdist_can_be_tested(built: tuple[Path, Path]) -> None:
    with tarfile.open(built[0]) as sdist:
        inside = {name.partition("/")[2] for name in sdist.getnames()}
    assert {"LICENSE", "README.md", "Makefile", "constraints.txt", "tests/end_to_end/test_package.py"} <= inside


def test_the_installed_wheel_decodes(clean: CleanEnvironment, tmp_path: Path) -> None:
    model = save_tiny_model(tmp_path / "model")
    done = clean.run("ssd-run", "--version", cache=tmp_path / "cache")
    assert done.stdout.startswith("ssd-decoding "), done.stderr
    done = clean.run("ssd-run", "-m", str(model), "-n", "8", "--json", "The river", cache=tmp_path / "cache")
    assert done.returncode == 0, done.stderr
    assert json.loads(done.stdout.splitlines()[0])["new_tokens"] == 8


def test_the_installed_wheel_decodes_packed_weights_without_a_compiler(clean: CleanEnvironment, tmp_path: Path) -> None:
    """On a library of the wheel, with the token ids of the library that the sources are compiled to here."""
    if (ours := library()) is None:
        pytest.skip("needs AVX2")
    save_gguf(tmp_path / "model.gguf", tiny_model("llama", **SIZES), Type.Q4_1, VOCABULARY)
    assert not any(shutil.which(name, path=str(clean.folder / "bin")) for name in COMPILERS)
    done = clean.run("python", "-c", DECODE, str(tmp_path / "model.gguf"), cache=tmp_path / "cache")
    assert done.returncode == 0, done.stderr
    *told, modules = map(json.loads, done.stdout.splitlines())
    assert all(Path(file).is_relative_to(clean.packages) for file in modules)
    engine = Engine.open(model=str(tmp_path / "model.gguf"), weights="packed", draft_bits="none")
    [answer] = engine.generate(["abc"], RunSettings(max_new_tokens=8, strategy="plain"))
    for form, (token_ids, loaded) in zip((ours.instructions.removesuffix("-"), "avx2"), told, strict=True):
        assert loaded == [str(clean.packages / "ssd_runtime" / "weights" / "native" / form_name(form))]
        assert token_ids == answer.generation.token_ids


def test_a_compile_without_its_libraries_says_what_to_install(
    built: tuple[Path, Path], clean: CleanEnvironment, tmp_path: Path
) -> None:
    assert "scikit-learn" not in clean.distributions
    assert {"scikit-learn", "bayesian-optimization"} <= required(built[1], frozenset({"compile"}))
    done = clean.run("ssd-compile", "-m", "demo", "--domains", "gsm8k", cache=tmp_path / "cache")
    assert done.returncode == 2
    assert done.stderr.count("\n") == 1
    assert "pip install '.[compile]'" in done.stderr
    done = clean.run("ssd-serve", "-m", "demo", cache=tmp_path / "cache")
    assert done.returncode == 2
    assert "pip install '.[serve]'" in done.stderr
