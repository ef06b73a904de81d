"""A folder's tensors are used, known to be harmless, or refused by name."""

from __future__ import annotations

import json
import re
import shutil
from collections.abc import Callable, Mapping
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file
from torch import Tensor
from transformers import AutoConfig, AutoModelForImageTextToText, PreTrainedModel

from ssd_profiles.errors import UserError
from ssd_runtime.loading.checkpoints.checkpoint import SHARDS, SINGLE
from ssd_runtime.loading.checkpoints.folder import CONFIG
from ssd_runtime.loading.models import load_model
from ssd_runtime.model.decoder import Decoder
from ssd_runtime.sequence.session import Session
from tests.folders import save_tiny_model
from tests.models import VARIANTS, tiny_model
from tests.mtp import MTP_VARIANTS, with_mtp

Tensors = dict[str, Tensor]
LAYER = "model.layers.0."
BIAS = f"{LAYER}self_attn.q_proj.bias"


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return save_tiny_model(tmp_path_factory.mktemp("checkpoint") / "model", weak=0)


def copied(folder: Path, to: Path, *shards: Callable[[Tensors], Tensors] | Tensors) -> Path:
    """A copy of a folder with these files of weights, each given or made of the original's tensors."""
    shutil.copytree(folder, to)
    tensors = load_file(to / SINGLE)
    files = [shard(dict(tensors)) if callable(shard) else shard for shard in shards]
    if len(files) == 1:
        save_file(files[0], to / SINGLE, {"format": "pt"})
        return to
    (to / SINGLE).unlink()
    places = dict[str, str]()
    for number, each in enumerate(files, start=1):
        name = f"model-{number:05}-of-{len(files):05}.safetensors"
        save_file(each, to / name, {"format": "pt"})
        places |= dict.fromkeys(each, name)
    (to / SHARDS).write_text(json.dumps({"metadata": {}, "weight_map": places}))
    return to


def saved(folder: Path, to: Path, model: PreTrainedModel) -> Path:
    """A copy of a folder with another model."""
    shutil.copytree(folder, to)
    model.save_pretrained(to)
    return to


def only(tensors: Tensors, keep: Callable[[str], bool]) -> Tensors:
    return {name: tensor for name, tensor in tensors.items() if keep(name)}


def first_half(tensors: Tensors) -> Tensors:
    return only(tensors, lambda name: ".layers.0." in name)


def second_half(tensors: Tensors) -> Tensors:
    return only(tensors, lambda name: ".layers.0." not in name)


REFUSED: Mapping[str, tuple[list[Callable[[Tensors], Tensors]], str]] = {
    "missing": (
        [lambda t: only(t, lambda name: name != f"{LAYER}mlp.up_proj.weight")],
        f"lacks weights: {LAYER}mlp.up_proj.weight; copy or convert",
    ),
    "a layer is missing": ([second_half], r"lacks weights: .*; … \(9 tensors\); copy"),
    "an extra bias": ([lambda t: t | {BIAS: torch.ones(32)}], f"weights that this model does not know: {BIAS}; copy"),
    "an extra layer": (
        [lambda t: t | {"model.layers.4.mlp.up_proj.weight": torch.zeros(56, 32)}],
        "does not know: model.layers.4.mlp.up_proj.weight",
    ),
    "an extra norm": (
        [lambda t: t | {f"{LAYER}self_attn.q_norm.weight": torch.ones(8)}],
        f"does not know: {LAYER}self_attn.q_norm.weight",
    ),
    "transposed": (
        [lambda t: t | {f"{LAYER}mlp.up_proj.weight": torch.zeros(32, 56)}],
        rf"another shape: {LAYER}mlp.up_proj.weight is \[32, 56\], expected \[56, 32\]; copy",
    ),
    "of another rank": (
        [lambda t: t | {f"{LAYER}input_layernorm.weight": torch.zeros(32, 1)}],
        rf"another shape: {LAYER}input_layernorm.weight is \[32, 1\], expected \[32\]",
    ),
    "of another model": (
        [lambda t: {name: torch.cat([tensor, tensor]) for name, tensor in t.items()}],
        r"another shape: .*; … \(38 tensors\); copy",
    ),
    "doubled": (
        [first_half, lambda t: second_half(t) | only(t, lambda name: name == f"{LAYER}mlp.up_proj.weight")],
        f"the same weights in two shards: {LAYER}mlp.up_proj.weight; copy",
    ),
}


@pytest.mark.parametrize("case", REFUSED)
def test_what_does_not_fit_is_refused_by_name(folder: Path, tmp_path: Path, case: str) -> None:
    shards, says = REFUSED[case]
    wrong = copied(folder, tmp_path / "wrong", *shards)
    with pytest.raises(UserError, match=says) as refused:
        load_model(str(wrong))
    assert str(refused.value).startswith(f"{wrong}: the checkpoint ")
    assert len(str(refused.value)) < 500


HARMLESS: Mapping[str, list[Callable[[Tensors], Tensors]]] = {
    "as it was": [dict],
    "shards": [first_half, second_half],
    "old buffers": [lambda t: t | {f"{LAYER}self_attn.rotary_emb.inv_freq": torch.ones(4)}],
    "a tied head beside the embedding": [
        lambda t: t | {"lm_head.weight": t["model.embed_tokens.weight"].clone()},
    ],
    "the head in place of the embedding": [
        lambda t: only(t, lambda name: "embed" not in name) | {"lm_head.weight": t["model.embed_tokens.weight"]}
    ],
    "biases of zeros": [lambda t: t | {BIAS: torch.zeros(32)}],
    "a value head": [lambda t: t | {"v_head.summary.weight": torch.ones(1, 32)}],
}


@pytest.mark.parametrize("case", HARMLESS)
def test_what_changes_nothing_is_loaded(folder: Path, tmp_path: Path, case: str) -> None:
    ids = torch.tensor([[5, 6, 7, 8]])
    model = load_model(str(copied(folder, tmp_path / "right", *HARMLESS[case]))).model
    assert torch.equal(model(ids).logits, load_model(str(folder)).model(ids).logits)


def huge_header() -> bytes:
    """The beginning of a file of a terabyte."""
    header = json.dumps({"x": {"dtype": "F32", "shape": [1 << 38], "data_offsets": [0, 1 << 40]}}).encode()
    return len(header).to_bytes(8, "little") + header


def test_files_that_are_not_read_are_not_looked_at(folder: Path, tmp_path: Path) -> None:
    """A repository may hold its weights a second time, and shards of an earlier save."""
    right = copied(folder, tmp_path / "right", first_half, second_half)
    save_file({BIAS: torch.ones(32)}, right / "model-00001-of-00009.safetensors", {"format": "pt"})
    for other in ("consolidated", "value_head"):
        shutil.copy(folder / SINGLE, right / f"{other}.safetensors")
    (right / "draft.safetensors").write_bytes(huge_header())
    alone = copied(folder, tmp_path / "alone", first_half, second_half)
    assert load_model(str(right)).fingerprint(full=True).serves(load_model(str(alone)).fingerprint(full=True))


QWEN_EYES = {"depth": 1, "hidden_size": 16, "num_heads": 2, "intermediate_size": 16, "out_hidden_size": 32}
MISTRAL_EYES = {"num_hidden_layers": 1, "hidden_size": 16, "num_attention_heads": 2, "intermediate_size": 16}
WHOLES = {
    "qwen3.5": ("qwen3_5", QWEN_EYES),
    "ministral3": ("mistral3", {"model_type": "pixtral", "head_dim": 8, **MISTRAL_EYES}),
    "gemma3": ("gemma3", {"model_type": "siglip_vision_model", **MISTRAL_EYES}),
    "gemma4-shared-keys": ("gemma4", {"head_dim": 8, "num_key_value_heads": 2, **MISTRAL_EYES}),
}
"""Type and vision part of models that see, by their text part."""


@pytest.mark.parametrize("variant", [variant for variant in WHOLES if variant in VARIANTS])
def test_the_text_part_of_a_model_that_sees_is_loaded(folder: Path, tmp_path: Path, variant: str) -> None:
    """Checkpoints of Qwen3.5 and Ministral-3 are of such models."""
    text = tiny_model(variant, eos_token_id=2)
    whole_type, eyes = WHOLES[variant]
    # Large Gemma-4 models look at images in both directions, and at text in one.
    ways = {"use_bidirectional_attention": "vision"} if whole_type == "gemma4" else {}
    parts = {"text_config": {**text.config.to_dict(), **ways}, "vision_config": eyes}
    config = AutoConfig.for_model(whole_type, **parts, tie_word_embeddings=False)
    whole = AutoModelForImageTextToText.from_config(config)
    whole.model.language_model.load_state_dict(text.model.state_dict())
    whole.lm_head.load_state_dict(text.lm_head.state_dict())
    loaded = load_model(str(saved(folder, tmp_path / "model", whole))).model
    assert loaded.config.model_type == text.config.model_type
    for name, tensor in text.state_dict().items():
        assert torch.equal(loaded.state_dict()[name], tensor), name


@pytest.mark.parametrize("variant", VARIANTS)
def test_every_family_is_loaded_as_it_was_saved(folder: Path, tmp_path: Path, variant: str) -> None:
    model = tiny_model(variant)
    loaded = load_model(str(saved(folder, tmp_path / "model", model))).model
    for name, tensor in model.state_dict().items():
        assert torch.equal(loaded.state_dict()[name], tensor), name


@pytest.mark.skipif("granite-shared-expert" not in VARIANTS, reason="this transformers lacks the family")
@pytest.mark.parametrize("omitted", [False, True])
def test_a_mixture_without_the_expert_that_all_rows_go_to_is_loaded(
    folder: Path, tmp_path: Path, omitted: bool
) -> None:
    """Its size is 0, which is what a folder means that omits the size."""
    model = tiny_model("granite-shared-expert", shared_intermediate_size=0)
    to = saved(folder, tmp_path / "model", model)
    entries = json.loads((to / CONFIG).read_text())
    assert entries.pop("shared_intermediate_size") == 0
    if omitted:
        (to / CONFIG).write_text(json.dumps(entries))
    decoder = Decoder(load_model(str(to)).model)
    ids = list(range(2, 20))
    with torch.inference_mode():
        expected = model(torch.tensor([ids])).logits[0]
        torch.testing.assert_close(decoder.logits(Session(decoder).forward(ids)), expected, atol=1e-3, rtol=1e-3)


def apart(tensors: Tensors) -> Tensors:
    """`tensors` with one tensor per expert of the MTP layer."""
    found = dict[str, Tensor]()
    for name, tensor in tensors.items():
        block, experts, kind = name.partition(".experts.")
        if not name.startswith("mtp.") or not experts or kind not in ("gate_up_proj", "down_proj"):
            found[name] = tensor
            continue
        for number, each in enumerate(tensor):
            parts = (
                zip(("gate_proj", "up_proj"), each.chunk(2), strict=True) if "gate" in kind else [("down_proj", each)]
            )
            found |= {f"{block}.experts.{number}.{part}.weight": one.contiguous() for part, one in parts}
    return found


def joined(tensors: Tensors) -> Tensors:
    """`tensors` with one tensor for all experts of the MTP layer."""
    block = "mtp.layers.0.mlp.experts"
    if f"{block}.0.down_proj.weight" not in tensors:
        return tensors
    kinds = {
        kind: [tensors.pop(f"{block}.{number}.{kind}_proj.weight") for number in range(4)]
        for kind in ("gate", "up", "down")
    }
    gates = [torch.cat(both) for both in zip(kinds["gate"], kinds["up"], strict=True)]
    return tensors | {f"{block}.gate_up_proj": torch.stack(gates), f"{block}.down_proj": torch.stack(kinds["down"])}


@pytest.mark.parametrize("change", [apart, joined])
@pytest.mark.parametrize("variant", MTP_VARIANTS)
def test_a_layer_for_multi_token_prediction_is_loaded(
    folder: Path, tmp_path: Path, variant: str, change: Callable[[Tensors], Tensors]
) -> None:
    model = with_mtp(variant)
    whole = saved(folder, tmp_path / "saved", model)
    loaded = load_model(str(copied(whole, tmp_path / "model", change)), dtype="bf16")
    assert not loaded.notes
    for name, tensor in model.state_dict().items():
        assert torch.equal(loaded.model.state_dict()[name], tensor.to(torch.bfloat16)), name


@pytest.mark.skipif("qwen3.5" not in VARIANTS, reason="this transformers lacks the family")
@pytest.mark.parametrize(
    ("change", "told"),
    [
        (lambda tensors: only(tensors, lambda name: "mtp.fc" not in name), r"mtp\.fc\.weight is missing"),
        (lambda tensors: tensors | {"mtp.fc.weight": torch.ones(32, 32)}, r"mtp\.fc\.weight is of another shape"),
        (lambda tensors: tensors | {"mtp.layers.1.mlp.x": torch.ones(3)}, r"mtp\.layers\.1\.mlp\.x is unknown"),
        (lambda tensors: tensors | {"mtp.\x1b[2J": torch.ones(3)}, r"mtp\.\?\[2J is unknown"),
        (lambda tensors: only(tensors, lambda name: not name.startswith("mtp.")), None),
    ],
)
def test_a_model_decodes_without_a_layer_for_multi_token_prediction_that_does_not_fit(
    folder: Path, tmp_path: Path, change: Callable[[Tensors], Tensors], told: str | None
) -> None:
    whole = saved(folder, tmp_path / "saved", with_mtp("qwen3.5"))
    loaded = load_model(str(copied(whole, tmp_path / "model", change)))
    assert not hasattr(loaded.model, "mtp")
    assert len(loaded.notes) == (told is not None)
    assert told is None or re.search(f"is not used, since its tensor {told}$", loaded.notes[0])
