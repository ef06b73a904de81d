"""Ways to decode a prompt, all timed alike."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from time import perf_counter

from ssd_runtime.engine.loop import generate
from ssd_runtime.engine.output.output import Limits
from ssd_runtime.model.decoder import Decoder
from ssd_runtime.planning.plan import Cycle
from ssd_runtime.planning.strategy import MakePlanner
from ssd_runtime.sampling.params import GREEDY, SamplingParams
from ssd_runtime.sequence.session import Session


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


Decode = Callable[[list[int], Limits], Timed]


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
        counted = len(token_ids) - self.counts[0]
        first = self.times[0]
        last = self.times[-1]
        return Timed(
            token_ids=token_ids,
            first_seconds=first - self.began,
            seconds=last - first,
            counted=counted,
            cycles=cycles or {},
        )


def ours(decoder: Decoder, make_planner: MakePlanner, sampling: SamplingParams = GREEDY) -> Decode:
    """Make a contender of one of this runtime's strategies."""

    def decode(ids: list[int], limits: Limits) -> Timed:
        session = Session(decoder, sampling)
        stamps = Stamps()
        done = generate(session, ids, make_planner(), limits, lambda tokens: stamps.add(len(tokens)))
        return stamps.timed(done.token_ids, cycle_totals(done.cycles))

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
        "skipped_attention": sum(cycle.plan.mask.attention_skipped for cycle in drafting if cycle.plan.mask),
        "skipped_mlp": sum(cycle.plan.mask.mlp_skipped for cycle in drafting if cycle.plan.mask),
        "plan_seconds": sum(cycle.plan_seconds for cycle in cycles),
        "plain_steps": len(plain),
        "plain_seconds": sum(cycle.seconds for cycle in plain),
    }
