"""The full model's own continuations of a domain's prompts, and its hidden states on them."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass
from itertools import takewhile
from typing import Any

import torch
from torch import Tensor

from ssd_profiles.errors import UserError
from ssd_runtime.drafting.successors import Successors
from ssd_runtime.engine.loop import Limits, decode
from ssd_runtime.engine.session import Prefill, Session
from ssd_runtime.model.decoder import Decoder
from ssd_runtime.planning.plan import PlainPlanner
from ssd_runtime.sampling.argmax import argmax
from ssd_runtime.sampling.params import GREEDY, SamplingParams
from ssd_runtime.search.replay import ReferenceStates, RowGroup

Tick = Callable[[], None]


@dataclass(frozen=True, slots=True)
class Sample:
    """A prompt, the full model's continuation of it as `ssd-run` would have it, and the prompt's features."""

    prompt: list[int]
    continuation: list[int]
    features: dict[str, list[float]]
    successors: list[list[int]]
    """Pairs of tokens, each with the full model's best candidates behind it."""

    @property
    def middle(self) -> float:
        """Context length half-way through the continuation."""
        return len(self.prompt) + len(self.continuation) / 2


def middle_context(samples: Sequence[Sample]) -> int:
    """Context length, in tokens, that a domain's choices are made for: half-way through its continuations."""
    return round(sum(sample.middle for sample in samples) / len(samples))


class SharedPrefix:
    """A session that holds what all prompts of a domain begin with, worked examples mostly: computed once."""

    def __init__(self, decoder: Decoder, prompts: Sequence[list[int]], sampling: SamplingParams = GREEDY) -> None:
        self._session = Session(decoder, sampling)
        # At least one token of each prompt is its own: its state is asked for.
        shortest = min(len(ids) for ids in prompts) - 1
        same = takewhile(lambda column: len(set(column)) == 1, zip(*prompts, strict=False))
        self._length = min(shortest, sum(1 for _ in same))
        self._prefill = self._session.prefill(prompts[0][: self._length]) if self._length else None

    def prefill(self, ids: list[int]) -> tuple[Session, Prefill]:
        """A session of the prompt's own, and what its prefill leaves behind."""
        if self._prefill is not None:
            self._session.rewind(self._prefill)
        if self._prefill is None:
            session = Session(self._session.decoder, self._session.sampling)
        else:
            session = self._session.fork()
        return session, session.prefill(ids[self._length :], self._prefill)


@torch.inference_mode()
def continue_prompts(
    decoder: Decoder,
    prompts: Sequence[list[int]],
    new_tokens: int,
    eos: frozenset[int],
    tick: Tick,
    sampling: SamplingParams = GREEDY,
) -> list[dict[str, Any]]:
    """Continuations, features and candidates of `prompts`, as plain JSON for `samples_of`."""
    shared, found = SharedPrefix(decoder, prompts, sampling), []
    for ids in prompts:
        (session, prompt), planner, successors = shared.prefill(ids), PlainPlanner(), Successors()
        planner.successors = successors
        generation = decode(session, prompt, planner, Limits(new_tokens, eos))
        sample = Sample(ids, generation.token_ids, features(prompt), successors.rows())
        found.append(asdict(sample))
        tick()
    return found


@torch.inference_mode()
def features_of(decoder: Decoder, prompts: Sequence[list[int]], tick: Tick) -> list[dict[str, list[float]]]:
    """Features of `prompts`, as plain JSON."""
    shared, found = SharedPrefix(decoder, prompts), []
    for ids in prompts:
        found.append(features(shared.prefill(ids)[1]))
        tick()
    return found


def features(prompt: Prefill) -> dict[str, list[float]]:
    """Both routing features of a prompt."""
    return {name: prompt.feature(name).tolist() for name in ("mean", "last")}


def samples_of(found: list[dict[str, Any]], domain: str) -> list[Sample]:
    """The samples that have tokens to draft. Raises UserError when none has."""
    samples = [Sample(**sample) for sample in found if len(sample["continuation"]) > 1]
    if not samples:
        raise UserError(f"domain {domain}: the model answers every prompt with its end token; give other prompts")
    return samples


@torch.inference_mode()
def reference_states(decoder: Decoder, samples: Sequence[Sample]) -> ReferenceStates:
    """The full model's states on the samples' continuations, one group a sample.

    Rows are the inputs of decoding: every continuation token but the last, which has no known successor. Targets are
    the logits' own choices: a repetition penalty moves those of full model and mask alike.
    """
    states: list[list[Tensor]] = []
    targets: list[Tensor] = []
    groups: list[RowGroup] = []
    shared, begin = SharedPrefix(decoder, [sample.prompt for sample in samples]), 0
    for sample in samples:
        session, _ = shared.prefill(sample.prompt)
        states.append(session.forward_states(sample.continuation[:-1]))
        targets.append(argmax(decoder.logits(states[-1][-1])))
        end = begin + len(sample.continuation) - 1
        groups.append(RowGroup(session.cache, session.committed, begin, end))
        begin = end
    return ReferenceStates([torch.cat(parts) for parts in zip(*states, strict=True)], torch.cat(targets), groups)
