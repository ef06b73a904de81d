"""The controller of `auto` without a model: it replays traces of the target, with costs from a latency table."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from types import MappingProxyType, SimpleNamespace
from typing import Any

from ssd_artifacts.domain_config import ExitChoice
from ssd_profiles.latency import LatencyTable
from ssd_runtime.drafting.combined import Extended
from ssd_runtime.drafting.early_exit import EarlyExit
from ssd_runtime.drafting.lookup import Lookup
from ssd_runtime.drafting.successors import RANKS
from ssd_runtime.drafting.tree import NOTHING, Draft
from ssd_runtime.engine.verification import accept
from ssd_runtime.model.exit_heads import ExitHeads
from ssd_runtime.model.runner import ModelRunner, Work
from ssd_runtime.planning.auto.auto import AutoPlanner
from ssd_runtime.planning.auto.controller import Controller
from ssd_runtime.planning.auto.stream import Stream
from ssd_runtime.planning.frontier import Frontier
from ssd_runtime.planning.plan import Cycle, Plan
from ssd_runtime.sequence.session import Session

NO_MODEL = ModelRunner(None)  # type: ignore[arg-type]
"""A runner that completes work which requests no forward."""
WRONG = -1
"""A token outside every vocabulary."""
SESSION: Any = SimpleNamespace(pending=WRONG)

Predict = Callable[[str | None, int], tuple[bool, float]]
"""Maps (frontier entry, i) to whether a draft has the answer's i-th token right, and its confidence."""


@dataclass(frozen=True, slots=True)
class Trace:
    """One prompt, decoded plainly."""

    prompt: list[int]
    answer: list[int]
    candidates: list[list[int]]
    """Most probable tokens after answer[i], best first."""
    domain: str | None = None
    """Domain to which the prompt was routed."""
    drafts: dict[str, list[tuple[bool, float]]] = field(default_factory=dict)
    """Maps a frontier entry, after answer[i], to whether the masked model is right there and its confidence."""


@dataclass(frozen=True, slots=True)
class Replay:
    """The simulated decoding of a request."""

    cycles: list[Cycle]
    costs: list[float]
    """Cost of each cycle, in plain steps."""

    @property
    def tokens(self) -> int:
        """Number of new tokens after the first."""
        return sum(len(cycle.tokens) for cycle in self.cycles)

    def losses(self) -> list[float]:
        """Cost of each token beyond one plain step; a cycle's is assigned to its first token."""
        found = list[float]()
        for cycle, cost in zip(self.cycles, self.costs, strict=True):
            found += [cost - len(cycle.tokens), *[0.0] * (len(cycle.tokens) - 1)]
        return found


def controller(
    latency: LatencyTable,
    stream: Stream,
    trace: Trace,
    frontiers: Mapping[str, Frontier] = MappingProxyType({}),
    exits: Mapping[str, ExitChoice] = MappingProxyType({}),
) -> Controller:
    """Make a controller that has read the trace's prompt, with a bundle's masks and exits."""
    lookup = Lookup(stream.lookup)
    lookup.start(trace.prompt)
    heads: ExitHeads = None  # type: ignore[assignment] # that nobody asks: drafts are made by `_Oracle`
    planner = AutoPlanner(frontiers, exits, heads, None, latency, stream)
    sources, common = planner.draft_sources(trace.domain, lookup)
    return Controller(latency=latency, stream=stream, lookup=lookup, sources=sources, common=common)


def replay(
    controller: Controller,
    stream: Stream,
    trace: Trace,
    latency: LatencyTable,
    predict: Predict,
    plan_seconds: float = 0.0,
) -> Replay:
    """Run the controller through a trace. `plan_seconds` of planning are added to every cycle's cost."""
    done = Replay([], [])
    place = 1
    while place < len(trace.answer):
        ids = [*trace.prompt, *trace.answer[:place]]
        plan = controller.plan(len(ids) - 1, ids[-1])
        draft = _drafted(plan, trace, place, predict)
        left = trace.answer[place:]
        paths = draft.paths(ids[-1])

        def target(row: int, left: Sequence[int] = left, paths: list[list[int]] = paths) -> int:
            return left[len(paths[row]) - 1]

        accepted = accept(draft, target, lambda _: True)
        tokens = accepted.tokens
        context = len(ids) - 1
        rows = len(paths)
        draft_seconds = draft.steps * latency.step_seconds(context, 1, plan.mask)
        verify_seconds = latency.step_seconds(context, rows)
        drafter = plan.drafter
        exiting = isinstance(drafter, EarlyExit) and draft is not NOTHING
        if isinstance(drafter, EarlyExit) and exiting:
            draft_seconds, begun = _exit_seconds(latency, context, drafter.stops, rows)
            verify_seconds -= begun
        cycle = Cycle(
            plan=plan,
            context=context,
            drafted=draft.main_path,
            accepted=accepted.drafts,
            tokens=tokens,
            verified=rows,
            draft_seconds=draft_seconds,
            verify_seconds=verify_seconds,
            steps=draft.steps,
            plan_seconds=plan_seconds if controller.planned else 0.0,
            begun=exiting,
        )
        controller.observe(cycle)
        for here in range(place - 1, min(place - 1 + len(tokens), len(trace.candidates))):
            before = trace.answer[here - 1] if here else trace.prompt[-1]
            stream.lookup.successors.put(before, trace.answer[here], trace.candidates[here][:RANKS])
        done.cycles.append(cycle)
        done.costs.append((cycle.plan_seconds + cycle.seconds) / latency.step_seconds(context))
        place += len(tokens)
    controller.finish()
    return done


def _drafted(plan: Plan, trace: Trace, place: int, predict: Predict) -> Draft:
    length = min(plan.draft_length, len(trace.answer) - place - 1)
    if length < 1 or plan.drafter is None:
        return NOTHING
    oracle = _Oracle(trace.answer[place:], [predict(plan.entry, i) for i in range(place, place + length)])
    drafter = plan.drafter
    if isinstance(drafter, Extended):
        drafter = replace(drafter, drafter=replace(oracle, threshold=drafter.drafter.threshold))  # type: ignore[arg-type]
    if isinstance(drafter, EarlyExit):
        drafter = oracle
    return NO_MODEL.finish(drafter.drafting(SESSION, length))


def _exit_seconds(latency: LatencyTable, context: int, stops: Sequence[int], rows: int) -> tuple[float, float]:
    """Seconds of taking `rows` rows to the depth bound one by one, with the head after each stop, and all at once."""
    one, at_once = (sum(latency.sublayer_seconds(context, n)[: 2 * stops[-1]]) for n in (1, rows))
    return rows * (one + len(stops) * latency.head_seconds(1) + latency.overhead_seconds(1)), at_once


@dataclass(frozen=True, slots=True)
class _Oracle:
    """A source of model drafts that are right wherever `Predict` says so."""

    answer: Sequence[int]
    predicted: Sequence[tuple[bool, float]]
    threshold: float = 0.0

    def drafting(self, session: Session, length: int) -> Work[Draft]:
        yield from ()
        tokens = list[int]()
        for token, (right, confidence) in zip(self.answer[:length], self.predicted, strict=False):
            # The wrong token may occur elsewhere, so that guesses can follow it.
            tokens.append(token if right else token + 1)
            if confidence < self.threshold:
                break
        return Draft.branching(tokens, ())
