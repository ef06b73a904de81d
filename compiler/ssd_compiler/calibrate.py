"""Calibration: the full model continues a domain's prompts, and its hidden states are recorded."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import asdict, dataclass
from itertools import takewhile
from typing import Any

import torch
from torch import Tensor

from ssd_compiler.progress import Tick
from ssd_profiles.errors import UserError
from ssd_runtime.drafting.successors import Successors
from ssd_runtime.engine.job import Job
from ssd_runtime.engine.loop import decoding
from ssd_runtime.engine.output.generation import Generation
from ssd_runtime.engine.output.output import Limits
from ssd_runtime.engine.scheduler import Scheduler
from ssd_runtime.model.decoder import Decoder
from ssd_runtime.planning.plan import PlainPlanner
from ssd_runtime.sampling.argmax import argmax
from ssd_runtime.sampling.params import GREEDY, SamplingParams
from ssd_runtime.search.replay import ReferenceStates, RowGroup
from ssd_runtime.sequence.prefill import Prefill
from ssd_runtime.sequence.session import Session


@dataclass(frozen=True, slots=True)
class Sample:
    """A prompt, the full model's continuation of it under `ssd-run`'s defaults, and the prompt's features."""

    prompt: list[int]
    continuation: list[int]
    features: dict[str, list[float]]
    successors: list[list[int]]
    """Rows of a token pair and the full model's most probable successors of it."""

    @property
    def middle(self) -> float:
        """Context length at the middle of the continuation, in tokens."""
        return len(self.prompt) + len(self.continuation) / 2


def middle_context(samples: Sequence[Sample]) -> int:
    """Mean context length at the middle of the samples' continuations. A domain's choices are made for it."""
    return round(sum(sample.middle for sample in samples) / len(samples))


class SharedPrefix:
    """A session that computes the common prefix of a domain's prompts once; worked examples are most of it."""

    def __init__(self, decoder: Decoder, prompts: Sequence[list[int]], sampling: SamplingParams = GREEDY) -> None:
        self._session = Session(decoder, sampling)
        # At least one token of each prompt stays outside the prefix, because its state is needed.
        shortest = min(len(ids) for ids in prompts) - 1
        same = takewhile(lambda column: len(set(column)) == 1, zip(*prompts, strict=False))
        self._length = min(shortest, sum(1 for _ in same))
        self._prefill = self._session.prefill(prompts[0][: self._length]) if self._length else None

    def prefill(self, ids: list[int]) -> tuple[Session, Prefill]:
        """Prefill a prompt after the shared prefix. Returns a session of its own and the prefill."""
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
    """Continue the prompts with the full model, all at once: a step of many sequences takes little more than of one.

    Returns continuations, routing features and successor candidates as plain JSON for `samples_of`. `tick` is called
    after each prompt.
    """
    shared = SharedPrefix(decoder, prompts, sampling)
    scheduler = Scheduler(decoder, len(prompts), cache_bytes=0)  # the sessions have memory of their own
    begun = list[tuple[list[int], Prefill, Successors, Job[Generation]]]()
    for ids in prompts:
        session, prompt = shared.prefill(ids)
        successors = Successors()
        work = decoding(session, prompt, PlainPlanner(successors), Limits(new_tokens, eos))
        begun.append((ids, prompt, successors, scheduler.add(session, work, session.ids)))
    found = []
    for ids, prompt, successors, job in begun:
        continuation = scheduler.finish(job).token_ids
        found.append(asdict(Sample(ids, continuation, features(prompt), successors.rows())))
        tick()
    return found


@torch.inference_mode()
def features_of(decoder: Decoder, prompts: Sequence[list[int]], tick: Tick) -> list[dict[str, list[float]]]:
    """Compute the routing features of the prompts as plain JSON. `tick` is called after each prompt."""
    shared = SharedPrefix(decoder, prompts)
    found = []
    for ids in prompts:
        found.append(features(shared.prefill(ids)[1]))
        tick()
    return found


def features(prompt: Prefill) -> dict[str, list[float]]:
    """Both routing features of a prompt, by name: [hidden] each."""
    return {name: prompt.feature(name).tolist() for name in ("mean", "last")}


def samples_of(found: list[dict[str, Any]], domain: str) -> list[Sample]:
    """Parse the samples that have tokens to draft. Raises UserError when there is none."""
    samples = [Sample(**sample) for sample in found if len(sample["continuation"]) > 1]
    if not samples:
        raise UserError(f"domain {domain}: the model answers every prompt with its end token; give other prompts")
    return samples


@torch.inference_mode()
def reference_states(decoder: Decoder, samples: Sequence[Sample]) -> ReferenceStates:
    """Run the full model over the samples' continuations, one row group per sample.

    Rows are the inputs of decoding: all continuation tokens except the last, whose successor is unknown. Targets are
    the argmax of the raw logits, because a repetition penalty would shift full model and mask alike.
    """
    states: list[list[Tensor]] = []
    targets: list[Tensor] = []
    groups: list[RowGroup] = []
    shared = SharedPrefix(decoder, [sample.prompt for sample in samples])
    begin = 0
    for sample in samples:
        session, _ = shared.prefill(sample.prompt)
        states.append(session.forward_states(sample.continuation[:-1]))
        targets.append(argmax(decoder.logits(states[-1][-1])))
        end = begin + len(sample.continuation) - 1
        groups.append(RowGroup(cache=session.cache, start=session.committed, begin=begin, end=end))
        begin = end
    return ReferenceStates([torch.cat(parts) for parts in zip(*states, strict=True)], torch.cat(targets), groups)
