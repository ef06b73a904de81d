"""The README's commands must work, and all that the guide lists must be there."""

from __future__ import annotations

import re
from dataclasses import fields
from pathlib import Path

import pytest

from ssd_artifacts.reference_bundle import bundle_path
from ssd_runtime.planning.registry import SETTINGS
from ssd_runtime.profiling import latency

ROOT = Path(__file__).parents[2]
README = ROOT / "README.md"


def test_the_guide_has_every_parameter_with_its_default() -> None:
    text = (ROOT / "docs" / "guide" / "run.md").read_text(encoding="utf-8")
    rows = re.findall(r"^\| `(\w+)` \| `(\w+)` \| `(\S+)` \| .+ \|$", text, re.MULTILINE)
    for strategy, kind in SETTINGS.items():
        there = {each.name: each.default for each in fields(kind)}
        written = {name: value if isinstance(value, str) else f"{value:g}" for name, value in there.items()}
        assert {name: value for owner, name, value in rows if owner == strategy} == written, strategy


def test_the_texts_list_every_variable_of_the_environment_that_is_read() -> None:
    def read_by(*places: str) -> set[str]:
        sources = [file.read_text(encoding="utf-8") for place in places for file in (ROOT / place).rglob("*.py")]
        return {name for source in sources for name in re.findall(r'"(SSD_[A-Z_]+)"', source)}

    def table(page: str) -> set[str]:
        return set(re.findall(r"^\| `(SSD_\w+)` \|", (ROOT / page).read_text(encoding="utf-8"), re.MULTILINE))

    packages = read_by("profiles", "artifacts", "runtime", "compiler")
    assert table("docs/guide/README.md") == packages
    assert table("CONTRIBUTING.md") == read_by("tests") - packages


@pytest.mark.model
def test_the_python_example_answers(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    example = re.search(r"```python\n(.*?)```", README.read_text(encoding="utf-8"), re.DOTALL)
    assert example is not None
    monkeypatch.delenv("SSD_CACHE")  # where the converted model is
    monkeypatch.setattr(latency, "remember", lambda *_: None)
    monkeypatch.chdir(tmp_path)
    Path("bundle").symlink_to(bundle_path(Path("demo")))
    exec(compile(example[1], str(README), "exec"), {})
    assert len(capsys.readouterr().out.split()) > 5
