"""This engine's contenders of a comparison: they decode through the front door, and are timed as peers are."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass, field
from itertools import count
from pathlib import Path
from time import perf_counter
from typing import Any

from ssd_profiles.prompts import Prompt
from ssd_runtime import Engine, RunSettings, SamplingParams
from ssd_runtime.engine.output.divergence import Kind, compare
from ssd_runtime.loading.loaded_model import conversation
from ssd_runtime.planning.plan import Cycle
from ssd_runtime.planning.registry import read_settings
from ssd_runtime.profiling.latency import device_key
from ssd_runtime.sequence.session import Session

PLAIN = "plain"
GREEDY = SamplingParams()


@dataclass(frozen=True, slots=True)
class Timed:
    """A decoded prompt. Its speed is `counted` ÷ `seconds`; the prefill and the tokens that it yields are excluded."""

    token_ids: list[int]
    first_seconds: float
    """Seconds from the call to the first new token."""
    seconds: float
    """Seconds from the first to the last token."""
    counted: int
    """Number of tokens decoded in `seconds`."""
    cycles: dict[str, float] = field(default_factory=dict)
    """Totals over the draft-verify cycles, under the names of `cycle_totals`; empty for peers."""


Decode = Callable[[list[int], int], Timed]
"""Prompt and most new tokens → the timed answer."""


@dataclass(slots=True)
class Stamps:
    """Arrival times of tokens."""

    began: float = field(default_factory=perf_counter)
    times: list[float] = field(default_factory=list)
    counts: list[int] = field(default_factory=list)

    def add(self, count: int) -> None:
        """Add `count` tokens that arrive now."""
        self.times.append(perf_counter())
        self.counts.append(count)

    def timed(self, token_ids: list[int], cycles: dict[str, float] | None = None) -> Timed:
        """Compute the times after the first arrival."""
        return Timed(
            token_ids=token_ids,
            first_seconds=self.times[0] - self.began,
            seconds=self.times[-1] - self.times[0],
            counted=len(token_ids) - self.counts[0],
            cycles=cycles or {},
        )


def strategy_of(contender: str) -> tuple[str, Any]:
    """Name and parameters of a contender such as `swift+tree=0`. Raises UserError if there is no such one."""
    strategy, *assignments = contender.split("+")
    return strategy, read_settings(strategy, assignments)


def ours(engine: Engine, contender: str, stream: str, sampling: SamplingParams = GREEDY) -> Decode:
    """Make a strategy a contender that keeps its statistics from prompt to prompt of one `stream`."""
    strategy, parameters = strategy_of(contender)

    def decode(ids: list[int], new: int) -> Timed:
        settings = RunSettings(strategy, parameters=parameters, max_new_tokens=new, sampling=sampling)
        stamps = Stamps()
        request = engine.add_request(ids, settings, stream=stream, on_tokens=lambda tokens: stamps.add(len(tokens)))
        while not request.done:
            engine.step()
        generation = request.outcome().generation
        return stamps.timed(generation.token_ids, cycle_totals(generation.cycles))

    return decode


def singly(make: Callable[[str], Decode], stream: str) -> Decode:
    """A contender that begins without statistics at every prompt, as a lone request would find it."""
    numbers = count()

    def decode(ids: list[int], new: int) -> Timed:
        return make(f"{stream}, prompt {next(numbers)}")(ids, new)

    return decode


def cycle_totals(cycles: Sequence[Cycle]) -> dict[str, float]:
    """Sum counts and seconds over draft-verify cycles, plain steps apart."""
    drafting = [cycle for cycle in cycles if cycle.drafted]
    plain = [cycle for cycle in cycles if not cycle.drafted]
    return {
        "forwards": len(cycles),
        "drafts": len(drafting),
        "drafted": sum(cycle.drafted for cycle in drafting),
        "accepted": sum(cycle.accepted for cycle in drafting),
        "draft_tokens": sum(len(cycle.tokens) for cycle in drafting),
        "draft_seconds": sum(cycle.draft_seconds for cycle in drafting),
        "verify_seconds": sum(cycle.verify_seconds for cycle in drafting),
        "skipped_attention": sum(cycle.plan.mask.mixers_skipped for cycle in drafting if cycle.plan.mask),
        "skipped_mlp": sum(cycle.plan.mask.mlps_skipped for cycle in drafting if cycle.plan.mask),
        "plan_seconds": sum(cycle.plan_seconds for cycle in cycles),
        "plain_steps": len(plain),
        "plain_seconds": sum(cycle.seconds for cycle in plain),
    }


def difference(
    engine: Engine, ids: list[int], plain: list[int], other: list[int], sampling: SamplingParams = GREEDY
) -> Kind:
    """Tell how an answer differs from plain decoding's."""
    return compare(Session(engine.decoder, sampling), ids, plain, other).kind


def digest(prompts: Sequence[Prompt]) -> str:
    """Hash of prompts, which tells apart files of the same name and length."""
    texts = [[prompt.id, *conversation(prompt)] for prompt in prompts]
    return hashlib.sha256(json.dumps(texts).encode()).hexdigest()


def about(engine: Engine) -> dict[str, Any]:
    """The model and the device, for the settings of a comparison."""
    fingerprint = engine.loaded.fingerprint()
    return {
        "model": fingerprint.weights_sample_sha256,
        "name": Path(fingerprint.name).name,
        "device": asdict(device_key(engine.decoder)),
    }
