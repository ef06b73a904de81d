"""Decoding timed by a latency table: every forward costs what the table says, so no time is noise.

A busy machine gives the same figures as a quiet one. Drafts, verifications and searches are priced alike, by the
forwards that they request. Whatever is computed beside forwards costs nothing: routing, sampling, a Gaussian process.
"""

from __future__ import annotations

from collections.abc import Generator, Sequence
from dataclasses import dataclass, field, replace
from typing import Any, TypeVar

from torch import Tensor

from bench.harness.contenders import Timed, cycle_totals
from ssd_profiles.errors import UserError
from ssd_profiles.latency import LatencyTable
from ssd_runtime.drafting.successors import Successors
from ssd_runtime.engine.loop import decoding
from ssd_runtime.engine.output.generation import Generation
from ssd_runtime.engine.output.output import Limits
from ssd_runtime.model.batch import Segment
from ssd_runtime.model.decoder import Decoder
from ssd_runtime.model.runner import Forward, Head, ModelRequest, Work
from ssd_runtime.planning.plan import Cycle, Plan, Planner
from ssd_runtime.planning.strategy import MakePlanner
from ssd_runtime.sampling.params import GREEDY, SamplingParams
from ssd_runtime.sequence.prefill import Prefill
from ssd_runtime.sequence.session import Session

T = TypeVar("T")


def sublayer_prices(latency: LatencyTable, context: float, rows: int) -> list[float]:
    """Seconds of each sub-layer; of more rows than the table has, in proportion: multiplications bound these."""
    known = min(rows, int(latency.queries[-1]))
    return [seconds * rows / known for seconds in latency.sublayer_seconds(context, known)]


def head_price(latency: LatencyTable, rows: int) -> float:
    """Seconds of the head; of more rows than the table has, in proportion."""
    known = min(rows, int(latency.queries[-1]))
    return latency.head_seconds(known) * rows / known


def price(latency: LatencyTable, request: ModelRequest) -> float:
    """Seconds of a request that runs alone, by the table.

    A step's overhead belongs to the forward that begins at the first sub-layer. Raises UserError for a mask with
    sub-layers on lighter copies, because the table's prices are those of full weights.
    """
    if isinstance(request, Head):
        return head_price(latency, request.size)
    if not isinstance(request, Forward):
        return 0.0
    if request.mask is not None and request.mask.light:
        raise UserError(
            "bench.priced: prices do not know sub-layers on lighter copies; give a bundle of `--draft-bits none`, "
            "or auto+light=0"
        )
    context = max(int(part.slot) if isinstance(part, Segment) else part.views[0].end for part in request.segments)
    parts = sublayer_prices(latency, context, request.size)
    last = len(parts) if request.last is None else request.last
    kept = (i for i in range(request.first, last) if request.mask is None or not request.mask.bits[i])
    overhead = latency.overhead_seconds(1) if request.first == 0 else 0.0
    return sum(parts[i] for i in kept) + overhead


@dataclass(slots=True)
class PricedPlanner:
    """A planner whose cycles are priced before it observes them, so that it plans by prices too."""

    inner: Planner
    latency: LatencyTable
    searches: float = 0.0
    """Price of the current cycle's searches."""
    prices: list[float] = field(default_factory=list)
    """Prices of the current cycle's other requests, in order."""
    cycles: list[Cycle] = field(default_factory=list)
    domain: str | None = None
    successors: Successors | None = None
    _searching: bool = False

    @property
    def wants_states(self) -> bool:
        """The inner planner's."""
        return self.inner.wants_states

    def start(self, session: Session, prompt: Prefill) -> None:
        """Start the inner planner."""
        self.inner.start(session, prompt)
        self.domain = self.inner.domain
        self.successors = self.inner.successors

    def searching(self, context: int) -> Work[None]:
        """Run the inner planner's searches, which open a cycle."""
        self.searches = 0.0
        self.prices.clear()
        self._searching = True
        yield from self.inner.searching(context)
        self._searching = False

    def plan(self, context: int, pending: int) -> Plan:
        """Plan as the inner planner does."""
        plan = self.inner.plan(context, pending)
        self.successors = self.inner.successors
        return plan

    def observe(self, cycle: Cycle, states: list[Tensor] | None) -> None:
        """Price the cycle, and let the inner planner observe it so."""
        # A cycle ends with the full model's forward and its head.
        *drafting, forward, head = self.prices
        priced = replace(cycle, draft_seconds=sum(drafting), verify_seconds=forward + head, plan_seconds=self.searches)
        self.cycles.append(priced)
        self.inner.observe(priced, states)

    def finish(self) -> None:
        """Finish the inner planner."""
        self.inner.finish()

    def watching(self, work: Work[T]) -> Generator[ModelRequest, Any, T]:
        """Pass the work's requests on, and price each."""
        answer: Any = None
        while True:
            try:
                request = work.send(answer)
            except StopIteration as stop:
                value: T = stop.value
                return value
            if self._searching:
                self.searches += price(self.latency, request)
            else:
                self.prices.append(price(self.latency, request))
            answer = yield request


def priced(session: Session, prompt: Prefill, make: MakePlanner, latency: LatencyTable, limits: Limits) -> Work[Timed]:
    """Decode a session's `prompt` with a planner of `make`; the seconds are prices, without the first token's."""
    planner = PricedPlanner(make(), latency)
    done: Generation = yield from planner.watching(decoding(session, prompt, planner, limits))
    seconds = sum(cycle.seconds + cycle.plan_seconds for cycle in planner.cycles)
    return Timed(
        token_ids=done.token_ids,
        first_seconds=0.0,
        seconds=seconds,
        counted=len(done.token_ids) - 1,
        cycles=cycle_totals(planner.cycles),
    )


def priced_stream(
    decoder: Decoder,
    prompts: Sequence[list[int]],
    make: MakePlanner,
    latency: LatencyTable,
    limits: Limits,
    sampling: SamplingParams = GREEDY,
) -> Work[list[Timed]]:
    """Decode prompts one after the other, for planners that carry statistics from prompt to prompt.

    Each prompt gets a session of its own, so that several streams can run side by side.
    """
    found = list[Timed]()
    for ids in prompts:
        session = Session(decoder, sampling)
        prompt = session.prefill(ids, new_tokens=limits.max_new_tokens)
        found.append((yield from priced(session, prompt, make, latency, limits)))
    return found
