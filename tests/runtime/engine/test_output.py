"""A request's output: text in pieces, cycles with their budget, seconds without others' work."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from threading import Event, Thread
from time import sleep
from typing import Any

import pytest
from hypothesis import example, given
from hypothesis import strategies as st
from torch import Tensor
from transformers import PreTrainedTokenizerBase

from ssd_runtime.devices.clock import WaitedLock
from ssd_runtime.drafting.successors import Successors
from ssd_runtime.engine.loop import decode
from ssd_runtime.engine.observed import Observation, ObservedPlanner
from ssd_runtime.engine.output.generation import Generation
from ssd_runtime.engine.output.output import Limits
from ssd_runtime.engine.output.text_stream import TextStream, cut_at_stop, stop_condition
from ssd_runtime.loading.loaded_model import LoadedModel
from ssd_runtime.model.decoder import Decoder
from ssd_runtime.planning.auto.budget import Budget
from ssd_runtime.planning.plan import PLAIN, Cycle, PlainPlanner, Plan, Planner
from ssd_runtime.sequence.prefill import Prefill
from ssd_runtime.sequence.session import Session
from tests.models import tiny_model
from tests.toy_tokenizers import KINDS as TOKENIZERS


@dataclass(frozen=True)
class Kind:
    """A tokenizer's two directions: from text to ids, and from ids to text."""

    ids: Callable[[str], list[int]]
    text: Callable[[list[int]], str]


def bytes_of(text: str) -> list[int]:
    return list(text.encode())


def text_of(ids: list[int]) -> str:
    """Ids are bytes: characters of several bytes arrive in pieces."""
    return bytes(ids).decode("utf-8", errors="replace")


def kind_of(tokenizer: PreTrainedTokenizerBase) -> Kind:
    loaded = LoadedModel.of(tiny_model("llama"), tokenizer)
    return Kind(lambda text: list(tokenizer.encode(text, add_special_tokens=False)), loaded.decode)


KINDS = {
    "bytes": Kind(bytes_of, text_of),
    **{name: kind_of(TOKENIZERS[name]()) for name in ("byte_level", "llama", "gemma")},
}
LETTERS = "abE é日龘鰐😀"
each_kind = pytest.mark.parametrize("kind", KINDS.values(), ids=KINDS)


@each_kind
@given(text=st.text(LETTERS, max_size=40), sizes=st.lists(st.integers(1, 5), max_size=60), cut=st.integers(0, 9))
@example("日龘鰐", [1] * 9, 1)
@example("日龘鰐龘鰐", [3] * 5, 0)
def test_pieces_add_up_to_the_text(kind: Kind, text: str, sizes: list[int], cut: int) -> None:
    """Wherever the pieces end, and though the last character may lack bytes."""
    written: list[str] = []
    stream = TextStream(kind.text, [], written.append)
    ids = kind.ids(text)
    ids = rest = ids[: max(0, len(ids) - cut)]
    for size in sizes:
        stream.feed(rest[:size])
        rest = rest[size:]
    stream.feed(rest)
    stream.close()
    assert "".join(written) == kind.text(ids)
    assert text.startswith(kind.text(ids).rstrip("\ufffd"))


@each_kind
@given(
    text=st.text(LETTERS, max_size=40), stops=st.lists(st.text(LETTERS, min_size=1, max_size=3), min_size=1, max_size=2)
)
@example("go E EN x END more", ["END"])
@example("😀😀😀", ["E"])
@example("😀" * 12, ["E"])
def test_an_answer_ends_before_its_first_stop_text(kind: Kind, text: str, stops: list[str]) -> None:
    """As soon as the whole text shows it, though the test looks at the last tokens alone."""
    written: list[str] = []
    stream, has_ended = TextStream(kind.text, stops, written.append), stop_condition(kind.text, stops)
    assert has_ended is not None
    ids = list[int]()
    for token in kind.ids(text):
        stream.feed([token])
        ids.append(token)
        whole = kind.text(ids)
        assert has_ended(ids) == any(stop in whole for stop in stops)
        if has_ended(ids):
            break
    stream.close()
    assert "".join(written) == cut_at_stop(kind.text(ids), stops)


@each_kind
def test_bytes_that_never_make_a_character_are_shown_soon(kind: Kind) -> None:
    """Else each of them would be decoded again with every token that follows."""
    written: list[str] = []
    stream = TextStream(kind.text, [], written.append)
    first = kind.ids("é日")[-2]
    for number in range(1, 40):
        stream.feed([first])
        assert len("".join(written)) >= len(kind.text([first] * number)) - 3


def cycle(tokens: int) -> Cycle:
    return Cycle(
        plan=PLAIN,
        context=9,
        drafted=4,
        accepted=tokens - 1,
        tokens=[1] * tokens,
        verified=5,
        draft_seconds=0.0,
        verify_seconds=0.1,
    )


@dataclass
class Spending(Planner):
    """Routes to a domain, changes its table with every plan, and pays three plain steps per cycle."""

    budget: Budget = field(default_factory=Budget)
    calls: list[str] = field(default_factory=list)

    def start(self, session: Session, prompt: Prefill) -> None:
        self.domain = "rivers"

    def plan(self, context: int) -> Plan:
        self.successors = Successors()
        return PLAIN

    def observe(self, cycle: Cycle, states: list[Tensor] | None) -> None:
        self.budget.update(len(cycle.tokens), cost=3.0)

    def finish(self) -> None:
        self.calls.append("finish")


def test_cycles_are_reported_with_the_budget_they_took() -> None:
    seen = list[Observation]()
    planner = Spending()
    watched = ObservedPlanner(planner, seen.append)
    nothing: Any = None
    watched.start(nothing, nothing)
    assert watched.domain == "rivers"
    assert watched.plan(9) is PLAIN
    assert watched.successors is planner.successors is not None
    before = planner.budget.credit
    watched.observe(cycle(2), None)
    after = planner.budget.credit
    watched.observe(cycle(5), None)
    watched.finish()
    assert [len(each.cycle.tokens) for each in seen] == [2, 5]
    assert seen[0].spent == before - after > 0
    assert (seen[0].credit, seen[1].credit) == (after, planner.budget.credit)
    assert seen[1].spent == 0.0, "a cycle that gains takes nothing"
    assert planner.calls == ["finish"]


def test_planners_without_a_budget_are_reported_too() -> None:
    seen = list[Observation]()
    ObservedPlanner(PlainPlanner(), seen.append).observe(cycle(1), None)
    assert (seen[0].credit, seen[0].spent) == (None, 0.0)


HELD = 1.0
"""Seconds; a busy machine may hold a thread back for a large part of one."""


def run_while_held(work: Callable[[], None], lock: WaitedLock, held: Event, ready: Event | None = None) -> None:
    """Run `work` in a thread. Once it is `ready`, take the lock, set `held`, and release after `HELD` seconds."""
    thread = Thread(target=work)
    thread.start()
    if ready is not None:
        ready.wait()
    with lock:
        held.set()
        sleep(HELD)
    thread.join()


def test_cycles_are_timed_without_the_forwards_of_other_sessions() -> None:
    decoder, delivered, held, done = Decoder(tiny_model("llama")), Event(), Event(), list[Generation]()
    session = Session(decoder)
    prompt = session.prefill([1, 2, 3])

    def interrupt(tokens: list[int]) -> None:
        delivered.set()
        held.wait()

    def work() -> None:
        done.append(decode(session, prompt, PlainPlanner(), Limits(6), interrupt))

    run_while_held(work, decoder.lock, held, delivered)
    assert sum(cycle.seconds + cycle.plan_seconds for cycle in done[0].cycles) < HELD / 2
    assert done[0].decode_seconds >= HELD
