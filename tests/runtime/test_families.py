"""Every family computes what transformers computes, to fp32 rounding."""

from __future__ import annotations

import pytest
import torch
from transformers import AutoConfig, AutoModelForCausalLM

from ssd_profiles.errors import UserError
from ssd_runtime.decoder import Decoder
from ssd_runtime.session import Session
from tests.models import SMALL, VARIANTS, VOCABULARY, tiny_model

TOLERANCE = 2e-4


@pytest.mark.parametrize("pack", [True, False])
@pytest.mark.parametrize("variant", VARIANTS)
@torch.no_grad()
def test_logits_equal_transformers_prefill_steps_and_verification(variant: str, pack: bool) -> None:
    model = tiny_model(variant)
    decoder = Decoder(model, pack=pack)
    ids = torch.randint(0, VOCABULARY, (70,), generator=torch.Generator().manual_seed(1)).tolist()
    expected = model(torch.tensor([ids])).logits[0]
    scale = expected.abs().max()

    session = Session(decoder)
    got = [decoder.logits(session.forward(ids[:40]))]  # prefill
    session.commit(40)
    for token in ids[40:45]:  # steps
        got.append(decoder.logits(session.forward([token])))
        session.commit(1)
    for size in (2, 3, 4, 16):  # verifications
        got.append(decoder.logits(session.forward(ids[session.committed : session.committed + size])))
        session.commit(size)
    assert session.committed == len(ids)
    assert (torch.cat(got) - expected).abs().max() <= TOLERANCE * scale


@torch.no_grad()
def test_forward_follows_changed_weights_and_hooks() -> None:
    model = tiny_model("llama", seed=3)
    decoder = Decoder(model)
    ids = list(range(2, 20))
    before = decoder.logits(Session(decoder).forward(ids))
    with torch.no_grad():
        model.model.layers[1].mlp.down_proj.weight.mul_(0.5)
    after = decoder.logits(Session(decoder).forward(ids))
    assert not torch.allclose(before, after)
    torch.testing.assert_close(after, model(torch.tensor([ids])).logits[0], atol=1e-4, rtol=1e-4)
    handle = model.model.layers[2].self_attn.q_proj.register_forward_hook(lambda _m, _i, out: out * 0.9)
    hooked = decoder.logits(Session(decoder).forward(ids))
    torch.testing.assert_close(hooked, model(torch.tensor([ids])).logits[0], atol=1e-4, rtol=1e-4)
    assert not torch.allclose(hooked, after)
    handle.remove()


def test_unknown_models_are_refused_with_what_is_supported() -> None:
    config = AutoConfig.for_model("gpt2", n_layer=1, n_embd=8, n_head=1, vocab_size=11, n_positions=16)
    with pytest.raises(UserError, match=r"gpt2.*supported: Llama, Qwen2, Qwen3"):
        Decoder(AutoModelForCausalLM.from_config(config))


@pytest.mark.parametrize(
    ("kind", "changes", "what"),
    [
        ("llama", {"rope_parameters": {"rope_type": "dynamic", "rope_theta": 1e4, "factor": 2.0}}, "dynamic"),
        (
            "qwen2",
            {"use_sliding_window": True, "sliding_window": 8, "max_window_layers": 1},
            "sliding_attention",
        ),
    ],
)
def test_unsupported_features_are_refused(kind: str, changes: dict[str, object], what: str) -> None:
    model = AutoModelForCausalLM.from_config(AutoConfig.for_model(kind, **{**SMALL, **changes}))
    with pytest.raises(UserError, match=what):
        Decoder(model)
