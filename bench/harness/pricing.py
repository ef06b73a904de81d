"""Decoding whose time is priced by a latency table: every forward, searches included, costs what the table says.

Prices carry no timing noise, so a busy machine will do; only the table has to come from a quiet one. Whatever is
computed beside forwards costs nothing: routing, sampling, a Gaussian process.
"""

from __future__ import annotations

from collections.abc import Generator
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any, TypeVar

from torch import Tensor

from bench.harness.contenders import Decode, Timed, cycle_totals, strategy_of
from ssd_profiles.errors import UserError
from ssd_profiles.latency import LatencyTable
from ssd_runtime import Engine, SamplingParams
from ssd_runtime.drafting.successors import Successors
from ssd_runtime.engine.loop import decoding
from ssd_runtime.engine.output.output import Limits
from ssd_runtime.model.batch.batch import Segment
from ssd_runtime.model.runner import Forward, Head, ModelRequest, ModelRunner, Work
from ssd_runtime.planning.plan import Cycle, Plan, Planner
from ssd_runtime.sequence.prefill import Prefill
from ssd_runtime.sequence.session import Session

T = TypeVar("T")


def read_latency(path: Path, layers: int) -> LatencyTable:
    """The table in a file, for a model of `layers` layers of the same sizes.

    Raises UserError where its layers are of several kinds, because it does not say which kind a new layer has.
    """
    table = LatencyTable.from_json(path.read_text(encoding="utf-8"))
    kinds = sorted(set(table.layer_kinds))
    if len(kinds) > 1:
        raise UserError(f"{path}: expected layers of one kind, got {', '.join(kinds)}")
    return replace(table, layer_kinds=table.layer_kinds[:1] * layers)


def priced(engine: Engine, contender: str, sampling: SamplingParams) -> Decode:
    """Make a strategy a contender whose seconds are prices by `engine.latency`, without the first token's."""
    make_planner = engine.planners(*strategy_of(contender))

    def decode(ids: list[int], new: int) -> Timed:
        session = Session(engine.decoder, sampling)
        prompt = session.prefill(ids, new_tokens=new)
        planner = PricedPlanner(make_planner(), engine.latency)
        work = planner.watching(decoding(session, prompt, planner, Limits(new, engine.loaded.eos_ids)))
        tokens = ModelRunner(engine.decoder).finish(work).token_ids
        return Timed(
            token_ids=tokens,
            first_seconds=0.0,
            seconds=sum(cycle.seconds + cycle.plan_seconds for cycle in planner.cycles),
            counted=len(tokens) - 1,
            cycles=cycle_totals(planner.cycles),
        )

    return decode


def price(latency: LatencyTable, request: ModelRequest) -> float:
    """Seconds of a request that runs alone, by the table.

    A step's overhead belongs to the forward that begins at the first sub-layer. Raises UserError for a mask with
    sub-layers on light copies, because the table's prices are those of full weights.
    """
    if not isinstance(request, Forward | Head):
        return 0.0
    # More rows than the table has cost in proportion: multiplications bound these.
    known = min(request.size, int(latency.queries[-1]))
    factor = request.size / known
    if isinstance(request, Head):
        return factor * (latency.draft_head_seconds(known) if request.drafting else latency.head_seconds(known))
    if request.mask is not None and request.mask.light:
        raise UserError(
            "--priced: prices do not know sub-layers on light copies; give a bundle of `--draft-bits none`, "
            "or auto+light=0"
        )
    context = max(int(part.slot) if isinstance(part, Segment) else part.views[0].end for part in request.segments)
    parts = latency.sublayer_seconds(context, known)
    last = len(parts) if request.last is None else request.last
    kept = (i for i in range(request.first, last) if request.mask is None or not request.mask.skipped[i])
    overhead = latency.overhead_seconds(1) if request.first == 0 else 0.0
    return factor * sum(parts[i] for i in kept) + overhead


@dataclass(slots=True)
class PricedPlanner(Planner):
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

    def plan(self, context: int) -> Plan:
        """Plan as the inner planner does."""
        plan = self.inner.plan(context)
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
