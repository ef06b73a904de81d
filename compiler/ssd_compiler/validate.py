"""Timed decoding of prompts that the search never saw: which finalist is fastest, and whether it pays."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from operator import attrgetter

from ssd_artifacts.domain_config import Choice, Validation
from ssd_compiler.calibrate import SharedPrefix
from ssd_compiler.progress import Tick
from ssd_profiles.errors import UserError
from ssd_profiles.intervals import speedup, speedup_interval
from ssd_runtime.engine.loop import decode
from ssd_runtime.engine.output.divergence import Kind, compare
from ssd_runtime.engine.output.generation import Generation
from ssd_runtime.engine.output.output import Limits
from ssd_runtime.model.decoder import Decoder
from ssd_runtime.planning.cost import Option
from ssd_runtime.planning.plan import ConstantPlanner, PlainPlanner, Plan, Planner
from ssd_runtime.sampling.params import GREEDY, SamplingParams
from ssd_runtime.sequence.prefill import Prefill
from ssd_runtime.sequence.session import Session

Contenders = Mapping[str, Callable[[], Planner]]
"""Names, each with a maker of one request's planner."""
Held = Sequence[tuple[list[int], Session, Prefill]]
"""Prompts, prefilled once for all that decode after them."""
ENOUGH = 4
"""Fewest prompts of which some choose among the finalists; with fewer, all measure the first finalist."""
ROUNDS = 3
"""Most times that the chosen plan is timed on the same prompts."""
NARROW = 0.3
"""One round is enough if the interval's width ÷ the speed-up is at most this."""
SETTLED = 0.98
"""Stop if a further round leaves the sum of the quickest times above this share of what it was before."""


@dataclass(frozen=True, slots=True)
class Confirmed:
    """The finalist that was fastest, and what it brought on other prompts."""

    choice: Choice
    validation: Validation
    option: Option
    """The mask, draft length and threshold of the choice."""


def validate(
    decoder: Decoder,
    prompts: Sequence[list[int]],
    finalists: Sequence[tuple[int, Option]],
    limits: Limits,
    tick: Tick,
    sampling: SamplingParams = GREEDY,
) -> Confirmed:
    """Choose among `finalists` (frontier index, best option) on a third of the prompts, measure it on the others.

    Of fewer than `ENOUGH` prompts all measure the first finalist: `prompts` are two at least, fastest entries first.

    Everything is timed in turn, against plain decoding of the same engine. The measurement is repeated where its
    interval is wide, and the quickest time of each prompt counts then: what other programs take from one round they
    seldom take from all. Raises UserError if an output differs from plain decoding by more than a rounding tie:
    that is a defect of this program.
    """
    options = dict(finalists)
    asked = len(prompts) // 3 if len(options) > 1 and len(prompts) >= ENOUGH else 0
    contenders: dict[str, Callable[[], Planner]] = {str(i): constant(option) for i, option in options.items()}
    held = prefilled(decoder, prompts, sampling)
    trial = _timed(held[:asked], contenders, limits, tick) if asked else {}
    pace = {name: _seconds_per_token(runs) for name, runs in trial.items()}
    best = min(pace, key=lambda name: pace[name]) if pace else str(finalists[0][0])
    measured: Contenders = {"plain": PlainPlanner, "masked": contenders[best]}
    runs = _timed(held[asked:], measured, limits, tick)
    for _ in range(ROUNDS - 1):
        if _is_narrow(_figures(runs["plain"], runs["masked"])):
            break
        before = _seconds(runs)
        again = _timed(held[asked:], measured, limits, lambda: None)
        runs = {name: _quickest(runs[name], again[name]) for name in runs}
        if _seconds(runs) > SETTLED * before:
            break
    figures = _figures(runs["plain"], runs["masked"])
    return Confirmed(choice_of(int(best), options[int(best)]), figures, options[int(best)])


def timed_speedup(
    decoder: Decoder,
    prompts: Sequence[list[int]],
    contenders: Contenders,
    limits: Limits,
    tick: Tick,
    sampling: SamplingParams = GREEDY,
) -> Validation:
    """Measure the second of two contenders against the first, in turn, on two prompts at least.

    Raises UserError if their outputs differ by more than a rounding tie.
    """
    first, second = _timed(prefilled(decoder, prompts, sampling), contenders, limits, tick).values()
    return _figures(first, second)


def _is_narrow(found: Validation) -> bool:
    low, high = found.speedup_interval
    return high - low <= NARROW * found.speedup


def _seconds(runs: Mapping[str, Sequence[Generation]]) -> float:
    return sum(run.decode_seconds for each in runs.values() for run in each)


def constant(option: Option) -> Callable[[], Planner]:
    """Return a maker of planners that always draft with an option."""
    plan = Plan.masked("validation", option.entry.mask, option.draft_length, option.threshold, option.entry.name)
    return lambda: ConstantPlanner(plan)


def prefilled(decoder: Decoder, prompts: Sequence[list[int]], sampling: SamplingParams) -> Held:
    """Prefill the prompts, each in a session of its own."""
    shared = SharedPrefix(decoder, prompts, sampling)
    return [(ids, *shared.prefill(ids)) for ids in prompts]


def _timed(held: Held, contenders: Contenders, limits: Limits, tick: Tick) -> dict[str, list[Generation]]:
    """Decode every prompt with every contender, after one short warm-up; the order changes from prompt to prompt."""
    runs: dict[str, list[Generation]] = {name: [] for name in contenders}
    names = list(contenders)
    for turn, (ids, session, prompt) in enumerate(held):
        if turn == 0:
            for make in contenders.values():
                decode(session, prompt, make(), Limits(min(8, limits.max_new_tokens), limits.eos_ids))
        for place in range(len(names)):
            name = names[(turn + place) % len(names)]
            runs[name].append(decode(session, prompt, contenders[name](), limits))
        for name in names[1:]:
            require_same(session, ids, runs[names[0]][-1].token_ids, runs[name][-1].token_ids)
        tick()
    return runs


def _quickest(one: list[Generation], other: list[Generation]) -> list[Generation]:
    """The faster one of each prompt's two generations."""
    return [min(pair, key=attrgetter("decode_seconds")) for pair in zip(one, other, strict=True)]


def _later(run: Generation) -> int:
    """Number of tokens after the first; 1 for an answer of one token, so that it has a speed."""
    return max(1, run.later_tokens)


def _seconds_per_token(runs: Sequence[Generation]) -> float:
    return sum(run.decode_seconds for run in runs) / sum(_later(run) for run in runs)


def require_same(session: Session, ids: list[int], expected: list[int], got: list[int]) -> None:
    """Raise UserError where outputs differ by more than a rounding tie."""
    # In a session of its own, since the prompt in this one may be decoded again.
    found = compare(Session(session.decoder, session.sampling), ids, expected, got)
    if found.kind is Kind.ERROR:
        raise UserError(
            f"validation: a draft changed new token {found.position}, which no rounding in {session.decoder.rounding} "
            f"explains (logit gap {found.gap}); give --dtype fp32, and if that fails too, report it as a defect"
        )


def choice_of(entry: int, option: Option) -> Choice:
    """The choice of a frontier's entry with the best option that it has."""
    return Choice(
        entry=entry,
        draft_length=option.draft_length,
        threshold=option.threshold,
        predicted_speedup=round(option.speedup, 4),
    )


def _figures(plain: list[Generation], masked: list[Generation]) -> Validation:
    before = [run.decode_seconds for run in plain]
    # Behind a near tie outputs may differ in length: the time for as many tokens as plain decoding's.
    after = [_seconds_per_token([run]) * _later(one) for one, run in zip(plain, masked, strict=True)]
    interval = speedup_interval(before, after)
    assert interval is not None, "two prompts at least"
    low, high = interval
    forwards = sum(run.target_forwards for run in masked)
    drafted = sum(run.num_draft_tokens for run in masked)
    return Validation(
        prompts=len(masked),
        new_tokens=sum(len(run.token_ids) for run in masked),
        speedup=round(speedup(before, after), 4),
        speedup_interval=(round(low, 4), round(high, 4)),
        mean_acceptance_length=round(sum(run.later_tokens for run in masked) / max(1, forwards), 4),
        draft_acceptance_rate=round(sum(run.num_accepted_tokens for run in masked) / max(1, drafted), 4),
        identical=all(a.token_ids == b.token_ids for a, b in zip(plain, masked, strict=True)),
    )
