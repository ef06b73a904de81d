"""Time of decoding by part (drafts, verification, choice, planning, routing), and the share that the profile explains.

`python -m bench.studies.steps.breakdown --artifact build/planted-bundle --strategy knn --prompts
build/prompts/spec_bench/dev.jsonl`

The latency table is measured immediately before, in the same process. *Profiled* is the sum of its attention, MLP and
head times for the forwards that were run, without its overhead term; the head includes the choice of tokens.
"""

from __future__ import annotations

import argparse
from collections import defaultdict
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from time import perf_counter
from typing import Any
from unittest.mock import patch

import numpy as np

from bench.fixtures.prompts.prompt_files import stratified
from ssd_profiles.latency import LatencyTable
from ssd_runtime.command import run_guarded
from ssd_runtime.engine.engine import Engine
from ssd_runtime.engine.loop import generate
from ssd_runtime.engine.sequence.generation import Generation
from ssd_runtime.engine.sequence.output import Limits
from ssd_runtime.engine.sequence.session import Session
from ssd_runtime.loading.models import conversation
from ssd_runtime.planning.plan import Cycle
from ssd_runtime.planning.registry import read_settings
from ssd_runtime.planning.strategy import make_strategy
from ssd_runtime.profiling.latency import measure_latency


class Stopwatch:
    """Seconds by name, spent in watched functions."""

    def __init__(self) -> None:
        self.seconds: dict[str, float] = defaultdict(float)

    @contextmanager
    def watch(self, owner: Any, attribute: str, name: str) -> Iterator[None]:
        """Add the time of calls to `owner.attribute` to `name` within the context."""
        original: Callable[..., Any] = getattr(owner, attribute)

        def timed(*arguments: Any, **options: Any) -> Any:
            began = perf_counter()
            try:
                return original(*arguments, **options)
            finally:
                self.seconds[name] += perf_counter() - began

        with patch.object(owner, attribute, timed):
            yield


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("--artifact", "--bundle", type=Path, required=True)
    parser.add_argument("--strategy", default="auto")
    parser.add_argument("--prompts", type=Path, required=True)
    parser.add_argument("--count", type=int, default=13)
    parser.add_argument("--max-new-tokens", type=int, default=64)
    arguments = parser.parse_args()
    engine = Engine.open(arguments.artifact)
    loaded = engine.loaded
    decoder = engine.decoder
    table = measure_latency(decoder)
    make = make_strategy(arguments.strategy, read_settings(arguments.strategy, []), decoder, engine.bundle, table)
    limits = Limits(arguments.max_new_tokens, loaded.eos_ids)
    prompts = stratified(arguments.prompts, arguments.count)
    generate(Session(decoder), loaded.encode(conversation(prompts[0])), make(), Limits(8))  # warm-up

    watch = Stopwatch()
    runs = list[Generation]()
    for prompt in prompts:
        planner = make()
        with watch.watch(type(planner), "start", "route"), watch.watch(Session, "choose", "choose"):
            runs.append(generate(Session(decoder), loaded.encode(conversation(prompt)), planner, limits))
    cycles = [cycle for run in runs for cycle in run.cycles]
    route = watch.seconds["route"]
    choose = watch.seconds["choose"]
    seconds = {
        "draft": sum(cycle.draft_seconds for cycle in cycles),
        # A cycle's verification includes the choice of tokens.
        "verify": sum(cycle.verify_seconds for cycle in cycles) - choose,
        "choose": choose,
        "plan": sum(cycle.plan_seconds for cycle in cycles),
        "route": route,
    }
    _show(seconds, sum(run.decode_seconds for run in runs) + route, sum(len(run.token_ids) for run in runs))
    _explain(cycles, table)


def _show(seconds: dict[str, float], wall: float, tokens: int) -> None:
    other = wall - sum(seconds.values())
    print(f"{tokens} tokens, {wall / tokens * 1e3:.2f} ms per token, routing included")
    for name, taken in seconds.items():
        print(f"  {name:7} {taken / tokens * 1e3:7.3f} ms  {taken / wall:6.1%}")
    print(f"  other   {other / tokens * 1e3:7.3f} ms  {other / wall:6.1%}")


def _explain(cycles: list[Cycle], table: LatencyTable) -> None:
    """Compare wall time with the profile's, for plain steps and for draft-verify cycles."""
    for name, chosen in {
        "plain steps": [cycle for cycle in cycles if not cycle.drafted],
        "draft-verify cycles": [cycle for cycle in cycles if cycle.drafted],
    }.items():
        if chosen:
            wall = sum(cycle.seconds for cycle in chosen)
            profiled = sum(_profiled(cycle, table) for cycle in chosen)
            print(
                f"{len(chosen)} {name}: {wall / len(chosen) * 1e3:.2f} ms each, profiled sub-layers and head "
                f"{profiled / len(chosen) * 1e3:.2f} ms, not explained {1 - profiled / wall:+.1%}"
            )


def _profiled(cycle: Cycle, table: LatencyTable) -> float:
    parts = replace(table, overhead=np.zeros_like(table.overhead))
    drafts = sum(parts.step_seconds(cycle.context + ahead, 1, cycle.plan.mask) for ahead in range(cycle.steps))
    return drafts + parts.step_seconds(cycle.context, cycle.verified)


if __name__ == "__main__":
    run_guarded(main)
