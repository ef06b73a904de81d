from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace

import pytest

from bench.fixtures.planted import plant
from ssd_compiler.calibrate import SharedPrefix
from ssd_compiler.load_validation import validate_under_load
from ssd_compiler.validate import Contenders, Held, validate
from ssd_profiles.errors import UserError
from ssd_profiles.mask import SubLayerPlan
from ssd_runtime.drafting.tree import Draft
from ssd_runtime.engine.job import Job
from ssd_runtime.engine.output.generation import Generation
from ssd_runtime.engine.output.output import Limits
from ssd_runtime.engine.scheduler import Scheduler
from ssd_runtime.engine.verification import Accepted
from ssd_runtime.model.decoder import Decoder
from ssd_runtime.planning.cost import CostModel, Entry, Option
from ssd_runtime.planning.plan import PLAIN, Cycle
from ssd_runtime.sequence.prefill import Prefill
from ssd_runtime.sequence.session import Session
from tests.models import tiny_model
from tests.tables import latency_table, profile

MODEL, WEAK = plant(tiny_model("llama", seed=6, max_position_embeddings=256), 0.02, 4)
DECODER = Decoder(MODEL)
Timed = dict[str, list[Generation]]
PROMPTS = [[1, 2, 3 + i] for i in range(4)]


def option(mask: SubLayerPlan, agreement: float) -> Option:
    found = CostModel(latency_table(8)).best_option([Entry("", mask, profile(agreement))], 50)
    assert found is not None
    return found


def test_figures_are_those_of_prompts_that_have_not_chosen() -> None:
    finalists = [(5, option(WEAK, 0.95)), (2, option(SubLayerPlan.of(8, {3}), 0.9))]
    ticks: list[int] = []
    found = validate(DECODER, PROMPTS, finalists, Limits(20), lambda: ticks.append(1))
    assert found.choice.entry in (5, 2)
    assert found.validation.prompts == 3
    assert found.validation.new_tokens == 60
    assert found.validation.identical
    assert found.validation.speedup_interval[0] <= found.validation.speedup <= found.validation.speedup_interval[1]
    assert len(ticks) == 4


def test_prompts_are_prefilled_once_however_often_they_are_timed(monkeypatch: pytest.MonkeyPatch) -> None:
    prefilled, prefill = list[list[int]](), SharedPrefix.prefill

    def watched(self: SharedPrefix, ids: list[int]) -> tuple[Session, Prefill]:
        prefilled.append(ids)
        return prefill(self, ids)

    monkeypatch.setattr(SharedPrefix, "prefill", watched)
    for name, bound in (("NARROW", 0.0), ("SETTLED", 2.0)):
        monkeypatch.setattr(f"ssd_compiler.validate.{name}", bound)
    found = validate(DECODER, PROMPTS, [(5, option(WEAK, 0.95))], Limits(20), lambda: None)
    assert found.validation.identical
    assert prefilled == PROMPTS


def test_an_output_cut_short_by_a_near_tie_counts_by_its_own_tokens(monkeypatch: pytest.MonkeyPatch) -> None:
    def timed(prompts: Held, contenders: Contenders, *_: object) -> Timed:
        """A step takes a second, whoever makes it."""
        lengths = {"masked": 11}
        return {
            name: [
                Generation(3, None, [1] * lengths.get(name, 41), decode_seconds=lengths.get(name, 41) - 1.0)
                for _ in prompts
            ]
            for name in contenders
        }

    monkeypatch.setattr("ssd_compiler.validate._timed", timed)
    weak = [(0, option(WEAK, 0.95))]
    found = validate(DECODER, PROMPTS, weak, Limits(41), lambda: None).validation
    assert found.speedup == 1.0
    assert found.speedup_interval == (1.0, 1.0)


def test_the_fastest_finalist_is_measured_on_the_prompts_that_did_not_choose(monkeypatch: pytest.MonkeyPatch) -> None:
    """The first one was predicted to be faster. Of six drafted tokens a cycle, three are right."""
    timed, seconds = list[tuple[int, list[str]]](), {"plain": 1.0, "5": 0.9, "2": 0.8, "masked": 0.8}
    cycle = Cycle(PLAIN, 9, 6, 3, [1] * 4, 7, 0.0, 0.0)

    def as_told(prompts: Held, contenders: Contenders, *_: object) -> Timed:
        timed.append((len(prompts), list(contenders)))
        return {
            name: [Generation(3, None, [1] * 41, [cycle] * 10, decode_seconds=40 * seconds[name]) for _ in prompts]
            for name in contenders
        }

    monkeypatch.setattr("ssd_compiler.validate._timed", as_told)
    finalists = [(5, option(WEAK, 0.95)), (2, option(SubLayerPlan.of(8, {3}), 0.9))]
    found = validate(DECODER, PROMPTS, finalists, Limits(41), lambda: None)
    assert timed == [(1, ["5", "2"]), (3, ["plain", "masked"])]
    assert (found.choice.entry, found.option) == (2, finalists[1][1])
    assert found.validation.speedup == 1.25
    assert (found.validation.mean_acceptance_length, found.validation.draft_acceptance_rate) == (4.0, 0.5)


@pytest.mark.parametrize(("rounds", "speedup"), [([2.0, 1.0, 3.0], 2.0), ([2.0, 1.99, 0.5], 1.0)])
def test_where_times_spread_the_quickest_of_each_prompt_counts(
    rounds: list[float], speedup: float, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Until a further round is hardly quicker."""
    taken = iter(rounds)

    def as_told(prompts: Held, contenders: Contenders, *_: object) -> Timed:
        pace = {"plain": 2.0, "masked": next(taken)}
        return {
            name: [
                Generation(3, None, [1] * 41, decode_seconds=pace[name] * (1 + place)) for place in range(len(prompts))
            ]
            for name in contenders
        }

    monkeypatch.setattr("ssd_compiler.validate._timed", as_told)
    monkeypatch.setattr("ssd_compiler.validate.NARROW", -1.0)
    found = validate(DECODER, PROMPTS, [(0, option(WEAK, 0.95))], Limits(41), lambda: None)
    assert found.validation.speedup == pytest.approx(speedup, abs=0.01)


def accept_everything(draft: Draft, choose: Callable[[int], int], goes_on: Callable[[int], bool]) -> Accepted:
    rows = list(range(len(draft.tokens) + 1))
    tokens = [*draft.tokens, choose(rows[-1])]
    kept = next((place for place, token in enumerate(tokens) if not goes_on(token)), len(draft.tokens))
    return Accepted(rows, tokens[: kept + 1], len(draft.tokens))


def test_a_wrong_output_is_a_defect(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(
        "ssd_runtime.engine.loop.accept",
        accept_everything,
    )
    bad = option(SubLayerPlan.of(8, range(16)), 0.9)
    with pytest.raises(UserError, match="no rounding in"):
        validate(DECODER, PROMPTS, [(0, bad)], Limits(20), lambda: None)


def test_under_load_both_ways_decode_as_many_prompts_at_once(monkeypatch: pytest.MonkeyPatch) -> None:
    at_once, ticks, step = list[tuple[int, bool]](), list[int](), Scheduler.step

    def watched(self: Scheduler) -> list[Job[Generation]]:
        done = step(self)
        at_once.append((self.running, any(job.work.gi_frame.f_locals["planner"].plan(9).mask for job in self._running)))
        return done

    monkeypatch.setattr(Scheduler, "step", watched)
    weak = [(0, option(WEAK, 0.95))]
    alone = validate(DECODER, PROMPTS, weak, Limits(20), lambda: None)
    assert all(running <= 1 for running, _ in at_once)
    found = validate_under_load(DECODER, PROMPTS, alone, [2, 6], Limits(20), lambda: ticks.append(1))
    assert replace(found, validation=found.validation.model_copy(update={"under_load": ()})) == alone
    assert [each.concurrency for each in found.validation.under_load] == [2, 6]
    for each in found.validation.under_load:
        assert each.identical
        assert each.speedup_interval[0] <= each.speedup <= each.speedup_interval[1]
        assert {(each.concurrency, masked) for masked in (False, True)} <= set(at_once)
    assert len(ticks) == 2
    assert validate_under_load(DECODER, PROMPTS, alone, [], Limits(20), lambda: None) == alone


def test_a_wrong_output_under_load_is_a_defect(monkeypatch: pytest.MonkeyPatch) -> None:
    bad = [(0, option(SubLayerPlan.of(8, range(16)), 0.9))]
    alone = validate(DECODER, PROMPTS, bad, Limits(20), lambda: None)
    monkeypatch.setattr(
        "ssd_runtime.engine.loop.accept",
        accept_everything,
    )
    with pytest.raises(UserError, match="no rounding in"):
        validate_under_load(DECODER, PROMPTS, alone, [3], Limits(20), lambda: None)
