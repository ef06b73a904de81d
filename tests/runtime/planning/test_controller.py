"""The controller in simulation: what it may lose is bounded, what pays is used, what fails is left and tried again."""

from __future__ import annotations

import itertools
import random
from collections.abc import Callable, Mapping
from dataclasses import replace
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from ssd_artifacts.domain_config import ExitChoice
from ssd_profiles.formulas import expected_tokens
from ssd_profiles.latency import LatencyTable
from ssd_profiles.mask import SubLayerPlan
from ssd_runtime.drafting.combined import Extended
from ssd_runtime.drafting.early_exit import EarlyExit
from ssd_runtime.drafting.lookup import Lookup, LookupStats, Node
from ssd_runtime.planning.auto.budget import (
    MOST,
    MOST_PLANNING,
    PER_TOKEN,
    PLANNING_PER_TOKEN,
    START_PLANNING,
    Budget,
    Budgets,
)
from ssd_runtime.planning.auto.chain_drafts import ChainDrafts
from ssd_runtime.planning.auto.controller import Controller
from ssd_runtime.planning.auto.draft_source import DraftProposal
from ssd_runtime.planning.auto.draft_stats import HYSTERESIS, MIN_GAIN, PRIOR_TOKENS, DraftStats
from ssd_runtime.planning.auto.exit_drafts import ExitDrafts
from ssd_runtime.planning.auto.head_drafts import AGREEMENT, HeadDrafts
from ssd_runtime.planning.auto.masked_drafts import MaskedDrafts
from ssd_runtime.planning.auto.shared_step import Share, SharedSteps
from ssd_runtime.planning.auto.stream import PlanningTime, Stream
from ssd_runtime.planning.auto.verify_stats import SETTLING, VerifyStats
from ssd_runtime.planning.cost import CostModel, Entry
from ssd_runtime.planning.frontier import Frontier
from ssd_runtime.planning.lookup import Guess
from ssd_runtime.planning.plan import Cycle, Plan
from ssd_runtime.sequence.load import Load
from tests.simulated import Replay, Trace, controller, replay
from tests.tables import latency_table, profile, with_curve, with_light_costs

LAYERS = 8
TABLE = latency_table(LAYERS)
DOMAIN = "stories"
BOUND = 5.4
"""Plain steps that may be lost over 64 tokens: 5, and a little for what the last cycle yields besides."""


def masks(name: str, skipped: range, agreement: float) -> Frontier:
    """A frontier of one mask."""
    return Frontier((Entry(name, SubLayerPlan.of(LAYERS, skipped), profile(agreement)),))


HALF = {DOMAIN: masks("half", range(2, 10), 0.95)}
KINDS = ("random", "repeating", "mixed")
EXITS = [
    ExitChoice(stops=stops, width=width, threshold=0.5, annealing=0.0, predicted_speedup=2.5)
    for stops, width in (([1], 1), ([2, 4], 4), ([7], 6))
]


def story(kind: str, seed: int, length: int = 300) -> Trace:
    """An answer that repeats itself, one without any pattern, or both by turns, with candidates that may be wrong."""
    draws = random.Random(seed)
    prompt = [draws.randint(1, 40) for _ in range(40)]
    answer: list[int] = []
    while len(answer) < length:
        if kind == "random" or (kind == "mixed" and len(answer) // 60 % 2):
            answer.append(draws.randint(1, 40))
        else:
            answer.append(prompt[len(answer) % 40])
    answer = answer[:length]
    # Of wrong candidates the target's own is never one: every guess by them fails.
    return Trace(prompt, answer, [[99, 98, 97, 96]] * (length - 1), DOMAIN)


TEN_MS = latency_table(LAYERS, mlp=8e-4, per_token=1e-4)
"""A plain step takes some 10 ms, by this table."""
PLANNING = 2.8e-4


def run(
    trace: Trace,
    right: Callable[[int], bool],
    frontiers: Mapping[str, Frontier] = HALF,
    stream: Stream | None = None,
    exits: ExitChoice | None = None,
    table: LatencyTable = TABLE,
    plan_seconds: float = 0.0,
) -> Replay:
    stream = stream or Stream()
    planner = controller(table, stream, trace, frontiers, {DOMAIN: exits} if exits else {})
    return replay(planner, stream, trace, table, lambda entry, place: (right(place), 1.0), plan_seconds)


cycles_of_one = st.lists(st.none() | st.tuples(st.integers(1, 25), st.floats(1.0, 12.0)), max_size=8)
requests = st.lists(cycles_of_one, max_size=25)
"""Cycles of requests: tokens and cost; None for one that loses all that may be lost."""


def spent(budget: Budget, cycle: tuple[int, float] | None) -> tuple[int, float]:
    """Tokens and cost of a cycle; a plain step where it is not allowed."""
    tokens, cost = cycle or (1, budget.most_cost)
    return (tokens, cost) if cost <= budget.most_cost else (1, 1.0)


def assert_bounded(taken: list[tuple[int, float]], most: float, per_token: float) -> None:
    """Require a bound of the loss over any run of cycles, of which tokens and cost are given."""
    lost = list(itertools.accumulate((cost - tokens for tokens, cost in taken), initial=0.0))
    tokens = list(itertools.accumulate((tokens for tokens, _ in taken), initial=0))
    for first, last in itertools.combinations(range(len(lost)), 2):
        assert lost[last] - lost[first] <= most + (tokens[last] - tokens[first]) * per_token + 1e-9


def worst(done: Replay, tokens: int = 64) -> float:
    """The most that is lost over so many tokens, or fewer."""
    lost = [0.0, *itertools.accumulate(done.losses())]
    return max(
        lost[last] - lost[first] for last in range(len(lost)) for first in range(max(0, last - tokens), last + 1)
    )


@given(requests, st.floats(0.0, 0.3))
def test_the_bound_holds_for_short_requests_one_after_the_other(
    stream: list[list[tuple[int, float] | None]], planning: float
) -> None:
    """Over any run of cycles of one request after the other no more is lost than within a single long one."""
    budgets, taken = Budgets(), list[tuple[int, float]]()
    for cycles in stream:
        budget = budgets.take()
        for cycle in cycles:
            planned = budget.covers_planning
            done = spent(budget, cycle) if planned else (1, 1.0)
            budget.update(*done, planning if planned else 0.0)
            taken.append((done[0], done[1] + planning * planned))
        budgets.give_back(budget)
    assert_bounded(taken, MOST + MOST_PLANNING + planning, PER_TOKEN + PLANNING_PER_TOKEN)


@given(requests, st.integers(2, 5), st.integers(0, 99))
def test_where_several_decode_at_once_the_bound_counts_for_each(
    stream: list[list[tuple[int, float] | None]], most: int, seed: int
) -> None:
    """And what one of them does never changes what another may spend."""
    draws, budgets, waiting = random.Random(seed), Budgets(), list(stream)
    running, taken = list[tuple[Budget, list[tuple[int, float] | None]]](), list[tuple[int, float]]()
    while running or waiting:
        if waiting and len(running) < most:
            running.append((budgets.take(), list(waiting.pop())))
            continue
        budget, cycles = running[draws.randrange(len(running))]
        others = [replace(each) for each, _ in running if each is not budget]
        if cycles:
            done = spent(budget, cycles.pop())
            budget.update(*done)
            taken.append(done)
        else:
            running = [each for each in running if each[0] is not budget]
            budgets.give_back(budget)
        assert [each for each, _ in running if each is not budget] == others
    assert_bounded(taken, most * MOST, PER_TOKEN)


@settings(max_examples=12)
@given(st.integers(0, 1000), st.sampled_from([{}, HALF]))
def test_where_planning_brings_nothing_a_fast_device_plans_less_often(
    seed: int, frontiers: Mapping[str, Frontier]
) -> None:
    """Steps of 10 ms, of which planning every one takes 2.8%: a share of less than 1% remains."""
    plain = TEN_MS.step_seconds(100)
    assert 0.009 < plain < 0.011
    trace = story("random", seed, length=900)
    done = run(trace, lambda _: False, frontiers, table=TEN_MS, plan_seconds=PLANNING)
    planning = sum(cycle.plan_seconds for cycle in done.cycles) / plain
    assert planning <= 0.012 * done.tokens < 0.02 * done.tokens <= PLANNING / plain * done.tokens
    each = [(1, 1.0 + loss) for loss in done.losses()]
    assert_bounded(each, MOST + MOST_PLANNING + 0.4, PER_TOKEN + PLANNING_PER_TOKEN)


@settings(max_examples=40)
@given(
    st.sampled_from(KINDS),
    st.integers(0, 1000),
    st.lists(st.booleans(), min_size=1, max_size=40),
    st.sampled_from([{}, HALF]),
    st.sampled_from([None, *EXITS]),
)
def test_over_any_64_tokens_the_loss_is_bounded_however_drafts_fare(
    kind: str, seed: int, pattern: list[bool], frontiers: Mapping[str, Frontier], exits: ExitChoice | None
) -> None:
    done = run(story(kind, seed), lambda place: pattern[place % len(pattern)], frontiers, exits=exits)
    assert worst(done) <= BOUND


@settings(max_examples=20)
@given(st.integers(0, 1000), st.floats(0.5, MOST), st.sampled_from([HALF, {}]), st.sampled_from([None, *EXITS]))
def test_nor_against_one_who_sees_the_credit(
    seed: int, bar: float, frontiers: Mapping[str, Frontier], exits: ExitChoice | None
) -> None:
    """Drafts stand until much may be lost, then all fail."""
    stream, trace = Stream(), story("mixed", seed)
    planner = controller(TABLE, stream, trace, frontiers, {DOMAIN: exits} if exits else {})
    done = replay(planner, stream, trace, TABLE, lambda _, place: (planner.budget.credit < bar, 1.0))
    assert worst(done) <= BOUND


@pytest.mark.parametrize("exits", [None, *EXITS])
@pytest.mark.parametrize(
    ("machine", "bound"), [(latency_table(LAYERS, per_token=6e-5), 10.0), (replace(TABLE, head=4 * TABLE.head), 7.0)]
)
def test_on_a_machine_that_the_table_is_wrong_of_little_more_is_lost(
    machine: LatencyTable, bound: float, exits: ExitChoice | None
) -> None:
    """Verifying eight tokens takes 2.5 plain steps where the table has 1.3; a draft step 0.8 where it has 0.65."""
    for right, kind in itertools.product((lambda _: False, lambda place: place % 3 == 0), KINDS):
        stream, trace = Stream(), story(kind, 0, 600)
        planner = controller(TABLE, stream, trace, HALF, {DOMAIN: exits} if exits else {})
        done = replay(planner, stream, trace, machine, lambda _, place, right=right: (right(place), 1.0))
        assert worst(done) <= bound
        assert sum(done.losses()) <= 0.03 * done.tokens


@pytest.mark.parametrize("exits", [None, *EXITS])
def test_wrong_drafts_cost_less_than_three_percent(exits: ExitChoice | None) -> None:
    """Every draft of any kind fails; the stream is long."""
    stream, stories = Stream(), [story("random", part, 500) for part in range(3)]
    runs = [run(each, lambda place: False, HALF, stream, exits) for each in stories]
    spent, tokens = sum(sum(done.costs) for done in runs), sum(done.tokens for done in runs)
    assert tokens / spent > 0.97
    assert tokens / spent < 1.0


def test_good_masks_are_used_and_repetition_is_copied() -> None:
    masked = run(story("random", 1), lambda place: place % 20 != 0)
    assert masked.tokens / sum(masked.costs) > 1.2
    assert sum(cycle.plan.mask is not None for cycle in masked.cycles) > 0.8 * len(masked.cycles)
    copied = run(story("repeating", 1), lambda place: False, {})
    assert copied.tokens / sum(copied.costs) > 3.0
    assert {cycle.plan.reason for cycle in copied.cycles[4:]} == {"lookup"}


@pytest.mark.parametrize(("speedup", "chosen"), [(2.2, "lookup"), (2.4, "draft")])
def test_drafts_must_promise_more_than_guesses(speedup: float, chosen: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Guesses that double the speed give way to drafts of 15% more, and not to drafts of 10% more."""
    guess = Guess((Node(token=1, parent=0, probability=1.0, depth=1),), tokens=2.0, cost=1.0)
    monkeypatch.setattr("ssd_runtime.planning.auto.controller.best_guess", lambda *_, **__: guess)
    source = MaskedDrafts(HALF[DOMAIN], TABLE, DraftStats(), Lookup(LookupStats()))
    proposal = DraftProposal(source, speedup, Plan("draft"), speedup)
    monkeypatch.setattr(MaskedDrafts, "propose", lambda *_: proposal)
    stream, trace = Stream(), story("random", 1)
    planner = controller(TABLE, stream, trace, HALF)
    for _ in range(SETTLING):
        stream.verify.update(rows=1, seconds=0.01, expected=1.0)
    assert planner.plan(len(trace.prompt), trace.answer[0]).reason == chosen


def test_exits_that_hold_are_used_and_those_that_fail_left() -> None:
    """One layer of eight and a look at the head: 0.4 of a plain step for each token here."""
    exits = ExitChoice(stops=[1], width=4, threshold=0.5, annealing=0.0, predicted_speedup=1.7)
    done = run(story("random", 1), lambda place: place % 20 != 0, {}, exits=exits)
    assert sum(cycle.begun for cycle in done.cycles) > 0.8 * len(done.cycles)
    assert done.tokens / sum(done.costs) > 1.3
    failing = run(story("random", 1), lambda place: False, {}, exits=exits)
    assert 0 < sum(cycle.begun for cycle in failing.cycles) < 0.1 * len(failing.cycles)


@pytest.mark.parametrize("holds", ["half", None])
def test_of_masks_and_exits_those_are_used_that_hold(holds: str | None) -> None:
    """A source that fails promises more at first, and must not get the whole budget."""
    stream, trace = Stream(), story("random", 7, 1500)
    exits = EXITS[1].model_copy(update={"stops": [1], "predicted_speedup": 1.5 if holds else 1.15})
    planner = controller(TABLE, stream, trace, HALF, {DOMAIN: exits})
    done = replay(planner, stream, trace, TABLE, lambda entry, place: (place % 25 != 0 and entry == holds, 1.0))
    drafted = [cycle.plan.entry for cycle in done.cycles if cycle.steps]
    assert drafted.count(holds) > 0.9 * len(drafted)
    assert done.tokens / sum(done.costs) > 1.1


def test_a_budget_is_given_back_once() -> None:
    stream = Stream()
    planner = controller(TABLE, stream, story("random", 1))
    for _ in range(2):
        planner.finish()
    assert stream.budgets.waiting == 1
    assert not stream.steps.members


@pytest.mark.parametrize("waited", [False, True])
def test_a_verification_that_waited_for_others_drafts_is_not_timed(
    waited: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    timed = list[int]()
    monkeypatch.setattr(VerifyStats, "update", lambda self, rows, seconds, expected: timed.append(rows))
    monkeypatch.setattr(SharedSteps, "drafted_after", lambda self, step: waited)
    run(story("random", 1, 5), lambda place: False)
    assert bool(timed) != waited


def test_rows_have_the_same_price_whatever_the_contexts_of_those_that_share_a_step() -> None:
    """The oldest of four requests has 200 tokens and the others 8,000, and steps take what the table says of these."""
    table, trace = with_curve(latency_table(LAYERS), sequence=0.0), Trace([1, 2, 3], [4], [])
    stream, steps, draws = Stream(), itertools.count(1), random.Random(1)
    contexts = [200, 8000, 8000, 8000]

    def step(planner: Controller, context: int, load: Load, seconds: float) -> None:
        planner.plan(context, 5, load)
        plain = Cycle(Plan("plain"), context, 0, 0, [draws.randint(1, 90)], 1, 0.0, seconds, load=load)
        planner.observe(plain)

    for alone in (True, False) * 6:
        planners = [controller(table, stream, trace) for _ in contexts[: 1 if alone else 4]]
        for _ in range(60):
            rows = draws.choice([1, 1, 4, 6] if alone else [4, 5, 6, 8])
            beyond = sum(table.step_seconds(each) - table.step_seconds(200) for each in contexts[: len(planners)])
            mean = sum(contexts[: len(planners)]) // len(planners)
            load = Load(len(planners), rows, mean, next(steps))
            for planner, context in zip(planners, contexts, strict=False):
                step(planner, context, load, table.step_seconds(200, rows) + beyond)
        for planner in planners:
            planner.finish()
    costs = CostModel(table, stream.verify).rows(200)
    assert costs == pytest.approx(CostModel(table).rows(200), rel=0.15)


def test_a_correction_that_nothing_confirms_is_forgotten() -> None:
    """Rows that have once been slow are not tried, and would seem so for good."""
    stats, table = VerifyStats(), [1.0] * 8
    for rows, seconds, count in ((1, 1.0, 9), (4, 2.0, 60), (1, 1.0, 20)):
        for _ in range(count):
            stats.update(rows, seconds, 1.0)
    slow = stats.priced(table)[3]
    for _ in range(2000):
        stats.update(1, 1.0, 1.0)
    assert stats.priced(table)[3] < 1.05 < 1.3 < slow


@pytest.mark.parametrize("held_up", range(3))
def test_a_long_plan_counts_as_three_usual_ones_and_as_a_usual_one_at_first(held_up: int) -> None:
    """It was another process's doing."""
    planning = PlanningTime()
    charged = [planning.update(100.0 if cycle == held_up else 1.0) for cycle in range(3)]
    assert [*charged, planning.update(100.0), planning.update(0.2)] == pytest.approx([0.0, 0.0, 3.0, 1.2, 1.1])


@pytest.mark.parametrize(
    ("seconds", "held", "first", "last"),
    [
        (0.6, False, 1.0 + 4 * 0.6, 1.0 + 4 * 0.6),
        (1e-9, False, 1.0 + 4 * 0.3, 1.0 + 2 * 0.3),
        (9.0, False, 1.0 + 3 * 4 * 0.3, 1.0 + 4 * 9.0),
        (9.0, True, 1.0 + 4 * 0.3, 1.0 + 4 * 0.3),
    ],
    ids=["twice the table's", "nothing", "thirty times the table's", "with others' steps between"],
)
def test_draft_steps_are_charged_with_what_they_take(seconds: float, held: bool, first: float, last: float) -> None:
    """A single delay is mostly another process's doing and counts as three usual times; one that stays is followed."""
    mask = SubLayerPlan.of(LAYERS).lightened(8)
    table = with_light_costs(TABLE, 0.7)
    source = ChainDrafts.light(mask, 0.9, table, DraftStats(), Lookup(LookupStats()))
    times = {"draft_seconds": 4 * seconds, "verify_seconds": 1.0}
    cycle = Cycle(Plan("draft"), 100, 4, 4, [1] * 5, 5, steps=4, held=held, **times)
    charged = [source.observe(cycle, [1.0] * 8, None) for _ in range(99)]
    assert (charged[0], charged[-1]) == pytest.approx((first, last), rel=1e-3)
    assert source.propose(100, [1.0], 9.0) is None, "the table prices no verification of a draft"


def test_the_whole_head_is_priced_once_for_all_drafts() -> None:
    """n drafts cost n + 1 plain steps without heads, n small heads, and a whole one of n + 1 rows."""
    table = replace(TABLE, draft_head=0.1)
    head: Any = SimpleNamespace(scores_partly=True)
    heads: Any = None
    source = HeadDrafts.of(head, heads, table, DraftStats(), Lookup(LookupStats()))
    proposal = source.propose(100, [1.0] * 9, 99.0)
    assert proposal is not None
    assert proposal.plan is not None
    n = proposal.plan.draft_length
    plain, verify = table.step_seconds(100), table.head_seconds(n + 1)
    draft = (n + 1) * (plain - table.head_seconds(1)) + n * table.draft_head_seconds(1)
    tokens = sum(AGREEMENT**i for i in range(n + 1))
    assert proposal.speedup == pytest.approx(tokens * plain / (draft + verify), rel=1e-3)
    cycle = Cycle(proposal.plan, 100, n, n, [1] * (n + 1), n + 1, draft, verify, steps=n)
    assert source.observe(cycle, [1.0] * 9, None) == pytest.approx((draft + verify) / plain, rel=1e-3)
    limited = source.propose(100, [1.0] * 9, 2.5)
    assert limited is not None
    assert limited.plan is not None
    assert limited.plan.draft_length < n
    head.scores_partly = False
    assert source.propose(100, [1.0] * 9, 99.0) is None


@pytest.mark.parametrize("prompt", [[*range(9)] * 4, [*range(100, 136)]], ids=["repeats itself", "does not"])
def test_whole_steps_end_where_guesses_would_be_verified(prompt: list[int]) -> None:
    head: Any = SimpleNamespace(scores_partly=True)
    heads: Any = None
    lookup = Lookup(LookupStats())
    lookup.start(prompt)
    source = HeadDrafts.of(head, heads, replace(TABLE, draft_head=0.1), DraftStats(), lookup)
    proposal = source.propose(100, [1.0] * 9, 99.0)
    assert proposal is not None
    assert proposal.plan is not None
    drafter = proposal.plan.drafter
    assert isinstance(drafter, EarlyExit)
    assert drafter.goes_on is not None
    assert drafter.goes_on([0, 1]) == (0 not in prompt)


def test_a_table_that_gives_the_head_all_of_a_step_is_no_error() -> None:
    """A stranger's bundle may have one; a draft may also end before its first token."""
    table = replace(TABLE, draft_head=0.1, overhead=np.full(TABLE.queries.shape, -1.0))
    head: Any = SimpleNamespace(scores_partly=True)
    heads: Any = None
    source = HeadDrafts.of(head, heads, table, DraftStats(), Lookup(LookupStats()))
    assert table.head_seconds(1) > table.step_seconds(100)
    cycle = Cycle(Plan("draft"), 100, 0, 0, [1], 1, draft_seconds=0.1, verify_seconds=0.1, begun=True)
    for _ in range(3):
        source.propose(100, [1.0] * 9, 99.0)
        assert 0.0 < source.observe(cycle, [1.0] * 9, None) < 99.0


def test_drafts_that_lost_trust_must_promise_more() -> None:
    stats = DraftStats()
    promised = (MIN_GAIN, 1.0, 1.01 * MIN_GAIN, HYSTERESIS * MIN_GAIN, MIN_GAIN)
    assert [stats.update_trust(speedup) for speedup in promised] == [True, False, False, True, True]


@pytest.mark.parametrize(("tokens", "cut"), [(3, True), (4, False)])
def test_a_draft_that_was_cut_says_nothing_of_its_mask(tokens: int, cut: bool) -> None:
    """The answer ended within its right tokens."""
    source = MaskedDrafts(HALF[DOMAIN], TABLE, DraftStats(), Lookup(LookupStats()))
    proposal = source.propose(100, [1.0] * 32, 9.0)
    assert proposal is not None
    seconds = {"draft_seconds": 0.01, "verify_seconds": 0.01}
    cycle = Cycle(Plan("draft"), 100, 4, accepted=3, tokens=[1] * tokens, verified=5, steps=4, **seconds)
    source.observe(cycle, [1.0] * 32, 0.01)
    assert (source.stats.got == DraftStats().got) == cut


@pytest.mark.parametrize(("accepted", "right", "tested"), [(0, 0, 1), (2, 2, 3), (4, 4, 4), (6, 4, 4)])
def test_of_a_chain_its_own_tokens_count_up_to_the_first_wrong_one(accepted: int, right: int, tested: int) -> None:
    """Guesses after the chain's four are not its doing, and what follows a wrong token was never tested."""
    table = with_light_costs(TABLE, 0.7)
    stats, before = DraftStats(), DraftStats()
    source = ChainDrafts.light(SubLayerPlan.of(LAYERS).lightened(8), 0.9, table, stats, Lookup(LookupStats()))
    times = {"draft_seconds": 1.0, "verify_seconds": 1.0}
    source.observe(Cycle(Plan("draft"), 100, 7, accepted, [1] * (accepted + 1), 8, steps=4, **times), [1.0] * 8, None)
    before.update(right, tested * 0.9, 1.0)
    assert (stats.got, stats.predicted) == pytest.approx((before.got, before.predicted))


@pytest.mark.parametrize("most_cost", [2.0, 2.5, 3.5, 9.0])
def test_a_chain_gains_and_leaves_to_other_rows_what_is_left_of_the_budget(most_cost: float) -> None:
    """Here the first row costs nearly a step and those after it nothing: short chains lose."""
    costs = [1.0, *[1.9] * 12]
    table, stats = with_light_costs(TABLE, 0.7), DraftStats(pace=1.3)
    source = ChainDrafts.light(SubLayerPlan.of(LAYERS).lightened(8), 0.95, table, stats, Lookup(LookupStats()))
    proposal = source.propose(100, costs, most_cost)
    assert proposal is not None
    assert proposal.best >= MIN_GAIN
    if proposal.plan is None:
        assert most_cost <= 2.5
    else:
        drafter = proposal.plan.drafter
        assert isinstance(drafter, Extended)
        assert proposal.speedup >= MIN_GAIN
        chain = drafter.chain * 1.3 * source.step_cost.at(100) + costs[drafter.chain]
        assert chain + drafter.most_cost == pytest.approx(most_cost)
        assert drafter.most_cost >= 0.0


def test_exits_cost_their_layers_and_heads_and_what_is_left_of_the_verification() -> None:
    """Each draft, and the token after them, runs alone to the depth bound; all rows run together through the rest."""
    choice, costs, heads = EXITS[1], [1.0, 1.2, 1.5, 1.9, 2.4], None
    source = ExitDrafts(heads, choice, TABLE, DraftStats())  # type: ignore[arg-type] # nobody drafts
    plain = TABLE.step_seconds(100)

    def first_layers(rows: int) -> float:
        return sum(TABLE.sublayer_seconds(100, rows)[: 2 * choice.stops[-1]]) / plain

    def cost(drafts: int) -> float:
        looks = (len(choice.stops) * TABLE.head_seconds(1) + TABLE.overhead_seconds(1)) / plain
        return (drafts + 1) * (first_layers(1) + looks) + costs[drafts] - first_layers(drafts + 1)

    def observed(drafts: int, tokens: int, accepted: int, pace: float | None) -> float:
        seconds = cost(drafts) * (pace or 0.0)
        cycle = Cycle(Plan("exit", draft_length=drafts), 100, drafts, accepted, [1] * tokens, drafts + 1, 0.0, seconds)
        return source.observe(replace(cycle, steps=drafts, begun=True), costs, None if pace is None else 1.0)

    for drafts in range(5):
        assert observed(drafts, 1, 1, None) == pytest.approx(cost(drafts))
    assert source.stats == DraftStats(), "all of these were cut"
    before = DraftStats()
    for drafts, tokens in ((2, 3), (4, 1), (4, 5), (2, 3), (4, 5)):
        assert observed(drafts, tokens, tokens - 1, 2.0) == pytest.approx(cost(drafts) * before.pace)
        before.update(tokens, (1.0 + 1.5 * drafts / 4) * cost(drafts), 2.0)
    assert source.stats == before
    for drafts in range(1, 5):
        proposal = source.propose(100, costs, cost(drafts) * before.pace + 1e-9)
        assert proposal is not None
        assert proposal.best == pytest.approx(2.5 * before.factor / before.pace)
        assert proposal.plan is None or proposal.plan.draft_length == drafts
        promised = (1.0 + 1.5 * drafts / 4) * before.factor / before.pace
        assert proposal.speedup == pytest.approx(promised if promised >= MIN_GAIN else 0.0)


@pytest.mark.parametrize("factor", [0.6, 0.9, 1.0, 1.1, 9.0])
def test_masked_chains_yield_what_their_agreement_in_this_stream_lets_expect(factor: float) -> None:
    """In this profile a token is right independently of the others, so the yield is the formula's."""
    stats = DraftStats(got=PRIOR_TOKENS * factor)
    source = MaskedDrafts(masks("half", range(2, 10), 0.8), TABLE, stats, Lookup(LookupStats()))
    found = source.yields(100, 2)
    assert found is not None
    for length, steps, tokens in found[1]:
        assert steps == pytest.approx(length, rel=0.01), "the profile's confidence tells nothing, so none ends early"
        assert tokens == pytest.approx(expected_tokens(min(1.0, 0.8 * factor), length), rel=0.1)
        assert tokens <= steps + 1.0


def test_masked_chains_promise_tokens_for_the_time_of_their_steps_and_verification() -> None:
    costs, correction = [1.0 + 0.02 * row for row in range(32)], 0.95
    frontier = replace(HALF[DOMAIN], correction=correction)
    source = MaskedDrafts(frontier, TABLE, DraftStats(pace=0.9), Lookup(LookupStats()))
    proposal = source.propose(100, costs, 99.0)
    assert proposal is not None
    step, [_, chains] = 0.9 * TABLE.draft_cost(frontier.entries[0].mask, 100), source.yields(100, 2) or (None, ())
    promised = [each.tokens / (each.steps * step + costs[round(each.steps)]) for each in chains]
    assert proposal.speedup == proposal.best == pytest.approx(max(promised))


def test_a_part_in_a_shared_step_is_charged_with_all_steps_that_others_wait_for() -> None:
    """Their time belongs to several sequences and says nothing of the pace. A draft alone has its own steps' cost."""
    source = MaskedDrafts(HALF[DOMAIN], TABLE, DraftStats(), Lookup(LookupStats()))
    costs = [1.0 + 0.01 * row for row in range(32)]
    mask = HALF[DOMAIN].entries[0].mask
    share, other = Share(mask, 4, 0.5), Share(SubLayerPlan.of(LAYERS, {3}), 4, 0.5)
    assert source.yields(100, 2) is not None
    assert source.take_part(other, costs, 9.0) is None
    assert source.take_part(share, costs, 4 * 0.5 + costs[4] - 1e-9) is None
    assert source.take_part(share, costs, 4 * 0.5 + costs[4] + 1e-9) is not None
    cycle = Cycle(Plan("draft"), 100, 2, 2, [1] * 3, 3, draft_seconds=9.0, verify_seconds=1.0, steps=2)
    assert source.observe(cycle, costs, None) == pytest.approx(costs[2] + 4 * 0.5)
    assert source.stats.pace == 1.0
    assert source.propose(100, costs, 9.0) is not None
    alone = source.observe(replace(cycle, held=True), costs, None)
    assert alone == pytest.approx(costs[2] + 2 * TABLE.draft_cost(mask, 100))


def test_rows_under_load_have_the_price_of_the_latest_step() -> None:
    stream, trace = Stream(), story("random", 1)
    planner = controller(TABLE, stream, trace)
    for _ in range(SETTLING):
        stream.verify.update(rows=1, seconds=0.01, expected=1.0)
    for load, others in ((Load(2, 2, 100, 1), 1), (Load(4, 12, 2000, 2), 9), (Load(4, 3, 2000, 3), 3)):
        planner.plan(len(trace.prompt), trace.answer[0], load)
        expected = CostModel(TABLE).rows_under_load(load.context, load.sequences, others)
        assert planner._costs == pytest.approx(expected)


def test_a_guess_under_load_is_charged_with_its_rows_and_with_the_wait_of_all_for_its_plan(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """In steps that all four share, with one row of this request."""
    charged = list[tuple[int, float, float]]()
    monkeypatch.setattr(Budget, "update", lambda _, *given: charged.append(given))
    monkeypatch.setattr(PlanningTime, "update", lambda _, seconds: seconds)
    stream, trace, load = Stream(), story("random", 1), Load(4, 12, 2000, 1)
    planner = controller(TABLE, stream, trace)
    for _ in range(SETTLING):
        stream.verify.update(rows=1, seconds=0.01, expected=0.01)
    planner.plan(len(trace.prompt), trace.answer[0], load)
    costs, plan = planner._costs, Plan("lookup")
    planner.observe(Cycle(plan, 2000, 2, 1, [1, 2], 3, 0.0, 0.02, plan_seconds=0.004, load=load))
    seconds = TABLE.step_seconds(2000) * CostModel(TABLE).shared_step(2000, 12 - 2, 4)
    assert charged == [(2, pytest.approx(costs[2]), pytest.approx(4 * 0.004 / seconds))]


@pytest.mark.parametrize(("begun", "times"), [(False, 1), (True, 0)])
def test_a_forward_that_requests_share_is_timed_once_and_one_that_drafts_began_never(
    begun: bool, times: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    stream, trace, timed = Stream(), story("random", 1), list[int]()
    for _ in range(SETTLING):
        stream.verify.update(rows=1, seconds=0.01, expected=0.01)
    monkeypatch.setattr(VerifyStats, "update", lambda self, rows, seconds, expected: timed.append(rows))
    load, planners = Load(3, 7, 2000, 1), [controller(TABLE, stream, trace) for _ in range(3)]
    for planner in planners:
        planner.plan(len(trace.prompt), trace.answer[0], load)
    for planner in planners:
        planner.observe(Cycle(Plan("plain"), 2000, 0, 0, [1], 1, 0.0, 0.02, load=load, begun=begun))
    assert timed == [7] * times


def test_a_loss_counts_at_once_and_is_forgotten_half_as_fast_as_the_budget_grows() -> None:
    stats = DraftStats()
    stats.update_balance(50, 1.0)
    assert (stats.balance, stats.discounted(2.0)) == (MOST, 2.0), "gains are no claim"
    stats.update_balance(1, 9.0)
    assert stats.balance == MOST - 8.0
    assert stats.discounted(2.0) == 2.0 - 0.25 * (8.0 - MOST)
    stats.decay(64)
    assert stats.balance == pytest.approx(MOST - 8.0 + 64 * PER_TOKEN / 2)
    stats.decay(9999)
    assert stats.balance == 0.0


def test_statistics_of_drafts_follow_the_latest_and_drafts_that_rest_get_their_prior_back() -> None:
    stats = DraftStats()
    for _ in range(500):
        stats.update(1, 2.0, 99.0 if stats.pace < 1.8 else 1.8)
    assert stats.factor == pytest.approx(0.5, rel=1e-3)
    assert stats.pace == pytest.approx(1.8, rel=1e-2)
    assert not stats.update_trust(1.0)
    stats.decay(256)
    assert (stats.factor, stats.pace) == (pytest.approx(0.75, rel=1e-2), pytest.approx(1.4, rel=1e-2))
    assert not stats.trusted
    for _ in range(8):
        stats.decay(256)
    assert stats.trusted
    for _ in range(500):
        stats.update(1, 1.0, 0.0)
    assert stats.pace == pytest.approx(0.5)


@pytest.mark.parametrize("planned", [True, False])
def test_guesses_follow_all_tokens_whether_a_cycle_was_planned_or_not(planned: bool) -> None:
    stream, trace = Stream(), story("random", 1)
    planner, context = controller(TABLE, stream, trace), len(trace.prompt)
    planner.budget.planning = float(planned)
    for tokens in ([5, 6], [7]):
        planner.plan(context, trace.answer[0])
        planner.observe(Cycle(Plan("plain"), context, 0, 0, tokens, 1, 0.0, 0.02))
        planner.budget.planning = float(planned)
        context += len(tokens)
        assert planner.planned is planned
        assert planner._lookup.known == context + 1


@given(
    st.floats(0.0, MOST), st.floats(0.0, MOST_PLANNING), st.integers(1, 25), st.floats(1.0, 12.0), st.floats(0.0, 0.5)
)
def test_what_a_cycle_brings_is_counted_once_and_planning_comes_first(
    credit: float, planning: float, tokens: int, cost: float, spent: float
) -> None:
    budget = Budget(credit, planning)
    budget.update(tokens, cost, spent)
    whole = credit + planning + tokens * (1.0 + PER_TOKEN + PLANNING_PER_TOKEN) - cost - spent
    assert budget.credit + budget.planning <= whole + 1e-9
    left = planning + tokens * PLANNING_PER_TOKEN - spent
    if tokens > cost and left < START_PLANNING and budget.credit < MOST:
        assert budget.planning == pytest.approx(min(START_PLANNING, left + tokens - cost))


def test_new_requests_share_what_ended_ones_give_back_and_nothing_twice() -> None:
    budgets = Budgets()
    for given_back in (Budget(4.0, 1.0), Budget(0.5, 0.2), Budget(0.0, 0.0)):
        budgets.give_back(given_back)
    taken = [budgets.take() for _ in range(4)]
    assert [each.credit for each in taken[:3]] == pytest.approx([1.5] * 3), "the mean, which is START"
    assert [each.planning for each in taken[:3]] == pytest.approx([0.4] * 3)
    assert taken[3] == Budget(), "none is waiting"
    budgets.give_back(Budget(0.25, 0.1))
    assert budgets.take() == Budget(pytest.approx(0.25), pytest.approx(0.1))
    budgets.give_back(Budget(4.0, 1.0))
    assert budgets.take().credit == 1.5
