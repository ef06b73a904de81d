"""The life of a sequence, top-down: prefill, then plan, draft, verify, accept and observe until the end."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace
from time import perf_counter
from typing import Any

from ssd_runtime.devices.clock import Stopwatch
from ssd_runtime.devices.transfer import take_rows
from ssd_runtime.drafting.successors import RANKS
from ssd_runtime.drafting.tree import NOTHING, Draft
from ssd_runtime.engine.observed import Observation, credit_of
from ssd_runtime.engine.output.generation import Generation
from ssd_runtime.engine.output.output import Limits, Output
from ssd_runtime.engine.scheduler import run_alone
from ssd_runtime.engine.verification import Choices, accept, choosing, verification
from ssd_runtime.model.runner import Head, Work
from ssd_runtime.planning.plan import Cycle, Plan, Planner
from ssd_runtime.sequence.prefill import Prefill
from ssd_runtime.sequence.session import Session


def generate(
    session: Session,
    prompt_ids: list[int],
    planner: Planner,
    limits: Limits,
    on_tokens: Callable[[list[int]], None] | None = None,
) -> Generation:
    """Run `generating` for a lone sequence."""
    work = generating(session=session, prompt_ids=prompt_ids, planner=planner, limits=limits, on_tokens=on_tokens)
    return run_alone(session, work, prompt_ids)


def decode(
    session: Session,
    prompt: Prefill,
    planner: Planner,
    limits: Limits,
    prefill_seconds: float = 0.0,
) -> Generation:
    """Run `decoding` for a lone sequence."""
    work = decoding(session, prompt, planner, limits, prefill_seconds=prefill_seconds)
    return run_alone(session, work, session.ids)


def generating(
    session: Session,
    prompt_ids: list[int],
    planner: Planner,
    limits: Limits,
    on_tokens: Callable[[list[int]], None] | None = None,
    on_cycle: Callable[[Observation], None] | None = None,
    answered: Sequence[int] = (),
) -> Work[Generation]:
    """Prefill `prompt_ids` and decode after them.

    The output does not depend on the plans of `planner`, unless drafts are tested by rejection. `on_tokens` receives
    new tokens as soon as they are certain, and `on_cycle` every cycle before its tokens. `answered` are the first new
    tokens, where an earlier run of the request has chosen them: they are prefilled with the prompt, and decoding goes
    on as that run would have. Generation ends early if the context is full. Raises UserError if the prompt is empty or
    leaves no room in the context.
    """
    began = perf_counter()
    before = Output.after(answered, limits, session.decoder.shape.max_context - len(prompt_ids))
    if before.done:
        return Generation(
            prompt_tokens=len(prompt_ids),
            token_ids=before.tokens,
            finish_reason=before.finish_reason,
            answered=len(before.tokens),
        )
    prompt = yield from session.prefilling([*prompt_ids, *answered], new_tokens=limits.max_new_tokens)
    session.decoder.synchronize()
    seconds = perf_counter() - began
    work = decoding(
        session, prompt, planner, limits, on_tokens, on_cycle=on_cycle, prefill_seconds=seconds, answered=answered
    )
    return (yield from work)


def decoding(
    session: Session,
    prompt: Prefill,
    planner: Planner,
    limits: Limits,
    on_tokens: Callable[[list[int]], None] | None = None,
    on_cycle: Callable[[Observation], None] | None = None,
    prefill_seconds: float = 0.0,
    answered: Sequence[int] = (),
) -> Work[Generation]:
    """Decode after a prompt that the session has prefilled; this may be repeated for the same prompt.

    The prompt ends with the `answered` tokens, which do not end the answer.
    """
    session.decoder.synchronize()
    began = perf_counter()
    session.rewind(prompt, len(answered))
    session.ends = limits.eos_ids
    session.decoder.head.saw(session.ids, answered=False)
    planner.start(session, prompt)
    session.decoder.synchronize()
    prompt_tokens = prompt.tokens - len(answered)
    output = Output.after(answered, limits, session.decoder.shape.max_context - prompt_tokens)
    result = Generation(
        prompt_tokens=prompt_tokens,
        domain=planner.domain,
        token_ids=output.tokens,
        prefill_seconds=prefill_seconds + perf_counter() - began,
        num_cached_tokens=min(session.reused, prompt_tokens),
        answered=len(answered),
    )

    began = perf_counter()
    try:
        logits = yield Head(prompt.last[None], normed=True)
        session.pending = session.choose(logits, lambda: [[]])(0)
        output.add(session.pending)
        result.first_token_seconds = result.prefill_seconds + perf_counter() - began
        if on_tokens is not None:
            on_tokens(output.tokens[-1:])
        credit = credit_of(planner)
        watch = Stopwatch(session.decoder.lock, session.decoder.device)
        observing = 0.0
        while not output.done:
            cycle, observing = yield from _cycle(
                session=session, planner=planner, output=output, watch=watch, observed=observing
            )
            result.cycles.append(cycle)
            if on_cycle is not None:
                observation = Observation.of(cycle, planner, credit)
                credit = observation.credit
                on_cycle(observation)
            if on_tokens is not None:
                on_tokens(cycle.tokens)
    finally:
        planner.finish()
    result.decode_seconds = perf_counter() - began
    result.finish_reason = output.finish_reason
    return result


def _cycle(
    session: Session, planner: Planner, output: Output, watch: Stopwatch, observed: float
) -> Work[tuple[Cycle, float]]:
    """Search, plan, draft, verify, accept and observe.

    `observed` are the seconds that observing the last cycle took. Returns the cycle, and the seconds that observing it
    took.
    """
    watch.lap()  # drops the time of the receiver of tokens
    context = session.committed

    yield from planner.searching(context)
    plan = planner.plan(context)
    planning = observed + watch.lap()

    latest = session.load
    began = watch.mark()
    draft = yield from _drafting(session, plan, most=output.remaining - 1)
    drafted = watch.mark()

    keep_states = planner.wants_states
    ranks = RANKS if planner.successors is not None else 0
    answer, choices = yield from _verifying(session, draft, keep_states, ranks)
    if choices.spoiled:
        answer, choices = yield from _verifying(session, NOTHING, keep_states, ranks)
    states = answer[-1] if keep_states else answer
    draft = choices.draft
    accepted = accept(draft, choices.choose, output.add)
    before = session.ids[-1]
    pending = session.pending
    rows = draft.rows(pending)
    session.commit([rows[row] for row in accepted.rows], accepted.rows, states)
    session.pending = accepted.tokens[-1]
    session.decoder.head.saw(accepted.tokens)
    # The host has read the choices, so the work before both marks is done.
    drafting = watch.between(began, drafted)
    verifying = watch.lap() - drafting

    cycle = Cycle(
        plan=replace(plan, drafter=None),
        context=context,
        drafted=draft.main_path,
        accepted=accepted.drafts,
        tokens=accepted.tokens,
        verified=len(rows),
        draft_seconds=drafting,
        verify_seconds=verifying,
        steps=draft.steps,
        plan_seconds=planning,
        load=session.load,
        held=latest is not None and session.load is not None and session.load.step > latest.step + 1,
        begun=draft.begun is not None and not keep_states,
        origins=draft.origins(accepted.rows, len(accepted.tokens)),
    )
    watch.lap()  # drops the time of the report, which plain decoding has as well
    planner.observe(cycle, [take_rows(x, accepted.rows) for x in answer] if keep_states else None)
    # The planner judges guesses by the table as it was when they were made, so the table is updated after it.
    if (successors := planner.successors) is not None:
        best = choices.candidates(accepted.rows)
        successors.update(before, paths=draft.paths(pending), rows=accepted.rows, candidates=best)
    return cycle, watch.lap()


def _verifying(session: Session, draft: Draft, keep_states: bool, ranks: int) -> Work[tuple[Any, Choices]]:
    """Run the full model on a draft's rows; returns its answer, and its choices with `ranks` candidates per row."""
    answer = yield verification(session, draft, keep_states)
    logits = yield Head(answer[-1] if keep_states else answer)
    choices = yield from choosing(session, draft, logits, ranks)
    return answer, choices


def _drafting(session: Session, plan: Plan, most: int) -> Work[Draft]:
    """Draft up to `most` tokens, as many as can be part of the output."""
    length = min(plan.draft_length, session.draft_room(most))
    if plan.drafter is None or length < 1:
        return NOTHING
    draft = yield from plan.drafter.drafting(session, length)
    # A sibling's keys stand in other slots than in a plain step, which changes the order of sums.
    return draft.chain if session.decoder.bitwise else draft
