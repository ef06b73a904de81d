"""The life of a sequence, top-down: prefill, then plan, draft, verify, accept and observe until the end."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from time import perf_counter
from typing import Literal

from ssd_profiles.errors import UserError
from ssd_runtime.drafting.successors import RANKS
from ssd_runtime.drafting.tree import NOTHING, Draft
from ssd_runtime.engine.sequence.accept import accept
from ssd_runtime.engine.sequence.choices import choosing
from ssd_runtime.engine.sequence.session import Prefill, Session
from ssd_runtime.engine.sequence.verification import verification
from ssd_runtime.model.devices.transfer import take_rows
from ssd_runtime.model.runner import Head, ModelRunner, Work
from ssd_runtime.planning.plan import Cycle, Plan, Planner
from ssd_runtime.profiling.clock import Stopwatch

FinishReason = Literal["stop", "length", "context"]
"""`stop`: an end-of-sequence token or a stop condition. `length`: `max_new_tokens`. `context`: the context is full."""


@dataclass(frozen=True, slots=True)
class Limits:
    """The end of a generation: `max_new_tokens`, an end-of-sequence token, or `stop`, whichever comes first."""

    max_new_tokens: int
    eos_ids: frozenset[int] = frozenset()
    stop: Callable[[Sequence[int]], bool] | None = None
    """Stop condition, called after every new token with all new tokens so far."""

    def __post_init__(self) -> None:
        if self.max_new_tokens < 1:
            raise UserError(f"max_new_tokens: {self.max_new_tokens} is too few; give 1 or more")


@dataclass(slots=True)
class Generation:
    """The new tokens of one request, with their cycles and seconds."""

    prompt_tokens: int
    domain: str | None = None
    token_ids: list[int] = field(default_factory=list)
    cycles: list[Cycle] = field(default_factory=list)
    prefill_seconds: float = 0.0
    decode_seconds: float = 0.0
    first_token_seconds: float = 0.0
    """Seconds from the start to the first new token; the prefill is most of them."""
    finish_reason: FinishReason = "length"
    """The reason is `stop` even if the stop is the last token that is allowed."""
    num_cached_tokens: int = 0
    """Prompt tokens that were not run, because the prompt began like an earlier sequence."""
    answered: int = 0
    """Number of the first new tokens that were given, because an earlier run of the request chose them."""

    @property
    def decoded(self) -> int:
        """Number of new tokens that this run chose."""
        return len(self.token_ids) - self.answered

    @property
    def target_forwards(self) -> int:
        """Number of full-model forwards after the prefill."""
        return len(self.cycles)

    @property
    def num_draft_tokens(self) -> int:
        """Tokens drafted, except those after the end of generation."""
        return sum(cycle.num_draft_tokens for cycle in self.cycles)

    @property
    def num_accepted_tokens(self) -> int:
        """Accepted tokens that are part of the output."""
        return sum(cycle.num_accepted_tokens for cycle in self.cycles)

    @property
    def tokens_per_second(self) -> float:
        """New tokens per second of decoding, prefill excluded."""
        return self.decoded / self.decode_seconds if self.decode_seconds else 0.0


def generate(
    session: Session,
    prompt_ids: list[int],
    planner: Planner,
    limits: Limits,
    on_tokens: Callable[[list[int]], None] | None = None,
) -> Generation:
    """Run `generating` for a lone sequence."""
    work = generating(session=session, prompt_ids=prompt_ids, planner=planner, limits=limits, on_tokens=on_tokens)
    return ModelRunner(session.decoder).finish(work)


def decode(
    session: Session,
    prompt: Prefill,
    planner: Planner,
    limits: Limits,
    on_tokens: Callable[[list[int]], None] | None = None,
    prefill_seconds: float = 0.0,
) -> Generation:
    """Run `decoding` for a lone sequence."""
    work = decoding(
        session=session,
        prompt=prompt,
        planner=planner,
        limits=limits,
        on_tokens=on_tokens,
        prefill_seconds=prefill_seconds,
    )
    return ModelRunner(session.decoder).finish(work)


def generating(
    session: Session,
    prompt_ids: list[int],
    planner: Planner,
    limits: Limits,
    on_tokens: Callable[[list[int]], None] | None = None,
    answered: Sequence[int] = (),
) -> Work[Generation]:
    """Prefill `prompt_ids` and decode after them.

    The output does not depend on the plans of `planner`, unless drafts are tested by rejection. `on_tokens` receives
    new tokens as soon as they are certain. `answered` are the first new tokens, where an earlier run of the request has
    chosen them: they are prefilled with the prompt, and decoding goes on as that run would have. Generation ends early
    if the context is full. Raises UserError if the prompt is empty or leaves no room in the context.
    """
    began = perf_counter()
    before = _Output.after(answered, limits, session.decoder.shape.max_context - len(prompt_ids))
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
        session=session,
        prompt=prompt,
        planner=planner,
        limits=limits,
        on_tokens=on_tokens,
        prefill_seconds=seconds,
        answered=answered,
    )
    return (yield from work)


def decoding(
    session: Session,
    prompt: Prefill,
    planner: Planner,
    limits: Limits,
    on_tokens: Callable[[list[int]], None] | None = None,
    prefill_seconds: float = 0.0,
    answered: Sequence[int] = (),
) -> Work[Generation]:
    """Decode after a prompt that the session has prefilled; this may be repeated for the same prompt.

    The prompt ends with the `answered` tokens, which do not end the answer.
    """
    session.decoder.synchronize()
    began = perf_counter()
    session.rewind(prompt, len(answered))
    planner.start(session, prompt)
    session.decoder.synchronize()
    prompt_tokens = prompt.tokens - len(answered)
    output = _Output.after(answered, limits, session.decoder.shape.max_context - prompt_tokens)
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
        output.add(session.choose(logits, lambda: [[]])(0))
        result.first_token_seconds = result.prefill_seconds + perf_counter() - began
        _deliver(output.tokens[-1:], on_tokens)
        watch = Stopwatch(session.decoder.lock, session.decoder.device)
        observing = 0.0
        while not output.done:
            cycle, observing = yield from _cycle(
                session=session, planner=planner, output=output, watch=watch, observed=observing
            )
            result.cycles.append(cycle)
            _deliver(cycle.tokens, on_tokens)
    finally:
        planner.finish()
    result.decode_seconds = perf_counter() - began
    result.finish_reason = output.finish_reason
    return result


def _cycle(
    session: Session, planner: Planner, output: _Output, watch: Stopwatch, observed: float
) -> Work[tuple[Cycle, float]]:
    """Search, plan, draft, verify, accept and observe.

    `observed` are the seconds that observing the last cycle took. Returns the cycle, and the seconds that observing it
    took.
    """
    watch.lap()  # drops the time of the receiver of tokens
    context = session.committed
    pending = output.tokens[-1]

    yield from planner.searching(context)
    plan = planner.plan(context, pending)
    planning = observed + watch.lap()

    began = watch.mark()
    draft = yield from _drafting(session=session, pending=pending, plan=plan, most=output.remaining - 1)
    drafted = watch.mark()

    keep_states = planner.wants_states
    answer = yield verification(session=session, pending=pending, draft=draft, keep_states=keep_states)
    states = answer[-1] if keep_states else answer
    logits = yield Head(states)

    successors = planner.successors
    ranks = RANKS if successors is not None else 0
    choices = yield from choosing(session=session, pending=pending, draft=draft, logits=logits, ranks=ranks)
    draft = choices.draft
    accepted = accept(draft, choices.choose, output.add)
    before = session.ids[-1]
    rows = draft.rows(pending)
    session.commit([rows[row] for row in accepted.rows], accepted.rows, states)
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
        begun=draft.begun is not None and not keep_states,
    )
    watch.lap()  # drops the time of the report, which plain decoding has as well
    planner.observe(cycle, [take_rows(x, accepted.rows) for x in answer] if keep_states else None)
    # The planner judges guesses by the table as it was when they were made, so the table is updated after it.
    if successors is not None:
        best = choices.candidates(accepted.rows)
        successors.update(before, paths=draft.paths(pending), rows=accepted.rows, candidates=best)
    return cycle, watch.lap()


def _drafting(session: Session, pending: int, plan: Plan, most: int) -> Work[Draft]:
    """Draft up to `most` tokens, as many as can be part of the output."""
    length = min(plan.draft_length, session.draft_room(most))
    if plan.drafter is None or length < 1:
        return NOTHING
    draft = yield from plan.drafter.drafting(session, pending, length)
    # A sibling's keys stand in other slots than in a plain step, which changes the order of sums.
    return draft.chain if session.decoder.bitwise else draft


def _deliver(tokens: list[int], on_tokens: Callable[[list[int]], None] | None) -> None:
    if on_tokens is not None and tokens:
        on_tokens(tokens)


@dataclass(slots=True)
class _Output:
    """The new tokens so far, and whether they are complete."""

    tokens: list[int]
    limits: Limits
    most: int
    """Most new tokens, by the limits and the room in the context."""
    finish_reason: FinishReason
    """The reason for the limit `most`, until a stop comes first."""
    done: bool = False

    @classmethod
    def after(cls, tokens: Sequence[int], limits: Limits, room: int) -> _Output:
        """An output that begins with `tokens`, in a context that has `room` for new ones."""
        output = cls(
            tokens=[],
            limits=limits,
            most=min(limits.max_new_tokens, room),
            finish_reason="context" if room < limits.max_new_tokens else "length",
        )
        for token in tokens:
            if not output.add(token):
                break
        return output

    @property
    def remaining(self) -> int:
        """Number of new tokens that may still follow."""
        return self.most - len(self.tokens)

    def add(self, token: int) -> bool:
        """Add the next token; returns whether the answer goes on after it."""
        self.tokens.append(token)
        if token in self.limits.eos_ids or (self.limits.stop is not None and self.limits.stop(self.tokens)):
            self.finish_reason = "stop"
            self.done = True
        elif self.remaining <= 0:
            self.done = True
        return not self.done
