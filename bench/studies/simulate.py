"""The controller of `auto` without a model: traces of the target, with costs from a latency table.

`python -m bench.studies.simulate --traces build/traces/demo.json --artifact demo` replays traces of
bench.studies.traces as one stream. It prints the expected speed-up by category, separately for prompts that served for
tuning and others. With `--alone` every prompt is its own stream; without `--artifact` the successor table starts empty.
Masks of a bundle take part if the traces were made with it.
"""

from __future__ import annotations

import argparse
from collections import defaultdict
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from time import perf_counter
from types import MappingProxyType

from bench.studies.traces import Trace, read_traces
from ssd_artifacts.bundle import Bundle
from ssd_artifacts.domain_config import ExitChoice
from ssd_artifacts.reference_bundle import bundle_path
from ssd_profiles.latency import LatencyTable
from ssd_runtime.command import run_guarded
from ssd_runtime.drafting.combined import Extended
from ssd_runtime.drafting.early_exit import EarlyExit
from ssd_runtime.drafting.lookup import Lookup, LookupStats
from ssd_runtime.drafting.successors import RANKS, Successors
from ssd_runtime.drafting.tree import NOTHING, Draft
from ssd_runtime.engine.sequence.accept import accept
from ssd_runtime.engine.sequence.session import Session
from ssd_runtime.model.exit_heads import ExitHeads
from ssd_runtime.model.runner import ModelRunner, Work
from ssd_runtime.planning.auto.auto import draft_sources
from ssd_runtime.planning.auto.controller import Controller
from ssd_runtime.planning.auto.stream import Stream
from ssd_runtime.planning.frontier import Frontier
from ssd_runtime.planning.plan import Cycle, Plan

NO_MODEL = ModelRunner(None)  # type: ignore[arg-type]
"""A runner that completes work which requests no forward."""
WRONG = -1
"""A token outside every vocabulary."""

Predict = Callable[[str | None, int], tuple[bool, float]]
"""Maps (frontier entry, i) to whether a draft has the answer's i-th token right, and its confidence."""


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
    sources, common = draft_sources(trace.domain, frontiers, exits, heads, latency, stream, lookup)
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
        drafter = replace(drafter, masked=replace(oracle, threshold=drafter.masked.threshold))  # type: ignore[arg-type]
    if isinstance(drafter, EarlyExit):
        drafter = oracle
    return NO_MODEL.finish(drafter.drafting(None, WRONG, length))  # type: ignore[arg-type]


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

    def drafting(self, session: Session, pending: int, length: int) -> Work[Draft]:
        yield from ()
        tokens = list[int]()
        for token, (right, confidence) in zip(self.answer[:length], self.predicted, strict=False):
            # The wrong token may occur elsewhere, so that guesses can follow it.
            tokens.append(token if right else token + 1)
            if confidence < self.threshold:
                break
        return Draft.branching(tokens, ())


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("--traces", type=Path, default=Path("build/traces/demo.json"))
    parser.add_argument(
        "--artifact", "--bundle", type=Path, help="a bundle whose successors and latency table are used"
    )
    parser.add_argument("--latency", type=Path, help="a latency table instead, such as the user's cache keeps")
    parser.add_argument("--alone", action="store_true", help="every prompt is a stream of its own")
    arguments = parser.parse_args()
    bundle = Bundle.load(bundle_path(arguments.artifact or Path("demo")))
    # Successors of another model would be meaningless, but latencies can be borrowed.
    known = bundle.successors if arguments.artifact is not None else None
    successors = known.rows() if known is not None else []
    if arguments.latency is not None:
        latency = LatencyTable.from_json(arguments.latency.read_text())
    else:
        latency = next(iter(bundle.latency.values()))

    def begin() -> Stream:
        return Stream(LookupStats(Successors(successors)))

    domains = bundle.domains if arguments.artifact is not None else {}
    frontiers = Frontier.of_all(domains, bundle.model.num_layers, latency)
    stream = begin()
    planning = 0.0
    found = defaultdict[str, list[tuple[int, float]]](list)
    for number, trace in enumerate(read_traces(arguments.traces)):
        stream = begin() if arguments.alone else stream
        began = perf_counter()
        masks = frontiers if trace.drafts else {}
        done = replay(controller(latency, stream, trace, masks), stream, trace, latency, _as_traced(trace))
        planning += perf_counter() - began
        for group in ("all", trace.category, "held back" if number % 2 else "tuned on"):
            found[group].append((done.tokens, sum(done.costs)))
    for group, each in sorted(found.items()):
        tokens = sum(tokens for tokens, _ in each)
        cost = sum(cost for _, cost in each)
        worst = min(tokens / cost for tokens, cost in each)
        print(f"{group:16} {tokens / cost:.3f}  worst prompt {worst:.3f}")
    print(f"replaying took {planning / sum(tokens for tokens, _ in found['all']) * 1e3:.2f} ms per token")


def _as_traced(trace: Trace) -> Predict:
    """Drafts as the traced masks made them. An answer's first token comes from the prefill."""
    return lambda entry, place: trace.drafts[entry][place - 1] if entry in trace.drafts else (False, 1.0)


if __name__ == "__main__":
    run_guarded(main)
