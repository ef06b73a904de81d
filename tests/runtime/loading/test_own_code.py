"""No code of a model folder runs, whatever its files say and whatever stands on standard input."""

from __future__ import annotations

import ast
import io
import re
from pathlib import Path

import pytest
import torch

from ssd_profiles.errors import UserError
from ssd_runtime.loading.models import load_model
from tests.folders import save_tiny_model
from tests.own_code import UNUSED, WAYS, with_own_code

ROOT = Path(__file__).parents[3]
PARTS = ("profiles", "artifacts", "runtime", "compiler", "bench", "examples")
RECIPE = "runtime/ssd_runtime/serving/generate/recipe"
"""What transformers itself runs, for users who have asked it to."""


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return save_tiny_model(tmp_path_factory.mktemp("own_code") / "model", weak=0)


@pytest.fixture
def yes(monkeypatch: pytest.MonkeyPatch) -> io.StringIO:
    """Standard input on which the user agrees to everything."""
    answers = io.StringIO("y\n" * 20)
    monkeypatch.setattr("sys.stdin", answers)
    return answers


@pytest.mark.parametrize("way", WAYS)
def test_a_folder_that_needs_its_code_is_refused(model: Path, tmp_path: Path, yes: io.StringIO, way: str) -> None:
    copied = tmp_path / "own"
    (tmp_path / "model").symlink_to(model)
    mark = with_own_code(model, copied, WAYS[way])
    with pytest.raises(UserError) as refused:
        load_model(str(copied), "cpu")
    assert not mark.exists()
    assert yes.tell() == 0, "nothing was asked"
    assert str(refused.value).startswith(f"{copied}: ")
    assert re.search(r"which is never run|is no tokenizer|distributed|nor an index|no such file", str(refused.value))


@pytest.mark.parametrize("way", UNUSED)
def test_code_that_is_not_needed_is_not_run(model: Path, tmp_path: Path, yes: io.StringIO, way: str) -> None:
    mark = with_own_code(model, tmp_path / "own", UNUSED[way])
    ids = torch.tensor([[5, 6, 7, 8]])
    loaded = load_model(str(tmp_path / "own"), "cpu")
    assert torch.equal(loaded.model(ids).logits, load_model(str(model), "cpu").model(ids).logits)
    assert loaded.model.generate.__func__ is type(loaded.model).generate
    assert loaded.model.config._attn_implementation in ("sdpa", "eager")
    assert not mark.exists()
    assert yes.tell() == 0


def test_nothing_of_ours_lets_transformers_run_a_folders_code() -> None:
    """Every call that could says no, also in the programs that stand in texts."""
    for path in (each for part in PARTS for each in (ROOT / part).rglob("*.py")):
        if str(path.relative_to(ROOT)).startswith(RECIPE):
            continue
        text = path.read_text()
        for node in ast.walk(ast.parse(text)):
            if isinstance(node, ast.Call) and isinstance(node.func, ast.Attribute):
                _require_untrusting(path, node)
            if isinstance(node, ast.Constant) and isinstance(node.value, str) and "\nimport" in node.value:
                for line in re.findall(r".*\bfrom_(?:pretrained|config)\(.*", node.value):
                    assert "trust_remote_code=False" in line, (path, line)
        assert not re.search(r"\btorch\.load\(|\bpickle\b.*\bload|\bweights_only=False", text), path


def _require_untrusting(path: Path, call: ast.Call) -> None:
    assert isinstance(call.func, ast.Attribute)
    trust = {word.arg: word.value for word in call.keywords}.get("trust_remote_code")
    if call.func.attr in ("from_pretrained", "from_config") and ast.unparse(call.func.value).startswith("Auto"):
        assert trust is not None, (path, call.lineno)
    if trust is not None:
        assert isinstance(trust, ast.Constant), (path, call.lineno)
        assert trust.value is False, (path, call.lineno)
