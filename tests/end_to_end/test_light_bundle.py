"""A compile that chooses a precision for each sub-layer, and decoding with what it found."""

from __future__ import annotations

import io
import json
import shutil
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch
from rich.console import Console
from transformers import AutoModelForCausalLM

from ssd_artifacts.bundle import Bundle
from ssd_artifacts.integrity import read_manifest
from ssd_compiler.build import compile_bundle
from ssd_compiler.bundles.summary import summary_text
from ssd_compiler.progress import Reporter
from ssd_compiler.settings import CompileSettings
from ssd_profiles.light_costs import LightCosts
from ssd_profiles.mask import SubLayerPlan
from ssd_runtime.engine.engine import Engine
from ssd_runtime.engine.turn import RunSettings
from ssd_runtime.model.decoder import Decoder
from ssd_runtime.weights.draft_bits import DraftBits
from tests.folders import TEXTS, save_tiny_model, write_prompts
from tests.tables import latency_table, table_of, with_light_costs

LAYERS = 8


@pytest.fixture(scope="module")
def room(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Path]:
    """A folder with a model and prompts, where copies of small models are made as well."""
    folder = tmp_path_factory.mktemp("room")
    save_tiny_model(folder / "model")
    write_prompts(folder / "rivers.jsonl", TEXTS[0], 12)
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("SSD_CACHE", str(folder / "cache"))
        patch.setattr("ssd_runtime.profiling.kernel_choice.SMALL_BYTES", 0)
        # Steps of tiny models take the same time in every precision, and most of it outside their blocks, so that what
        # the search finds would be chance.
        patch.setattr("ssd_compiler.stages.measure_latency", table_of)
        patch.setattr("ssd_compiler.patience.others_during", lambda _: 0.0)
        patch.setattr("ssd_runtime.profiling.light.measure_light", lambda decoder, *_: (costs(decoder), True))
        yield folder


def costs(decoder: Decoder) -> dict[int, LightCosts]:
    """Made-up costs of the decoder's copies.

    8 bits save a fifth of the time and 4 bits three fifths, so that the frontier has masks of both whatever the
    processor's rounding makes of their agreement.
    """
    table = with_light_costs(latency_table(LAYERS), 0.2, (8, 4))
    return {bits: table.light[bits] for bits in decoder.light.bits}


def compiled(room: Path, bits: DraftBits, model: str = "model", evaluations: int = 8) -> tuple[Path, str]:
    said = io.StringIO()
    settings = CompileSettings(
        model=str(room / model),
        domains=(),
        domain_files=(("rivers", str(room / "rivers.jsonl")),),
        device="cpu",
        draft_bits=bits,
        evaluations=evaluations,
        search_prompts=4,
        validation_prompts=3,
        max_new_tokens=24,
    )
    out = room / f"bundle-{bits}-{model}"
    compile_bundle(settings, out, False, Reporter(Console(file=said, width=200)))
    return out, said.getvalue()


@pytest.fixture(scope="module")
def mixed(room: Path) -> tuple[Path, str]:
    return compiled(room, "auto", evaluations=24)


def test_the_bundle_says_what_runs_at_which_precision(mixed: tuple[Path, str]) -> None:
    out, said = mixed
    assert "drafts may run on copies of the weights with fewer bits, which take up to" in said
    assert read_manifest(out).format_version == 2
    bundle = Bundle.load(out)
    [config] = bundle.domains.values()
    masks = [entry.sub_layer_plan(LAYERS) for entry in config.frontier]
    assert {bits for mask in masks for bits in mask.light} >= {8, 4}
    assert any(not mask.light for mask in masks), "for devices without copies"
    assert {"light", "knapsack"} <= {origin for _, origin, _ in config.search.rated}
    [table] = bundle.latency.values()
    assert set(table.light) == {8, 4}
    for mask in masks:
        assert table.draft_cost(mask, config.context) > 0
    page = (out / "report.html").read_text()
    assert "MLP, 8 bits" in page
    assert "mixer (full), 4 bits" in page
    chosen = config.frontier[config.choice.entry].sub_layer_plan(LAYERS) if config.choice else SubLayerPlan.of(LAYERS)
    assert ("fill-opacity" in page) == bool(chosen.light or list(chosen))
    assert ("lighter" in summary_text(bundle, out)) == bool(chosen.light)


@pytest.mark.parametrize(("draft_bits", "strategy"), [("auto", "knn"), ("none", "fixed:rivers")])
def test_decoding_with_it_is_plain_decoding_with_copies_and_without(
    mixed: tuple[Path, str], draft_bits: DraftBits, strategy: str
) -> None:
    engine = Engine.open(mixed[0], draft_bits=draft_bits)
    plain, got = (engine.generate(TEXTS, RunSettings(name, max_new_tokens=40)) for name in ("plain", strategy))
    assert [each.generation.token_ids for each in got] == [each.generation.token_ids for each in plain]
    assert engine.decoder.light.bits == ((8, 4) if draft_bits == "auto" else ()), "what the bundle's masks ask for"


def test_a_model_of_16_bits_has_light_masks_too(room: Path) -> None:
    """Its weights are in no packed copies: our own code reads them where they are."""
    sixteen = shutil.copytree(room / "model", room / "sixteen")
    AutoModelForCausalLM.from_pretrained(sixteen, dtype=torch.bfloat16).save_pretrained(sixteen)
    out, _ = compiled(room, "auto", "sixteen")
    [config] = Bundle.load(out).domains.values()
    assert any(entry.sub_layer_plan(LAYERS).light for entry in config.frontier)


def test_without_copies_a_bundle_is_what_it_was(room: Path) -> None:
    out, said = compiled(room, "none")
    assert "copies of the weights with fewer bits" not in said
    assert read_manifest(out).format_version == 1
    [table] = Bundle.load(out).latency.values()
    assert "light" not in json.loads(table.to_json())
