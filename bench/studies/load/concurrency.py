"""Tokens/s of several requests at once, by `plain` and other strategies in turn.

`python -m bench.studies.load.concurrency --artifact demo --prompts FILE --at 1,2,4,8,16 --strategies auto`

Prompts are prefilled, then decoded N at a time; a new one joins whenever one ends. Strategies take turns of a few steps
each. Plain decoding takes part twice, which shows the noise. Every output is compared with the lone plain decode of its
prompt. Answers continue after their end token, so that all have one length. Intervals are over rounds of the same
prompts.
"""

from __future__ import annotations

import argparse
from collections import Counter, defaultdict
from collections.abc import Sequence
from pathlib import Path

from bench.fixtures.prompts.prompt_files import SPEC_BENCH, stratified
from bench.harness.provenance import commit
from ssd_profiles.intervals import speedup, speedup_interval
from ssd_runtime import Engine
from ssd_runtime.command import run_guarded
from ssd_runtime.engine.loop import decode
from ssd_runtime.engine.offline.divergence import Kind, compare
from ssd_runtime.engine.offline.interleaved import SharedRun
from ssd_runtime.engine.sequence.output import Limits
from ssd_runtime.engine.sequence.prefill import Prefill
from ssd_runtime.engine.sequence.session import Session
from ssd_runtime.loading.models import conversation
from ssd_runtime.planning.plan import PlainPlanner

AGAIN = "plain again"
TURN = 4
"""Steps that a strategy takes before it is the next one's turn."""


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("--artifact", "--bundle", type=Path)
    parser.add_argument("--model", default="demo@wheel")
    parser.add_argument("--prompts", type=Path, default=SPEC_BENCH)
    parser.add_argument("--at", default="1,2,4,8,16,32")
    parser.add_argument("--strategies", default="auto")
    parser.add_argument("--new-tokens", type=int, default=64)
    parser.add_argument("--waves", type=int, default=2, help="prompts ÷ requests at once; 13 prompts at least")
    parser.add_argument("--rounds", type=int, default=3)
    arguments = parser.parse_args()
    engine = Engine.open(arguments.artifact, None if arguments.artifact else arguments.model)
    names = ["plain", *arguments.strategies.split(","), AGAIN]
    print(f"commit {commit()}; {engine.decoder.kernels}; {arguments.new_tokens} new tokens")
    for requests in map(int, arguments.at.split(",")):
        prompts = stratified(arguments.prompts, max(13, requests * arguments.waves))
        ids = [engine.loaded.encode(conversation(prompt)) for prompt in prompts]
        report(engine, requests, ids, names, Limits(arguments.new_tokens), arguments.rounds)


def report(
    engine: Engine,
    requests: int,
    prompts: Sequence[list[int]],
    names: list[str],
    limits: Limits,
    rounds: int,
) -> None:
    """Decode all prompts, `requests` at a time, by all strategies side by side, and print their speeds."""
    held = {name: prefilled(engine, prompts, limits) for name in names}
    taken = defaultdict[str, list[float]](list)
    kinds = Counter[Kind]()
    alone = [decode(session, prompt, PlainPlanner(), limits).token_ids for session, prompt in held["plain"]]
    for number in range(rounds):
        # Every round is a stream of its own, because statistics of an earlier one would come from these very answers.
        runs = {
            name: SharedRun(
                decoder=engine.decoder,
                held=held[name],
                make_planner=engine.planners("plain" if name == AGAIN else name),
                sequences=requests,
                limits=limits,
            )
            for name in names
        }
        order = list(runs.values())
        side_by_side(order[number % len(order) :] + order[: number % len(order)])
        for name, run in runs.items():
            taken[name].append(run.per_token)
            for ids, expected, job in zip(prompts, alone, run.jobs, strict=True):
                kinds[compare(Session(engine.decoder), ids, expected, job.ended().token_ids).kind] += 1
    print(
        f"{requests} at once, {len(prompts)} prompts: {kinds[Kind.ERROR]} of {kinds.total()} outputs wrong, "
        f"{kinds[Kind.NEAR_TIE]} near ties"
    )
    for name, seconds_each in taken.items():
        rate = rounds / sum(seconds_each)
        interval = speedup_interval(taken["plain"], seconds_each)
        shown = "" if interval is None or name == "plain" else f" ({interval[0]:.3f}–{interval[1]:.3f})"
        print(
            f"  {name:14} {rate:7.1f} tokens/s  {speedup(taken['plain'], seconds_each):.3f} of plain{shown}", flush=True
        )


def prefilled(engine: Engine, prompts: Sequence[list[int]], limits: Limits) -> list[tuple[Session, Prefill]]:
    """A session per prompt, which it has been through."""
    sessions = [Session(engine.decoder) for _ in prompts]
    return [
        (session, session.prefill(ids, new_tokens=limits.max_new_tokens))
        for session, ids in zip(sessions, prompts, strict=True)
    ]


def side_by_side(runs: Sequence[SharedRun]) -> None:
    """Let runs take turns of a few steps: a machine whose pace comes and goes is fair to all of them."""
    while left := [run for run in runs if not run.done]:
        for run in left:
            run.steps(TURN)


if __name__ == "__main__":
    run_guarded(main)
