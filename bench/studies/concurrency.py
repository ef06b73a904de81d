"""Tokens/s of several requests at once, by `plain` and other strategies in turn.

`python -m bench.studies.concurrency --artifact demo --prompts FILE --at 1,2,4,8,16 --strategies auto`

Prompts are prefilled, then decoded N at a time; a new one joins whenever one ends. Plain decoding takes part twice,
which shows the noise. Every output is compared with the lone plain decode of its prompt. Answers continue after their
end token, so that all have one length. Intervals are over rounds of the same prompts.
"""

from __future__ import annotations

import argparse
from collections import defaultdict
from collections.abc import Sequence
from pathlib import Path
from time import perf_counter

from bench.fixtures.prompt_files import SPEC_BENCH, stratified
from bench.harness.provenance import commit
from ssd_profiles.intervals import speedup, speedup_interval
from ssd_runtime import Engine
from ssd_runtime.command import run_guarded
from ssd_runtime.engine.divergence import Kind, compare
from ssd_runtime.engine.loop import Generation, Limits, decode, decoding
from ssd_runtime.engine.scheduler import Job, Scheduler
from ssd_runtime.engine.session import Prefill, Session
from ssd_runtime.loading.models import conversation
from ssd_runtime.planning.plan import PlainPlanner

AGAIN = "plain again"


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("--artifact", "--bundle", type=Path)
    parser.add_argument("--model", default="demo")
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
    """Decode all prompts, `requests` at a time, by each strategy in turn, and print their speeds."""
    held = list[tuple[Session, Prefill]]()
    taken = defaultdict[str, list[float]](list)
    wrong = 0
    near = 0
    for ids in prompts:
        session = Session(engine.decoder)
        held.append((session, session.prefill(ids, new_tokens=limits.max_new_tokens)))
    alone = [decode(session, prefilled, PlainPlanner(), limits).token_ids for session, prefilled in held]
    for number in range(rounds):
        shift = number % len(names)
        for name in names[shift:] + names[:shift]:
            done, seconds = through(engine, requests, held, name, limits)
            taken[name].append(seconds)
            for ids, expected, each in zip(prompts, alone, done, strict=True):
                kind = compare(Session(engine.decoder), ids, expected, each.token_ids).kind
                wrong = wrong + (kind is Kind.ERROR)
                near = near + (kind is Kind.NEAR_TIE)
    count = rounds * len(prompts) * len(names)
    print(f"{requests} at once, {len(prompts)} prompts: {wrong} of {count} outputs wrong, {near} near ties")
    for name, seconds_each in taken.items():
        rate = rounds / sum(seconds_each)
        interval = speedup_interval(taken["plain"], seconds_each)
        shown = "" if interval is None or name == "plain" else f" ({interval[0]:.2f}–{interval[1]:.2f})"
        print(
            f"  {name:14} {rate:7.1f} tokens/s  {speedup(taken['plain'], seconds_each):.3f} of plain{shown}", flush=True
        )


def through(
    engine: Engine, requests: int, held: Sequence[tuple[Session, Prefill]], name: str, limits: Limits
) -> tuple[list[Generation], float]:
    """Decode prefilled prompts, `requests` at a time. Returns the generations and the seconds per token.

    Time counts while all slots are in use: towards the end, fewer sequences are left.
    """
    # Every round is a stream of its own, because statistics of an earlier one would come from these very answers.
    make = engine.planners("plain" if name == AGAIN else name)
    scheduler = Scheduler(engine.decoder, requests, cache_bytes=0)  # the sessions have memory of their own
    jobs = list[Job[Generation]]()
    counts = list[int]()
    for session, prefilled in held:
        work = decoding(session, prefilled, make(), limits, lambda tokens: counts.append(len(tokens)))
        jobs.append(scheduler.add(session, work, session.ids))
    began = perf_counter()
    per_token = 0.0
    while scheduler.running or scheduler.waiting:
        scheduler.step()
        if scheduler.waiting or scheduler.running == requests:
            per_token = (perf_counter() - began) / sum(counts)
    return [job.ended() for job in jobs], per_token


if __name__ == "__main__":
    run_guarded(main)
