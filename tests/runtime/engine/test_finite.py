"""Logits that are NaN or infinite end a request with one line, and change nothing for the others."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from transformers import InfNanRemoveLogitsProcessor, LogitsProcessor, LogitsProcessorList, PreTrainedModel

from bench.fixtures.planted import plant
from ssd_profiles.errors import UserError
from ssd_profiles.mask import SubLayerPlan
from ssd_runtime import CustomGenerate
from ssd_runtime.engine.loop import generate
from ssd_runtime.engine.output.output import Limits
from ssd_runtime.engine.scheduler import Scheduler
from ssd_runtime.loading.models import load_model
from ssd_runtime.model.decoder import Decoder
from ssd_runtime.planning.plan import ConstantPlanner, Plan
from ssd_runtime.planning.registry import WITHOUT_BUNDLE
from ssd_runtime.sampling.argmax import argmax
from ssd_runtime.sampling.finite import NO_TOKEN, NotFiniteError, finite_argmax
from ssd_runtime.sampling.params import GREEDY, SamplingParams
from ssd_runtime.sampling.processors import RowProcessors
from ssd_runtime.sampling.sampler import Sampler
from ssd_runtime.sequence.session import Session
from tests.card import stand_in
from tests.decoding import plainly, strategy_of
from tests.folders import save_tiny_model
from tests.models import tiny_model
from tests.serving import send, serving, tiny_engine, tiny_service
from tests.together import add, finish

pytestmark = pytest.mark.usefixtures("made_up_latencies")
BAD = 90
"""A token whose embedding is not finite."""
PROMPT = [5, 6, 7, 8]
SAMPLINGS = {
    "greedy": GREEDY,
    "penalised": SamplingParams(repetition_penalty=1.3),
    "sampled": SamplingParams(0.8, top_p=0.9, seed=3),
    "top-k": SamplingParams(0.8, top_k=5, min_p=0.01, seed=3),
    "rejection": SamplingParams(0.8, seed=3, rejection=True),
    "processed": SamplingParams(processors=RowProcessors(LogitsProcessorList(), torch.empty(0, dtype=torch.long))),
}


def poisoned(value: float = float("nan"), seed: int = 4) -> PreTrainedModel:
    """A model in which one token makes everything after it not finite."""
    model, _ = plant(tiny_model("qwen2-untied", seed=seed, max_position_embeddings=256), 0.02, 4)
    with torch.no_grad():
        model.model.embed_tokens.weight[BAD] = value
    return model


DECODER = Decoder(poisoned())


@given(st.lists(st.sampled_from([0.0, -1.5, 2.0, -np.inf, np.inf, np.nan]), min_size=1, max_size=9))
def test_one_logit_tells_whether_all_are_finite(row: list[float]) -> None:
    for dtype in (torch.float32, torch.float16, torch.bfloat16):
        logits = torch.tensor([row, [1.0] * len(row)], dtype=dtype)
        usable = logits[0].isfinite().any() and not (logits[0].isnan() | (logits[0] == np.inf)).any()
        assert finite_argmax(logits).tolist() == [int(argmax(logits)[0]) if usable else NO_TOKEN, 0]


@pytest.mark.parametrize("name", SAMPLINGS)
@pytest.mark.parametrize("strategy", ["plain", "swift"])
def test_a_choice_is_refused_however_it_is_made(name: str, strategy: str) -> None:
    make = strategy_of(strategy, DECODER)
    with pytest.raises(NotFiniteError, match="logits are NaN or infinite in float32; its weights are damaged"):
        generate(Session(DECODER, SAMPLINGS[name]), [*PROMPT, BAD], make(), Limits(20))


@pytest.mark.parametrize(
    ("strategy", "device"),
    [*((name, "cpu") for name in WITHOUT_BUNDLE if name not in ("light", "mtp")), ("masked", "")],
)
def test_a_model_that_goes_wrong_half_way_ends_where_plain_decoding_does(strategy: str, device: str) -> None:
    """The token is chosen by the model itself after some others. Without a device this is the stand-in card."""
    model = poisoned()
    tokens = plainly(Decoder(model), PROMPT, 30)
    place = next(place for place, token in enumerate(tokens) if place > 9 and token not in tokens[:place] + PROMPT)
    with torch.no_grad():
        model.model.embed_tokens.weight[tokens[place]] = float("inf")
    decoder, told = Decoder(model.to(device or stand_in().device)), list[int]()
    plan = Plan.masked("test", SubLayerPlan.of(decoder.shape.num_layers, {1}), 4)
    planner = ConstantPlanner(plan) if strategy == "masked" else strategy_of(strategy, decoder)()
    with pytest.raises(NotFiniteError):
        generate(Session(decoder), PROMPT, planner, Limits(30), told.extend)
    assert told == tokens[: place + 1]


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
def test_a_dtype_that_overflows_is_named(dtype: torch.dtype) -> None:
    model = tiny_model("llama", seed=4)
    with torch.no_grad():
        model.model.layers[1].mlp.down_proj.weight.mul_(1e5 if dtype == torch.float16 else 1e38)
    with pytest.raises(NotFiniteError, match=f"in {str(dtype)[6:]}; .*use --dtype fp32"):
        plainly(Decoder(model.to(dtype)), PROMPT, 8)


def test_others_in_a_shared_step_and_in_its_memory_go_on() -> None:
    plan = Plan.masked("chain", SubLayerPlan.of(8, {9, 12}), 4)
    prompts = [[*PROMPT, BAD], PROMPT, [9, 8, 7], [BAD, 3, 4], PROMPT[::-1]]
    scheduler = Scheduler(DECODER, 3)
    for _ in range(2):
        jobs = [add(scheduler, ids, Limits(30), ConstantPlanner(plan)) for ids in prompts]
        finish(scheduler)
        for ids, job in zip(prompts, jobs, strict=True):
            if BAD in ids:
                with pytest.raises(NotFiniteError):
                    job.ended()
            else:
                assert job.ended().token_ids == plainly(DECODER, ids, 30)
    assert all(BAD not in prefix.ids for prefix in scheduler.prefixes._prefixes), "keys that are NaN are not kept"


class Forced(LogitsProcessor):
    """Forces a token by an infinite score, or forbids all."""

    def __init__(self, value: float) -> None:
        self.value = value

    def __call__(self, input_ids: torch.Tensor, scores: torch.Tensor) -> torch.Tensor:
        scores = torch.full_like(scores, -np.inf) if self.value < 0 else scores.clone()
        scores[:, 11] = self.value
        return scores


@pytest.mark.parametrize("value", [np.inf, -np.inf, np.nan])
def test_a_processors_own_infinities_are_no_fault_of_the_model(value: float) -> None:
    model = tiny_model("llama", seed=4)
    ids = torch.tensor([PROMPT])
    processors = LogitsProcessorList([Forced(value)])
    wanted = model.generate(ids, max_new_tokens=4, do_sample=False, logits_processor=processors)
    fast = CustomGenerate(strategy="clasp")
    got = model.generate(ids, max_new_tokens=4, do_sample=False, logits_processor=processors, custom_generate=fast)
    assert got.tolist() == wanted.tolist()
    with pytest.raises(RuntimeError, match="inf"):
        model.generate(ids, max_new_tokens=4, do_sample=True, logits_processor=processors)
    with pytest.raises(UserError, match="logits processors leave NaN, an infinite score or no token"):
        model.generate(ids, max_new_tokens=4, do_sample=True, logits_processor=processors, custom_generate=fast)
    held = RowProcessors(processors, torch.empty(0, dtype=torch.long))
    testing = Sampler(SamplingParams(temperature=1.0, rejection=True, processors=held))
    with pytest.raises(UserError, match="change them"):
        testing.choose(torch.zeros(1, 20), [5], lambda: [[]])(0)


def test_generate_raises_unless_its_processors_remove_what_is_no_number() -> None:
    model = poisoned()
    ids = torch.tensor([[*PROMPT, BAD]])
    fast = CustomGenerate(strategy="clasp")
    with pytest.raises(UserError, match="logits are NaN or infinite"):
        model.generate(ids, max_new_tokens=4, do_sample=False, custom_generate=fast)
    removing = {"logits_processor": LogitsProcessorList([InfNanRemoveLogitsProcessor()])}
    wanted = model.generate(ids, max_new_tokens=4, do_sample=False, **removing)
    got = model.generate(ids, max_new_tokens=4, do_sample=False, custom_generate=fast, **removing)
    assert got.tolist() == wanted.tolist()


@pytest.mark.parametrize("stream", [False, True])
def test_a_request_gets_an_error_and_another_its_answer(tmp_path: Path, stream: bool) -> None:
    folder = save_tiny_model(tmp_path / "model")
    model = load_model(str(folder)).model
    model.config.tie_word_embeddings = False
    model.lm_head.weight = torch.nn.Parameter(model.lm_head.weight.detach().clone())
    with torch.no_grad():
        model.model.embed_tokens.weight[BAD] = float("nan")
    model.save_pretrained(folder)
    with serving(tiny_service(tiny_engine(folder))) as address:
        asked = {"max_tokens": 4, "stream": stream}
        status, _, body = send(address, "/v1/completions", {**asked, "prompt": [5, 6, BAD]})
        assert "NaN or infinite" in str(body)
        assert "model_error" in str(body)
        assert status == (200 if stream else 500)
        status, _, body = send(address, "/v1/completions", {**asked, "prompt": [5, 6, 7]})
        assert status == 200
        assert "error" not in str(body)
