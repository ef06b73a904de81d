"""Samples that a model generates, and their states, for tests of searches."""

from __future__ import annotations

from ssd_compiler.calibrate import Sample, continue_prompts, reference_states, samples_of
from ssd_runtime.model.decoder import Decoder
from ssd_runtime.search.replay import ReferenceStates

FOUR = [[1 + i, 2, 3 + 2 * i] for i in range(4)]
"""Prompts."""


def generated(decoder: Decoder, prompts: list[list[int]], new: int) -> list[Sample]:
    """The samples of continuations of `new` tokens."""
    return samples_of(continue_prompts(decoder, prompts, new, frozenset(), lambda: None), "test")


def referenced(decoder: Decoder, prompts: list[list[int]], new: int) -> ReferenceStates:
    """The states of continuations of `new` tokens."""
    return reference_states(decoder, generated(decoder, prompts, new))
