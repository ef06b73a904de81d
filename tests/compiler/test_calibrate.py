"""Calibration keeps the right parts of the model's own continuations."""

from __future__ import annotations

import torch

from ssd_compiler.calibrate import continue_prompts, samples_of
from ssd_runtime.drafting.successors import RANKS
from ssd_runtime.model.decoder import Decoder
from ssd_runtime.sampling.params import SamplingParams
from tests.models import tiny_model


def test_the_best_follower_of_a_greedy_continuation_is_what_follows() -> None:
    decoder = Decoder(tiny_model("llama", seed=3))
    for sample in samples_of(continue_prompts(decoder, [[1, 2, 3], [9, 4]], 21, frozenset(), lambda: None), "test"):
        whole = [sample.prompt[-1], *sample.continuation]
        followed = {(a, b): c for a, b, c in zip(whole, whole[1:], whole[2:], strict=False)}
        assert {(before, token): best for before, token, best, *_ in sample.successors} == followed
        assert all(len(set(row[2:])) == RANKS for row in sample.successors)


def test_continuations_are_what_the_runtime_would_answer() -> None:
    """With the model's own repetition penalty, behind a beginning that all prompts share."""
    model = tiny_model("llama", seed=3)
    model.generation_config.repetition_penalty = 1.4
    decoder, prompts = Decoder(model), [[1, 2, 3, 4], [1, 2, 9]]
    sampling = SamplingParams(repetition_penalty=1.4)
    found = continue_prompts(decoder, prompts, 21, frozenset(), lambda: None, sampling)
    for sample, ids in zip(samples_of(found, "test"), prompts, strict=True):
        whole = model.generate(torch.tensor([ids]), max_new_tokens=21, do_sample=False, eos_token_id=None)[0].tolist()
        assert ids + sample.continuation == whole
    assert found != continue_prompts(decoder, prompts, 21, frozenset(), lambda: None)
