"""Timed decoding of several held-back prompts at once: up to which load drafting with the chosen mask pays."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace
from itertools import cycle, islice
from time import perf_counter

from ssd_artifacts.domain_config import LoadValidation
from ssd_compiler.progress import Tick
from ssd_compiler.validate import Confirmed, Held, constant, prefilled, require_same
from ssd_profiles.intervals import speedup, speedup_interval
from ssd_runtime.engine.loop import decoding
from ssd_runtime.engine.output.output import Limits
from ssd_runtime.engine.scheduler import Scheduler
from ssd_runtime.model.decoder import Decoder
from ssd_runtime.planning.cost import Option
from ssd_runtime.planning.plan import PlainPlanner, Planner
from ssd_runtime.sampling.params import GREEDY, SamplingParams

ROUNDS = 3
MOST_TOKENS = 64
"""New tokens per prompt: with several prompts at once, fewer tell as much."""


def validate_under_load(
    decoder: Decoder,
    prompts: Sequence[list[int]],
    confirmed: Confirmed,
    concurrency: Sequence[int],
    limits: Limits,
    tick: Tick,
    sampling: SamplingParams = GREEDY,
) -> Confirmed:
    """Add to what was confirmed how it compares with plain decoding where so many prompts decode at once.

    Prompts are repeated where there are fewer. Both ways decode in turn, from the same prefills. Raises UserError if
    an output differs from plain decoding by more than a rounding tie: that is a defect of this program.
    """
    short = replace(limits, max_new_tokens=min(limits.max_new_tokens, MOST_TOKENS))
    found = list[LoadValidation]()
    for sequences in concurrency:
        asked = list(islice(cycle(prompts), max(sequences, len(prompts))))
        held = prefilled(decoder, asked, sampling)
        found.append(_measured(decoder, held, confirmed.option, sequences, short))
        tick()
    validation = confirmed.validation.model_copy(update={"under_load": tuple(found)})
    return replace(confirmed, validation=validation)


def _measured(decoder: Decoder, held: Held, option: Option, sequences: int, limits: Limits) -> LoadValidation:
    ways: dict[str, Callable[[], Planner]] = {"plain": PlainPlanner, "masked": constant(option)}
    taken: dict[str, list[float]] = {name: [] for name in ways}
    outputs = dict[str, list[list[int]]]()
    _decoded(decoder, held, ways["masked"], sequences, replace(limits, max_new_tokens=min(8, limits.max_new_tokens)))
    for number in range(ROUNDS):
        for name in ("plain", "masked") if number % 2 == 0 else ("masked", "plain"):
            outputs[name], seconds = _decoded(decoder, held, ways[name], sequences, limits)
            taken[name].append(seconds)
    for (ids, session, _), expected, got in zip(held, outputs["plain"], outputs["masked"], strict=True):
        require_same(session, ids, expected, got)
    interval = speedup_interval(taken["plain"], taken["masked"])
    assert interval is not None, "two rounds at least"
    return LoadValidation(
        concurrency=sequences,
        speedup=round(speedup(taken["plain"], taken["masked"]), 4),
        speedup_interval=(round(interval[0], 4), round(interval[1], 4)),
        identical=outputs["plain"] == outputs["masked"],
    )


def _decoded(
    decoder: Decoder, held: Held, make: Callable[[], Planner], sequences: int, limits: Limits
) -> tuple[list[list[int]], float]:
    """The outputs, and the seconds per token while as many as asked for decode; fewer are left in the end."""
    scheduler = Scheduler(decoder, sequences, cache_bytes=0)  # the sessions have memory of their own
    told = list[int]()
    jobs = [
        scheduler.add(session, decoding(session, prompt, make(), limits, told.extend), session.ids)
        for _, session, prompt in held
    ]
    seconds = per_token = 0.0
    while scheduler.running or scheduler.waiting:
        began = perf_counter()
        scheduler.step()
        seconds += perf_counter() - began
        if not per_token or scheduler.waiting or scheduler.running == sequences:
            per_token = seconds / len(told)
    return [job.ended().token_ids for job in jobs], per_token
