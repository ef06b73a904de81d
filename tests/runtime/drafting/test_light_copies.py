"""Light copies of the weights follow the model, its hooks, its memory and the options."""

from __future__ import annotations

import pytest
import torch

from ssd_profiles.errors import UserError
from ssd_runtime.drafting.masked import Masked
from ssd_runtime.engine.engine import Engine
from ssd_runtime.engine.turn import RunSettings
from ssd_runtime.loading.loaded_model import LoadedModel
from ssd_runtime.model.decoder import Decoder
from ssd_runtime.planning.makers import make_strategy
from ssd_runtime.planning.registry import read_settings
from ssd_runtime.planning.settings import AutoSettings
from ssd_runtime.planning.strategy import StrategyInputs
from ssd_runtime.sequence.session import Session
from ssd_runtime.weights.kernels.int4 import Int4
from ssd_runtime.weights.kernels.int8 import Int8
from ssd_runtime.weights.kernels.native import Native
from ssd_runtime.weights.light import light_kernels, most_bytes
from tests.decoding import logits_of
from tests.light import IDS, drafted, lightened
from tests.models import tiny_model


@pytest.mark.parametrize("out", [16, 48, 97])
def test_copies_are_as_near_as_their_bits_allow(out: int, own: bool) -> None:
    torch.manual_seed(out)
    weight, x = torch.randn(out, 96), torch.randn(5, 96)
    bias = torch.randn(out)
    for bits, most in (("8", 0.015), ("4", 0.12)):
        [kernel] = light_kernels(weight, bias, bits).values()  # type: ignore[arg-type]
        assert type(kernel) is (Native if own else Int4 if bits == "4" and out % 16 == 0 else Int8)
        error = (kernel(x) - (x @ weight.T + bias)).norm() / (x @ weight.T).norm()
        assert error < most
        assert kernel.nbytes <= most_bytes(*weight.shape, bits)  # type: ignore[arg-type]


def test_copies_follow_the_model_and_its_hooks() -> None:
    decoder = lightened(bits="8")
    before = logits_of(decoder, IDS, decoder.light.mask)
    projection = decoder.model.model.layers[1].mlp.gate_proj
    with torch.no_grad():
        projection.weight.mul_(0.5)
    after = logits_of(decoder, IDS, decoder.light.mask)
    assert not torch.allclose(before, after, atol=1e-2)
    used = decoder.packed.used
    handle = projection.register_forward_hook(lambda module, inputs, output: output * 0)
    Session(decoder)
    assert decoder.packed.used < used
    hooked = decoder.light.kernels
    handle.remove()
    Session(decoder)
    assert (hooked, decoder.packed.used) != (decoder.light.kernels, 0)
    torch.testing.assert_close(logits_of(decoder, IDS, decoder.light.mask), after)
    assert decoder.packed.used == used


def test_copies_keep_within_the_memory_and_give_it_back() -> None:
    model = tiny_model("qwen3", seed=3)
    everything = Decoder(model)
    packed = everything.packed.used
    most = everything.light.most_bytes("8")
    assert most > 0
    assert everything.light.most_bytes("none") == 0
    everything.lighten("8")
    assert packed < everything.packed.used <= packed + most
    everything.lighten("none")
    assert (everything.packed.used, everything.light.kernels) == (packed, "")
    partly = Decoder(model, packed + most // 2)
    partly.lighten("8")
    assert partly.light
    assert partly.packed.used <= packed + most // 2
    drafted(partly, Masked(partly.light.mask))
    eights = Decoder(model, packed + most)
    eights.lighten("auto")
    assert eights.light.bits == (8,), "those in 4 bits would not fit beside"
    without = Decoder(model, 0)
    without.lighten("8")
    assert without.light.kernels == ""


def test_the_condition_of_copies_that_does_not_hold_is_said() -> None:
    odd = Decoder(tiny_model("llama", hidden_size=40, num_attention_heads=5, num_key_value_heads=5))
    odd.lighten("8")
    without = Decoder(tiny_model("qwen3", seed=3))
    full = Decoder(tiny_model("qwen3", seed=3), weight_memory=0)
    full.lighten("8")
    hooked = Decoder(tiny_model("qwen3", seed=3))
    for module in hooked.model.modules():
        if isinstance(module, torch.nn.Linear):
            module.register_forward_hook(lambda *_: None)
    hooked.refresh()
    hooked.lighten("8")
    for decoder, says in (
        (odd, "its weights have 40 columns, and the kernels take multiples of 32 alone$"),
        (without, "--draft-bits none asks for none; give auto, 8 or 4$"),
        (full, "0.0 GiB of memory are left for them; give more with --weight-memory$"),
        (hooked, "no copy can stand in for its Linear modules; load it unquantised and without hooks$"),
    ):
        for name, settings in (("light", []), ("swift", ["light=0.5"])):
            with pytest.raises(UserError, match=f"there is no light copy of this model's weights: {says}"):
                make_strategy(
                    StrategyInputs(
                        name=name, settings=read_settings(name, settings), decoder=decoder, bundle=None, latency=None
                    )
                )


@pytest.mark.usefixtures("made_up_latencies")
def test_the_memory_is_said_before_it_is_taken(loaded: LoadedModel) -> None:
    told = list[tuple[str, str]]()
    engine = Engine(loaded, draft_bits="8", say=lambda text: told.append((text, engine.decoder.light.kernels)))
    answers = [
        engine.runner(RunSettings(name, max_new_tokens=24)).answer("How many?").generation.token_ids
        for name in ("plain", "light", "light", "auto")
    ]
    assert answers[1:] == answers[:1] * 3
    said = "drafts may run on copies of the weights with fewer bits, which take up to 0.0 GiB; "
    [light] = [kernels for text, kernels in told if text.startswith(said)]
    assert light == "", "before the copies exist"
    assert engine.decoder.light.kernels
    with pytest.raises(UserError, match="--strategy light: there is no light copy"):
        Engine(loaded, draft_bits="none").runner(RunSettings("light"))


@pytest.mark.usefixtures("made_up_latencies")
def test_auto_copies_no_weights_that_fit_the_processors_cache(
    loaded: LoadedModel, monkeypatch: pytest.MonkeyPatch
) -> None:
    engine = Engine(loaded)
    assert engine._tables.light_table is None
    assert engine.decoder.light.kernels == ""
    monkeypatch.setattr("ssd_runtime.profiling.kernel_choice.SMALL_BYTES", 0)
    larger = Engine(loaded)
    priced = larger._tables.light_table
    assert larger.decoder.light.kernels
    assert set(priced.light) == set(larger.decoder.light.bits)
    without = Engine(loaded, draft_bits="none")
    assert without._tables.light_table is None
    engine = Engine(loaded)
    engine.planners("auto", AutoSettings(light=0))
    assert engine.decoder.light.kernels == ""
