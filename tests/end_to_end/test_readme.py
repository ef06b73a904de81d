"""What the README shows must work."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

from ssd_artifacts.reference_bundle import bundle_path
from ssd_runtime import profiler

README = Path(__file__).parents[2] / "README.md"


@pytest.mark.model
def test_the_python_example_answers(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    example = re.search(r"```python\n(.*?)```", README.read_text(encoding="utf-8"), re.DOTALL)
    assert example is not None
    monkeypatch.delenv("SSD_CACHE")  # where the converted model is
    monkeypatch.setattr(profiler, "remember", lambda *_: None)
    monkeypatch.chdir(tmp_path)
    Path("bundle").symlink_to(bundle_path(Path("demo")))
    exec(compile(example[1], str(README), "exec"), {})
    assert len(capsys.readouterr().out.split()) > 5
