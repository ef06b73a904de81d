"""Every family computes what transformers computes, to fp32 rounding."""

from __future__ import annotations

import copy
import dataclasses
from collections.abc import Callable
from typing import Any

import pytest
import torch
from transformers import AutoConfig, AutoModelForCausalLM

from ssd_artifacts.fingerprint import COMPUTATION
from ssd_profiles.errors import UserError
from ssd_profiles.mask import SubLayerPlan
from ssd_runtime.engine.loop import decode
from ssd_runtime.engine.output.output import Limits
from ssd_runtime.loading.checks.parity import require_faithful
from ssd_runtime.model.decoder import Decoder
from ssd_runtime.model.family.families import FAMILIES, family_of, max_context
from ssd_runtime.planning.plan import ConstantPlanner, PlainPlanner, Plan
from ssd_runtime.sequence.session import Session
from tests.decoding import assert_as_transformers, assert_same, logits_of, speculate
from tests.models import NEWER, SMALL, SWITCH, VARIANTS, VOCABULARY, tiny_model

TOLERANCE = {torch.float32: 2e-4, torch.bfloat16: 0.1}
"""Largest difference as a share of the largest logit. Rows of bf16 differ in the last of eight bits, layer by layer."""
MOST_REROUTED = 0.05
"""Largest share of rows that the last of eight bits sends to other experts. transformers' own steps reach 0.7%."""
KERNELS = {"packed": (torch.float32, True), "module": (torch.float32, False), "bf16": (torch.bfloat16, False)}


@pytest.mark.parametrize("kernel", KERNELS)
@pytest.mark.parametrize("variant", VARIANTS)
@torch.no_grad()
def test_logits_equal_transformers_prefill_steps_and_verification(variant: str, kernel: str) -> None:
    """Prefill, steps, and verifications across a window's edge and a growth of the cache."""
    dtype, pack = KERNELS[kernel]
    model = tiny_model(variant, max_position_embeddings=512).to(dtype)
    decoder = Decoder(model, weight_memory=1 << 40 if pack else 0)
    require_faithful(decoder)
    ids = torch.randint(0, VOCABULARY, (280,), generator=torch.Generator().manual_seed(1)).tolist()
    expected = model(torch.tensor([ids])).logits[0]
    scale = expected.abs().max()
    # Longer than `SWITCH`: longrope's second angles from the start, as in the one forward of transformers.
    session = Session(decoder)
    got = [decoder.logits(session.forward(ids[:40]))]  # prefill
    session.commit(ids[:40])
    for token in ids[40:45]:  # steps
        got.append(decoder.logits(session.forward([token])))
        session.commit([token])
    for size in (2, 3, 4, 16, 185, 25):  # verifications, the last of them beyond the first 256 slots
        rows = ids[session.committed : session.committed + size]
        got.append(decoder.logits(session.forward(rows)))
        session.commit(rows)
    assert session.committed == len(ids)
    far = (torch.cat(got) - expected).abs().amax(-1) > TOLERANCE[dtype] * scale
    rerouted = MOST_REROUTED if decoder.family.router and dtype == torch.bfloat16 else 0.0
    assert far.float().mean() <= rerouted


@pytest.mark.parametrize("length", [SWITCH - 12, SWITCH - 1, SWITCH, SWITCH + 1])
def test_longrope_across_its_switch(length: int) -> None:
    model = tiny_model("phi3-longrope", seed=2)
    decoder, ids, limits = Decoder(model), list(range(1, length + 1)), Limits(40)
    # Without its cache: transformers 5.0 drops the cache at the switch and goes on with the last token alone.
    out = model.generate(torch.tensor([ids]), max_new_tokens=40, do_sample=False, use_cache=False)[0, length:].tolist()
    session = Session(decoder)
    plan = Plan.masked("test", SubLayerPlan.of(4, {0, 3, 6}), 6)
    for _ in range(2):  # the second time, the prompt's angles are those of a short sequence again
        prompt = session.prefill(ids)
        for planner in (ConstantPlanner(plan), PlainPlanner()):
            assert_same(decoder, ids, out, decode(session, prompt, planner, limits).token_ids)


YARN = {"rope_type": "yarn", "rope_theta": 1e4, "factor": 4.0}
ORIGINAL = {"original_max_position_embeddings": 32}


@pytest.mark.parametrize(
    ("kind", "rope", "longest"),
    [
        ("llama", {"rope_type": "default", "rope_theta": 1e4}, 100),
        ("llama", {"rope_type": "linear", "rope_theta": 1e4, "factor": 4.0}, 100),
        ("llama", VARIANTS["llama-llama3-rope"][1]["rope_parameters"], 100),
        ("llama", {**YARN, **ORIGINAL}, 128),
        ("llama", {**YARN, **ORIGINAL, "factor": 2.0}, 100),
        ("llama", {**YARN, **ORIGINAL, "factor": None}, 100),
        ("qwen2", YARN, 400),
        ("qwen2", {**YARN, "original_max_position_embeddings": 100}, 400),
        (
            "gemma3_text",
            {"full_attention": {**YARN, **ORIGINAL}, "sliding_attention": {"rope_type": "default", "rope_theta": 1e4}},
            128,
        ),
    ],
)
def test_yarn_extends_the_context_by_its_factor(kind: str, rope: dict[str, object], longest: int) -> None:
    sizes = {**SMALL, "num_hidden_layers": 6, "max_position_embeddings": 100}
    config = AutoConfig.for_model(kind, **sizes)
    config.rope_parameters = copy.deepcopy(rope)  # as it was saved: what transformers checks differs by version
    assert max_context(config) == longest


@torch.no_grad()
def test_decoding_crosses_the_original_context_of_yarn() -> None:
    model = tiny_model("qwen2-yarn-rope", seed=2)
    decoder, ids = Decoder(model), list(range(1, 81))
    expected = model.generate(torch.tensor([ids]), max_new_tokens=90, do_sample=False)[0]
    assert len(expected) > model.config.max_position_embeddings
    for plan in (Plan("plain"), Plan.masked("test", SubLayerPlan.of(4, {1, 4}), 6)):
        assert_same(decoder, ids, expected[80:].tolist(), speculate(decoder, ids, plan, 90).token_ids)
    assert_as_transformers(decoder, expected.tolist())


@pytest.mark.parametrize("context", [60, 300])
@torch.no_grad()
def test_a_rotary_module_is_asked_for_no_position_after_the_context(context: int) -> None:
    """A dynamic embedding rotates all positions by other angles once it was asked for one of these."""
    model = tiny_model("llama", max_position_embeddings=context)
    furthest = list[int]()
    model.model.rotary_emb.register_forward_hook(lambda _module, given, _out: furthest.append(int(given[1].max())))
    session = Session(Decoder(model))
    while session.committed < context:
        session.forward([3] * 20)
        session.commit([3] * 20)
    assert max(furthest) < context


@torch.no_grad()
def test_forward_follows_modules_put_in_place_of_others() -> None:
    """As adapters are, which keep the module they stand for."""

    class Scaled(torch.nn.Module):
        def __init__(self, inner: torch.nn.Module) -> None:
            super().__init__()
            self.inner = inner

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return 0.8 * self.inner(x)

    model = tiny_model("qwen3", seed=3)
    decoder, ids = Decoder(model), list(range(2, 20))
    before = logits_of(decoder, ids)
    for parent, name in (
        (model.model.layers[1].self_attn, "k_proj"),
        (model.model.layers[1].mlp, "down_proj"),
        (model.model.layers[2], "input_layernorm"),
        (model.model, "norm"),
        (model, "lm_head"),
    ):
        inner = getattr(parent, name)
        setattr(parent, name, Scaled(inner))
        assert not torch.allclose(assert_as_transformers(decoder, ids), before), name
        setattr(parent, name, inner)
        torch.testing.assert_close(logits_of(decoder, ids), before)


Change = Callable[[Any], object]
RELU = torch.nn.ReLU()


def replaced(owner: torch.nn.Module, name: str, change: Callable[[torch.Tensor], torch.Tensor]) -> None:
    """Put another tensor in the place of one."""
    old = getattr(owner, name)
    new = change(old.detach())
    setattr(owner, name, torch.nn.Parameter(new) if isinstance(old, torch.nn.Parameter) else new)


def hooked_router(layer: Any) -> None:
    layer.mlp.gate.register_forward_hook(lambda _module, _given, out: (out[0], out[1] * 0.5, out[2]))


SCALES: list[Change] = [
    lambda layer: layer.layer_scalar.add_(0.5),
    lambda layer: replaced(layer, "layer_scalar", lambda old: old + 0.5),
]
INJECTION: list[Change] = [
    lambda layer: layer.per_layer_input_gate.weight.mul_(1.5),
    lambda layer: layer.post_per_layer_input_norm.weight.mul_(1.5),
    lambda layer: layer.register_module("act_fn", RELU),
]
CHANGES: dict[str, list[Change]] = {
    "llama": [lambda layer: layer.mlp.register_module("act_fn", RELU)],
    "apertus": [lambda layer: layer.mlp.act_fn.alpha_p.add_(2)],
    "gpt-oss-sliding": [
        lambda layer: layer.self_attn.sinks.add_(0.5),
        lambda layer: replaced(layer.self_attn, "sinks", lambda old: old + 0.5),
    ],
    "gemma4": [*SCALES, *INJECTION],
    "gemma4-shared-keys": [*SCALES, *INJECTION],
    "gemma4-values-are-keys": SCALES,
    "gemma4-experts": [*SCALES, *INJECTION, lambda layer: layer.pre_feedforward_layernorm_2.weight.mul_(1.5)],
    "qwen3-moe": [
        lambda layer: layer.mlp.experts.register_module("act_fn", RELU),
        lambda layer: layer.mlp.experts.down_proj.mul_(0.5),
        lambda layer: replaced(layer.mlp.experts, "gate_up_proj", lambda old: old * 1.5),
        lambda layer: layer.mlp.gate.weight.copy_(layer.mlp.gate.weight.roll(1, 0)),
        hooked_router,
    ],
    "qwen3.5-moe": [
        lambda layer: layer.mlp.shared_expert.down_proj.weight.mul_(-0.5),
        lambda layer: layer.mlp.shared_expert_gate.weight.mul_(-0.5),
    ],
    "lfm2-moe": [lambda layer: layer.feed_forward.expert_bias.add_(torch.linspace(-1, 1, 6))],
    "granite-hybrid": [
        lambda layer: layer.mamba.conv1d.weight.mul_(1.5),
        lambda layer: layer.mamba.dt_bias.add_(0.3),
        lambda layer: layer.mamba.norm.weight.mul_(1.5),
    ],
}
"""Changes of the third layer, one after the other."""


@pytest.mark.parametrize("variant", [variant for variant in CHANGES if variant in VARIANTS])
@torch.no_grad()
def test_changes_beside_projections_are_followed(variant: str) -> None:
    """Drafts on light copies follow the changes, too."""
    model, ids = tiny_model(variant, seed=3), list(range(2, 20))
    decoder, draft = Decoder(model), SubLayerPlan.of(4).lightened(8)
    decoder.lighten("8")
    before, drafted = logits_of(decoder, ids), logits_of(decoder, ids, draft)
    for number, change in enumerate(CHANGES[variant], 1):
        change(model.model.layers[2])
        after, also = assert_as_transformers(decoder, ids), logits_of(decoder, ids, draft)
        assert decoder.version == number, "prefixes that were computed before belong to another model"
        assert not torch.allclose(after, before, atol=1e-2)
        assert not torch.allclose(also, drafted, atol=1e-3)
        before, drafted = after, also


@pytest.mark.skipif("gemma4_text" in NEWER, reason="this transformers lacks the family")
@torch.no_grad()
def test_changes_of_what_embeds_for_every_layer_are_followed() -> None:
    model, ids = tiny_model("gemma4"), list(range(2, 20))
    decoder = Decoder(model)
    before = logits_of(decoder, ids)
    for number, part in enumerate((model.model.embed_tokens_per_layer, model.model.per_layer_model_projection), 1):
        part.weight.mul_(-1)
        after = assert_as_transformers(decoder, ids)
        assert decoder.version == number
        assert not torch.allclose(after, before, atol=1e-2)
        before = after


@pytest.mark.parametrize("part", ["", "model", "model.layers.1", "model.layers.1.self_attn", "model.layers.1.mlp"])
@pytest.mark.parametrize("way", ["hook", "before", "forward"])
def test_a_hook_that_would_be_passed_by_is_refused(part: str, way: str) -> None:
    model = tiny_model("llama")
    decoder, module = Decoder(model), model.get_submodule(part)
    if way == "forward":
        module.forward = lambda *_args, **_kwargs: None
    elif way == "before":
        module.register_forward_pre_hook(lambda *_: None)
    else:
        module.register_forward_hook(lambda *_: None)
    for built in (lambda: Session(decoder), lambda: Decoder(model)):
        with pytest.raises(UserError, match="has a hook or a forward of its own"):
            built()


def test_what_the_families_compute_with_is_in_a_models_fingerprint() -> None:
    settings = {value for family in FAMILIES.values() for value in dataclasses.asdict(family).values()}
    for kind, changes in VARIANTS.values():
        config = AutoConfig.for_model(kind, **{**SMALL, **changes}).to_dict()
        assert set(SMALL) & set(config) - COMPUTATION <= {"bos_token_id", "eos_token_id", "pad_token_id"}
        assert set(changes) & set(config) - {"resid_pdrop"} <= COMPUTATION, "dropout is training's alone"
        assert settings & set(config) <= COMPUTATION


def test_every_family_is_tested() -> None:
    assert {kind for kind, _ in VARIANTS.values()} == set(FAMILIES) - NEWER


def test_unknown_models_are_refused_with_what_is_supported() -> None:
    config = AutoConfig.for_model("gpt2", n_layer=1, n_embd=8, n_head=1, vocab_size=11, n_positions=16)
    with pytest.raises(UserError, match=r"gpt2.*supported.*: Llama, Mistral, Ministral"):
        Decoder(AutoModelForCausalLM.from_config(config))


UNSUPPORTED: list[tuple[str, dict[str, Any], str]] = [
    ("llama", {"rope_parameters": {"rope_type": "dynamic", "rope_theta": 1e4, "factor": 2.0}}, "dynamic"),
    ("llama", VARIANTS["phi3-longrope"][1], "longrope"),
    ("gemma3", {"use_bidirectional_attention": True}, "both directions"),
    ("olmoe", {"clip_qkv": 8.0}, "clip_qkv"),
    ("lfm2", {"layer_types": ["conv"] * 4}, "a model without attention is not supported"),
    ("falcon-h1", {"attention_bias": True}, "attention_bias of a Falcon-H1 model is not supported"),
]


@pytest.mark.parametrize(("variant", "changes", "what"), [each for each in UNSUPPORTED if each[0] in VARIANTS])
def test_unsupported_features_are_refused(variant: str, changes: dict[str, Any], what: str) -> None:
    with pytest.raises(UserError, match=what):
        Decoder(tiny_model(variant, **changes))


def hooked(part: str) -> Change:
    return lambda layer: layer.get_submodule(part).register_forward_hook(lambda *_: None)


def wrapped_convolution(layer: Any) -> None:
    inner = layer.linear_attn.conv1d
    layer.linear_attn.conv1d = type("Lora", (torch.nn.Conv1d,), {})(4, 4, 2)
    layer.linear_attn.conv1d.weight = inner.weight


UNDIVIDED: list[tuple[str, Change, str]] = [
    (
        "olmoe",
        lambda layer: layer.mlp.experts.register_parameter("bias", torch.nn.Parameter(torch.ones(6))),
        "not kept",
    ),
    ("olmoe", lambda layer: layer.mlp.experts.to("meta"), "cannot be offloaded"),
    ("olmoe", lambda layer: setattr(layer.mlp, "gate", torch.nn.Linear(32, 6)), "its router is a plain projection"),
    ("olmoe", hooked("mlp.experts"), r"layers\.1\.mlp\.experts has a hook"),
    ("qwen3.5-moe", hooked("mlp.shared_expert"), r"layers\.1\.mlp\.shared_expert has a hook"),
    ("gemma4-experts", hooked("experts"), r"layers\.1\.experts has a hook"),
    ("qwen3.5", hooked("linear_attn.conv1d"), "convolution of a delta layer is adapted, hooked or offloaded"),
    ("qwen3.5", wrapped_convolution, "convolution of a delta layer is adapted, hooked or offloaded"),
    ("qwen3.5", hooked("linear_attn"), r"layers\.1\.linear_attn has a hook"),
    (
        "qwen3.5",
        lambda layer: setattr(layer.linear_attn, "activation", "gelu"),
        "delta layer with the activation 'gelu' is not supported",
    ),
]


@pytest.mark.parametrize(("variant", "change", "what"), [each for each in UNDIVIDED if each[0] in VARIANTS])
def test_blocks_that_cannot_be_taken_apart_are_refused(variant: str, change: Change, what: str) -> None:
    model = tiny_model(variant)
    change(model.model.layers[1])
    with pytest.raises(UserError, match=what):
        Decoder(model)


@pytest.mark.parametrize("variant", ["qwen3", "smollm3"])
@torch.no_grad()
def test_a_model_whose_last_layers_were_cut_is_served(variant: str) -> None:
    """Lists of its config have entries for the layers of before."""
    model = tiny_model(variant)
    model.model.layers = model.model.layers[:3]
    with pytest.raises(UserError, match="expected 3 layers, got 4"):
        Decoder(model)
    model.config.num_hidden_layers = 3
    require_faithful(Decoder(model))
    model.config.layer_types = model.config.layer_types[:2]
    with pytest.raises(UserError, match="layer_types in its config: expected 3 entries, got 2"):
        Decoder(model)


@pytest.mark.skipif("olmo3" in NEWER, reason="this transformers lacks the family")
@torch.no_grad()
def test_parameters_of_all_layers_that_layer_types_repeat_are_served() -> None:
    """OLMo-3's, as the first 5.x versions save them: later ones add those of layer types, and keep the former."""
    model = tiny_model("olmo3-sliding", rope_parameters={"rope_type": "default", "rope_theta": 5e5})
    require_faithful(Decoder(model))


@pytest.mark.parametrize(
    ("rope", "unread"), [({**YARN, **ORIGINAL}, "rope_type, factor"), ({"rope_theta": 5e5}, "rope_theta")]
)
def test_parameters_that_no_layer_type_has_are_refused(rope: dict[str, object], unread: str) -> None:
    config = AutoConfig.for_model("gemma3_text", **SMALL)
    default = {"rope_type": "default", "rope_theta": 1e4}
    config.rope_parameters = {**rope, "full_attention": default, "sliding_attention": default}
    with pytest.raises(UserError, match=f"rope_parameters with {unread}"):
        family_of(config)
