"""Each paper's strategy: the output of plain decoding, and what its paper says it does."""

from __future__ import annotations

import itertools
import math
from dataclasses import dataclass
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch

from bench.fixtures.planted import plant
from ssd_artifacts.domain_config import ExitChoice
from ssd_artifacts.exits import ExitSet
from ssd_profiles.errors import UserError
from ssd_profiles.mask import SubLayerPlan
from ssd_runtime.drafting.combined import Extended
from ssd_runtime.drafting.early_exit import EarlyExit
from ssd_runtime.drafting.lookup import Lookup, LookupStats
from ssd_runtime.drafting.masked import Branching, Masked
from ssd_runtime.drafting.tree import Draft
from ssd_runtime.engine.loop import generate
from ssd_runtime.engine.output.divergence import Kind, compare
from ssd_runtime.engine.output.generation import Generation
from ssd_runtime.engine.output.output import Limits
from ssd_runtime.model.batch import Batch
from ssd_runtime.model.cache.kv_cache import LOOKBACK
from ssd_runtime.model.decoder import Decoder
from ssd_runtime.model.exit_heads import ExitHeads
from ssd_runtime.model.runner import ModelRunner, Work
from ssd_runtime.planning.auto.auto import AutoPlanner
from ssd_runtime.planning.auto.draft_stats import DraftStats
from ssd_runtime.planning.auto.masked_drafts import MaskedDrafts
from ssd_runtime.planning.cost import Entry
from ssd_runtime.planning.frontier import Frontier
from ssd_runtime.planning.makers import make_strategy
from ssd_runtime.planning.papers.del_exit import DelPlanner
from ssd_runtime.planning.papers.knapsack import FEWEST_ROWS
from ssd_runtime.planning.papers.recent import RecentStates
from ssd_runtime.planning.papers.specbound import BoundedExitPlanner
from ssd_runtime.planning.papers.swift import LOOK_EVERY, TREE, SwiftPlanner, SwiftSearch
from ssd_runtime.planning.plan import ConstantPlanner, PlainPlanner, Plan
from ssd_runtime.planning.registry import WITHOUT_BUNDLE, read_settings
from ssd_runtime.planning.settings import DelSettings, SwiftSettings
from ssd_runtime.planning.strategy import MakePlanner
from ssd_runtime.sampling.params import GREEDY, SamplingParams
from ssd_runtime.search.gaussian import most_promising
from ssd_runtime.search.knapsack import Candidate, Weights, search_knapsack, searching_knapsack
from ssd_runtime.search.replay import ReferenceStates
from ssd_runtime.sequence.session import Session
from tests.models import tiny_model
from tests.streams import stream_by_the_table
from tests.tables import latency_table, profile

MODEL, WEAK = plant(tiny_model("qwen3", seed=4, max_position_embeddings=512), 0.02, 4)
DECODER = Decoder(MODEL)
HEADS = ExitHeads(DECODER)
FAST: dict[str, list[str]] = {
    "auto": [],
    "knapsack": ["refresh=6", "window=3"],
    "clasp": ["refresh=4"],
    "swift": ["window=8", "steps=60", "bayes_interval=5"],
    "exit": ["threshold=0.1", "depth=0.8"],
    "del": ["every=1", "refresh=3", "confidence=0.1"],
    "lookup": [],
}


def strategy(name: str, *assignments: str, decoder: Decoder = DECODER) -> MakePlanner:
    table = latency_table(decoder.shape.num_layers, per_token=1e-6)
    return make_strategy(name, read_settings(name, list(assignments)), decoder, None, table)


def planned(planner: Any) -> list[Plan]:
    """Every plan that the planner makes from now on."""
    plans, plan = list[Plan](), planner.plan

    def noting(context: int) -> Plan:
        plans.append(plan(context))
        return plans[-1]

    planner.plan = noting
    return plans


def plainly(ids: list[int], new: int) -> list[int]:
    return generate(Session(DECODER), ids, PlainPlanner(), Limits(new)).token_ids


@pytest.mark.parametrize("sampling", [GREEDY, SamplingParams(0.9, top_p=0.95, repetition_penalty=1.1, seed=3)])
@pytest.mark.parametrize("name", sorted(FAST))
def test_a_stream_of_prompts_gives_plain_decoding(name: str, sampling: SamplingParams) -> None:
    make = strategy(name, *FAST[name])
    drafted = 0
    for ids in ([7, 7, 9], [1, 2, 3, 4], [5]):
        got = generate(Session(DECODER, sampling), ids, make(), Limits(90))
        plain = generate(Session(DECODER, sampling), ids, PlainPlanner(), Limits(90))
        assert got.token_ids == plain.token_ids
        drafted += got.num_draft_tokens
    assert drafted > 5


@pytest.mark.parametrize("sampling", [GREEDY, SamplingParams(0.7, seed=1)])
def test_auto_with_masks_and_guesses_behind_them_gives_plain_decoding(sampling: SamplingParams) -> None:
    table = latency_table(DECODER.shape.num_layers, per_token=1e-6)
    masks = {"mix": Frontier((Entry("weak", WEAK, profile(0.95)),))}
    stream, reasons = stream_by_the_table(), set[str]()
    for ids in ([7, 7, 9], [1, 2, 3, 4], [5, 6] * 9):
        got = generate(Session(DECODER, sampling), ids, AutoPlanner(masks, {}, HEADS, None, table, stream), Limits(90))
        assert got.token_ids == generate(Session(DECODER, sampling), ids, PlainPlanner(), Limits(90)).token_ids
        reasons |= {cycle.plan.reason.partition(" ")[0] for cycle in got.cycles}
    assert {"draft", "lookup"} <= reasons


@pytest.mark.parametrize("sampling", [GREEDY, SamplingParams(0.7, seed=1)])
def test_auto_with_early_exits_gives_plain_decoding(sampling: SamplingParams) -> None:
    table = latency_table(DECODER.shape.num_layers, per_token=1e-6)
    for stop in (1, DECODER.shape.num_layers - 1):
        choice = ExitChoice(stops=[stop], width=4, threshold=0.0, annealing=0.0, predicted_speedup=1.5)
        stream, begun = stream_by_the_table(), 0
        for ids in ([7, 7, 9], [1, 2, 3, 4], [5, 6] * 9):
            planner = AutoPlanner({}, {"mix": choice}, HEADS, None, table, stream)
            got = generate(Session(DECODER, sampling), ids, planner, Limits(90))
            assert got.token_ids == generate(Session(DECODER, sampling), ids, PlainPlanner(), Limits(90)).token_ids
            begun += sum(cycle.begun for cycle in got.cycles)
        assert begun


def test_guesses_go_on_where_a_masked_chain_ends() -> None:
    ids = [1, 2, 3, 4]
    plain, lookup = plainly(ids, 60), Lookup(LookupStats())
    lookup.start([*ids, *plain])
    plan = Plan("test", Extended(Masked(WEAK), 2, lookup, 1.0, 1.0, (1.0,) * 32, 9.0), 12)
    got = generate(Session(DECODER), ids, ConstantPlanner(plan), Limits(60))
    assert got.token_ids == plain
    assert all(cycle.steps <= 2 for cycle in got.cycles)
    assert max(cycle.accepted for cycle in got.cycles) > 2


@pytest.mark.parametrize("sampling", [GREEDY, SamplingParams(1.0, 0, 1.0, 0.0, 1.0, 5)])
def test_second_candidates_stand_where_the_chain_is_wrong(sampling: SamplingParams) -> None:
    """A mask that is often wrong, rows that cost nothing: cycles yield more, and the same tokens."""
    ids, poor = [1, 2, 3, 4], SubLayerPlan.of(WEAK.num_layers, range(2, 12))
    plain = generate(Session(DECODER, sampling), ids, PlainPlanner(), Limits(60)).token_ids

    def cycles(branching: Branching, row: float, most_cost: float = 9.0) -> Generation:
        costs = tuple(1.0 + row * n for n in range(32))
        drafter = Extended(Masked(poor, 0.0, branching), 4, Lookup(LookupStats()), 0.8, 1.0, costs, most_cost)
        got = generate(Session(DECODER, sampling), ids, ConstantPlanner(Plan("test", drafter, 12)), Limits(60))
        assert got.token_ids == plain
        return got

    chain, tree = cycles((), 0.0), cycles(((1.0, 2),), 0.0)
    assert len(tree.cycles) < len(chain.cycles)
    stood = [cycle for cycle in tree.cycles if len(cycle.tokens) > cycle.accepted + 1]
    assert stood
    assert all(cycle.accepted < cycle.steps for cycle in stood), "beside the chain, not behind it"
    assert max(cycle.verified for cycle in tree.cycles) == 1 + 2 * 4
    for dear in (cycles(((1.0, 2),), 0.5), cycles(((1.0, 2),), 0.01, most_cost=0.0)):
        assert [cycle.tokens for cycle in dear.cycles] == [cycle.tokens for cycle in chain.cycles]
    # The likeliest come first: where little may be spent, one row, in place of the first token.
    assert max(cycle.verified for cycle in cycles(((1.0, 2),), 0.01, most_cost=0.015).cycles) == 1 + 4 + 1


@dataclass(frozen=True)
class Chain(Masked):
    """Two tokens whose first is in doubt, whatever the mask."""

    def drafting(self, session: Session, length: int) -> Work[Draft]:
        yield from ()
        return Draft([2, 3, 9], [0, 1, 0], steps=2)


@pytest.mark.parametrize("agreement", [0.99, 0.85])
def test_of_guesses_and_second_candidates_the_likelier_is_verified(agreement: float) -> None:
    """One row may be added: what follows a chain that is right surely, or stands beside one that is not."""
    lookup, costs = Lookup(LookupStats()), (1.0, 1.0, 1.0, 1.1, *(9.0,) * 28)
    lookup.start([1, 2, 3, 4] * 5)
    drafter = Extended(Chain(WEAK), 2, lookup, agreement, 1.0, costs, 0.2)
    got = ModelRunner(DECODER).finish(drafter.drafting(Session(DECODER), 14))
    added = (4, 2) if agreement > 0.9 else (9, 0)
    assert got.parents is not None
    assert list(zip(got.tokens, got.parents, strict=True)) == [(2, 0), (3, 1), added]


def test_auto_verifies_second_candidates_of_unsure_drafts() -> None:
    """Plans for a device on which rows cost nothing, whatever they cost on this machine."""
    masks = Frontier((Entry("poor", SubLayerPlan.of(WEAK.num_layers, range(2, 12)), profile(0.9)),))
    source = MaskedDrafts(masks, latency_table(WEAK.num_layers), DraftStats(), Lookup(LookupStats()))
    proposal = source.propose(100, [1.0] * 32, 9.0)
    assert proposal is not None
    assert proposal.plan is not None
    got = generate(Session(DECODER), [7, 7, 9], ConstantPlanner(proposal.plan), Limits(90))
    assert got.token_ids == plainly([7, 7, 9], 90)
    assert any(len(cycle.tokens) > cycle.accepted + 1 for cycle in got.cycles)


@pytest.mark.parametrize("variant", ["mistral-sliding", "phi3-longrope", "gemma2", "gemma3", "smollm3"])
@pytest.mark.parametrize("name", sorted(FAST))
def test_families_with_windows_and_switches(name: str, variant: str) -> None:
    model = tiny_model(variant, seed=1)
    decoder, ids = Decoder(model), list(range(2, 14))
    got = generate(Session(decoder), ids, strategy(name, *FAST[name], decoder=decoder)(), Limits(60))
    out = model.generate(torch.tensor([ids]), max_new_tokens=60, do_sample=False)[0, len(ids) :].tolist()
    # transformers 5.0.0's own generate leaves its model behind longrope's switch: the first difference is judged.
    assert compare(Session(decoder), ids, out, got.token_ids).kind is not Kind.ERROR
    assert got.token_ids == generate(Session(decoder), ids, PlainPlanner(), Limits(60)).token_ids


@pytest.mark.parametrize("layers", [1, 2, 3])
@pytest.mark.parametrize("name", sorted(FAST))
def test_models_of_few_layers(name: str, layers: int) -> None:
    decoder = Decoder(tiny_model("llama", seed=3, num_hidden_layers=layers))
    plain = generate(Session(decoder), [3, 5], PlainPlanner(), Limits(30)).token_ids
    make = strategy(name, *FAST[name], decoder=decoder)
    assert generate(Session(decoder), [3, 5], make(), Limits(30)).token_ids == plain


@pytest.mark.parametrize(
    ("name", "extreme"),
    [
        *(("clasp", extreme) for extreme in ("skip=0", "skip=1", "refresh=1", "confidence=0")),
        *(("knapsack", extreme) for extreme in ("budget=0", "budget=1", "refresh=1", "similarity=1", "share=0")),
        *(("swift", extreme) for extreme in ("skip=0", "skip=1", "steps=0", "window=1", "enough=0", "max_draft=60")),
        *(("exit", extreme) for extreme in ("depth=0", "depth=1", "width=0", "threshold=0", "annealing=9")),
        *(("del", extreme) for extreme in ("every=50", "memory=0", "refresh=1")),
    ],
)
def test_extreme_parameters(name: str, extreme: str) -> None:
    make = strategy(name, *FAST[name], extreme)
    for ids in ([7, 7, 9], [1, 2]):
        assert generate(Session(DECODER), ids, make(), Limits(40)).token_ids == plainly(ids, 40)


@pytest.mark.parametrize(("name", "window", "tokens"), [("knapsack", 5, 5 * 65), ("swift", 128, 128 + 65)])
def test_a_search_keeps_the_keys_of_the_longest_drafts(name: str, window: int, tokens: int) -> None:
    """Else a sliding layer has dropped keys of the tokens that the search looks at."""
    session = Session(DECODER)
    strategy(name, f"window={window}", "max_draft=64")().start(session, session.prefill([7, 7, 9]))
    assert session.cache.lookback >= tokens > LOOKBACK


def test_settings_are_checked() -> None:
    assert set(FAST) < set(WITHOUT_BUNDLE)
    for bad in ("nonsense=1", "window=x", "window", "window=-3", "window=0", "window=nan"):
        with pytest.raises(UserError, match="--set"):
            read_settings("swift", [bad])
    assert read_settings("knn", ["out_of_domain=mix"]).out_of_domain == "mix"
    with pytest.raises(UserError, match="nearest, mix, plain"):
        read_settings("knn", ["out_of_domain=away"])


def test_a_former_name_of_a_parameter_is_accepted_with_a_note(capsys: pytest.CaptureFixture[str]) -> None:
    assert read_settings("knn", ["strangers=mix"]) == read_settings("knn", ["out_of_domain=mix"])
    told = capsys.readouterr()
    assert told.out == ""
    assert told.err == "note: --set strangers: the parameter is called out_of_domain now\n"


def test_a_knapsack_search_looks_at_as_many_tokens_as_its_share_allows(monkeypatch: pytest.MonkeyPatch) -> None:
    looked: list[int] = []

    def counting(decoder: Decoder, reference: ReferenceStates, *rest: Any, **named: Any) -> Work[list[Candidate]]:
        looked.append(len(reference))
        return searching_knapsack(decoder, reference, *rest, **named)

    monkeypatch.setattr("ssd_runtime.planning.papers.knapsack.searching_knapsack", counting)
    for share in ("1e-9", "1"):
        make = strategy("knapsack", "window=6", "refresh=1000", f"share={share}")
        assert generate(Session(DECODER), [4, 4], make(), Limits(40)).token_ids == plainly([4, 4], 40)
    assert looked == [FEWEST_ROWS, 6]


# SpecBound and DEL


def fitted(*layers: int) -> ExitHeads:
    """Heads with maps behind some layers, which change nothing."""
    hidden = DECODER.shape.hidden
    maps = ExitSet(
        layers, np.stack([np.eye(hidden, dtype=np.float32)] * len(layers)), np.zeros((len(layers), hidden), np.float32)
    )
    return ExitHeads(DECODER, maps)


def exit_plan(heads: ExitHeads, tuned: ExitChoice | None, *assignments: str) -> tuple[Plan, EarlyExit]:
    settings = read_settings("exit", list(assignments))
    planner = BoundedExitPlanner(heads, 8, settings, {"": tuned} if tuned is not None else {}, None)
    planner.start(None, None)  # type: ignore[arg-type]
    plan = planner.plan(10)
    assert isinstance(plan.drafter, EarlyExit)
    return plan, plan.drafter


def test_the_depth_bound_is_the_nearest_exit_that_was_fitted() -> None:
    bounds = {"depth=0.85": (1, 3, 5, 7), "depth=0.625": (1, 3, 5), "depth=0.4": (1, 3), "depth=0": (1,)}
    for depth, stops in bounds.items():
        assert exit_plan(fitted(1, 3, 5, 7), None, depth)[1].stops == stops
    assert exit_plan(fitted(5, 7), None, "depth=0.5")[1].stops == (5,)
    assert exit_plan(HEADS, None)[1].stops[-1] == 2, "10 of 32 layers, of these eight"


def test_what_the_bundle_has_tuned_and_what_a_user_sets_reach_the_drafter() -> None:
    tuned = ExitChoice(stops=[3, 5], width=4, threshold=0.4, annealing=0.3, predicted_speedup=1.0)
    plan, drafter = exit_plan(fitted(3, 5), tuned)
    assert (drafter.stops, plan.draft_length, drafter.threshold, drafter.annealing) == ((3, 5), 4, 0.4, 0.3)
    plan, drafter = exit_plan(fitted(3, 5), tuned, "depth=0.4", "width=2", "threshold=0.9", "annealing=0")
    assert (drafter.stops, plan.draft_length, drafter.threshold, drafter.annealing) == ((3,), 2, 0.9, 0.0)
    plan, drafter = exit_plan(HEADS, None)
    assert (plan.draft_length, drafter.threshold, drafter.annealing) == (8, 0.55, 0.2)


def test_del_has_exits_in_a_model_of_few_layers() -> None:
    decoder = Decoder(tiny_model("llama"))
    assert decoder.shape.num_layers == 4
    planner = DelPlanner(ExitHeads(decoder, None), 4, DelSettings(confidence=0.0))
    got = generate(Session(decoder), [1, 2, 3], planner, Limits(40))
    assert {cycle.plan.reason.split()[3] for cycle in got.cycles if cycle.begun} == {"2"}


def test_del_compares_exits_of_one_kind() -> None:
    for heads, layers in ((HEADS, {2, 4, 6}), (fitted(3, 5), {3, 5})):
        planner = DelPlanner(heads, 8, DelSettings(every=2, confidence=0.0))
        got = generate(Session(DECODER), [1, 2, 3], planner, Limits(60))
        assert got.token_ids == plainly([1, 2, 3], 60)
        stops = {cycle.plan.reason.split()[3] for cycle in got.cycles if cycle.begun}
        assert stops <= set(map(str, layers))
        assert stops


# CLaSp


def recent_reference(tokens: int) -> ReferenceStates:
    """States of the last of some tokens that the model has just generated."""
    session, ids, recent = Session(DECODER), [3, 1, 4, 1, 5], RecentStates(1)
    session.prefill(ids)
    recent.add(session.forward_states(plainly(ids, tokens)))
    session.commit(plainly(ids, tokens))
    return ModelRunner(DECODER).finish(recent.referencing(session, 1))


@torch.inference_mode()
def cosine_of(reference: ReferenceStates, layers: set[int]) -> float:
    """The last token's, its own keys without the skipped layers, all earlier ones the full model's."""
    group = reference.groups[0]
    x, session = reference.states[0], Session(DECODER)
    session.cache = group.cache
    mask = SubLayerPlan.of(8, {index for layer in layers for index in (2 * layer, 2 * layer + 1)})
    batch = Batch.of([DECODER.batches.consecutive(group.cache, group.start, 1)])
    kept = [slots.clone() for slots in group.cache.pool.storage]
    x = DECODER.run(x, batch, mask)
    group.cache.pool.storage[:] = kept
    return float(torch.cosine_similarity(DECODER.norm(x), DECODER.norm(reference.states[-1]), -1)[0])


@pytest.mark.parametrize("count", [2, 4])
def test_clasps_programme_comes_close_to_brute_force(count: int) -> None:
    reference = recent_reference(40)
    found = search_knapsack(DECODER, reference, Weights((1,) * 8), threshold=-1.0, exactly=count)
    assert len(found) == 1
    chosen = {index // 2 for index in found[0].mask}
    assert len(chosen) == count
    assert found[0].mask == SubLayerPlan.of(8, {i for layer in chosen for i in (2 * layer, 2 * layer + 1)})
    assert cosine_of(reference, chosen) == pytest.approx(found[0].cosine, abs=1e-4)
    every = [cosine_of(reference, set(some)) for some in itertools.combinations(range(8), count)]
    assert found[0].cosine >= np.quantile(every, 0.9)
    assert found[0].cosine >= max(every) - 0.02


def test_clasp_refreshes_by_verifications() -> None:
    planner = strategy("clasp", "refresh=3")()
    plans = planned(planner)
    got = generate(Session(DECODER), [9, 8, 7], planner, Limits(100))
    runs = [len(list(group)) for _, group in itertools.groupby(map(id, plans))]
    assert got.cycles[0].plan.mask is None
    assert runs[1:-1] == [3] * (len(runs) - 2)
    assert all(len(list(cycle.plan.mask)) == 8 for cycle in got.cycles[1:] if cycle.plan.mask)


# SWIFT


def test_swift_finds_weak_layers_and_keeps_them_for_the_stream() -> None:
    steps = "window=16", "steps=200", "enough=1", "idle=200", "bayes_interval=10"
    make = strategy("swift", *steps, "skip=0.3", "protect=0")  # the uniform mask then begins with a layer that matters
    search = make()._search  # type: ignore[attr-defined]
    before = search.best
    runs = [generate(Session(DECODER), [seed, 5, seed], make(), Limits(150)) for seed in range(1, 9)]
    assert search.tried > 30, "the search goes on from prompt to prompt"
    assert len(set(search.best) & set(WEAK)) > len(set(before) & set(WEAK))
    assert runs[-1].num_accepted_tokens / runs[-1].num_draft_tokens > 0.5


def test_swift_never_tries_a_protected_layer() -> None:
    search = SwiftSearch(8, SwiftSettings(steps=100, bayes_interval=5))
    for number in range(40):
        mask = search.suggest()
        assert not {0, 1, 14, 15} & set(mask)
        search.update(mask, number / 100)
    assert search.tried == 40


def test_swift_ends_its_search_and_begins_again_when_the_stream_changes() -> None:
    search = SwiftSearch(8, SwiftSettings(steps=100, enough=0.9))
    search.update(search.suggest(), 0.95)
    assert not search.running
    chosen = search.best
    search.update_best(0.9)
    assert not search.running
    search.update_best(0.5)
    assert search.running
    assert (search.best, search.score) == (chosen, 0.5)
    # An easy prompt's score does not stand in the way of what is better on this one.
    search.update(search.suggest(), 0.6)
    assert search.score == 0.6


@pytest.mark.parametrize("share", [0.3, 0.5, 0.8, 0.95])
def test_swift_does_not_search_again_because_of_chance(share: float) -> None:
    """Matchness on 32 tokens of the same text differs from window to window; of other text, by more."""

    def searches_again(then: float) -> bool:
        search = SwiftSearch(8, SwiftSettings(steps=1))
        search.update(search.suggest(), random.binomial(32, share) / 32)
        search.update_best(random.binomial(32, then) / 32)
        return search.running

    random = np.random.default_rng(0)
    assert np.mean([searches_again(share) for _ in range(400)]) <= 0.06
    assert np.mean([searches_again(share / 10) for _ in range(400)]) >= 0.6


def test_swift_looks_at_a_found_mask_once_in_so_many_tokens(monkeypatch: pytest.MonkeyPatch) -> None:
    looks, matching = [], SwiftPlanner._matching

    def counted(planner: SwiftPlanner, window: ReferenceStates, mask: SubLayerPlan) -> Work[float]:
        looks.append(mask)
        return matching(planner, window, mask)

    monkeypatch.setattr(SwiftPlanner, "_matching", counted)
    make = strategy("swift", "window=16", "enough=0", "least_skip=0.5")  # any candidate ends the search
    answers = [generate(Session(DECODER), [seed, 5, seed], make(), Limits(60)).token_ids for seed in range(1, 13)]
    tokens = sum(map(len, answers))
    assert tokens > 2 * LOOK_EVERY
    assert tokens // (LOOK_EVERY + 60) <= len(looks) - 2 <= tokens // LOOK_EVERY


def test_swift_keeps_what_it_has_learned_when_a_request_ends() -> None:
    """Masks that skip few of some sub-layers are better; every request is harder or easier than the one before."""
    found = []
    for seed in range(6):
        settings = SwiftSettings(steps=200, idle=200, enough=1.0, bayes_interval=5, skip=0.4, seed=seed)
        search, random = SwiftSearch(30, settings), np.random.default_rng(seed)
        while search.running:
            if search.tried % 10 == 0:
                ease = random.random()
                search.update_best(ease - _wrong(search.best))
            mask = search.suggest()
            search.update(mask, ease - _wrong(mask))
        found.append(_wrong(search.best))
    assert np.mean(found) <= 0.12


def _wrong(mask: SubLayerPlan) -> float:
    """Share of the skipped sub-layers that are even."""
    return sum(index % 2 == 0 for index in mask) / len(list(mask))


@pytest.mark.parametrize("share", [0.5, 1.0])
def test_swift_searches_precisions_too(share: float) -> None:
    """Every candidate runs the share lighter of what it keeps; it learns which sub-layers bear that."""
    settings = SwiftSettings(steps=200, idle=200, enough=1.0, bayes_interval=5, skip=0.4, light=share)
    search = SwiftSearch(30, settings, SubLayerPlan.of(30).lightened(8))
    seen = set[tuple[int, ...]]()
    masks = list[SubLayerPlan]()
    while search.running:
        mask = search.suggest()
        masks.append(mask)
        kept = len(mask) - len(list(mask))
        assert sum(bits == 8 for bits in mask.light[:-1]) == round(share * kept)
        assert mask.head_bits == 8
        seen.add(mask.light)
        search.update(mask, 1.0 - _lighter_of_the_first_half(mask))
    assert len(seen) > 100
    if share < 1:
        assert _lighter_of_the_first_half(search.best) < 0.45
        assert _lighter_of_the_first_half(search.best) == min(_lighter_of_the_first_half(mask) for mask in masks)


def _lighter_of_the_first_half(mask: SubLayerPlan) -> float:
    """Share of the light sub-layers that are in the first half of the layers."""
    lit = [index for index in range(len(mask)) if mask.bits_of(index)]
    return sum(index < len(mask) // 2 for index in lit) / len(lit)


@pytest.mark.parametrize("share", ["0.5", "1"])
def test_swift_with_lighter_sublayers_changes_nothing(share: str) -> None:
    decoder = Decoder(MODEL)
    with pytest.raises(UserError, match="--set light="):
        strategy("swift", f"light={share}", decoder=decoder)
    decoder.lighten("8")
    make = strategy("swift", "window=8", "steps=20", f"light={share}", decoder=decoder)
    for ids in ([1, 2, 3], [9, 5, 9, 5]):
        got = generate(Session(decoder), ids, make(), Limits(60))
        assert got.token_ids == generate(Session(decoder), ids, PlainPlanner(), Limits(60)).token_ids
        assert any(cycle.plan.mask is not None and cycle.plan.mask.light for cycle in got.cycles)


def test_swift_ends_by_steps_and_by_idleness() -> None:
    for settings, most in ((SwiftSettings(steps=7), 7), (SwiftSettings(idle=5), 5)):
        search = SwiftSearch(8, settings)
        tried = 0
        while search.running:
            search.update(search.suggest(), 0.0)
            tried += 1
        assert tried == most


def test_swift_skips_less_while_acceptance_stays_low() -> None:
    search = SwiftSearch(20, SwiftSettings())
    sizes = [len(list(search.best))]
    for _ in range(5):
        search.update_acceptance(64, 20, 40)
        assert len(list(search.best)) == sizes[-1], "a mask that nobody chose says nothing"
        for _ in range(SwiftSettings().bayes_interval):
            search.update(search.suggest(), 0.1)
        search.update_acceptance(64, 20, 40)
        sizes.append(len(list(search.best)))
    assert sizes[:3] == [20, 18, 16]
    assert sizes[3:] == [16] * 3, "it does not step below the least share"
    kept = search.skip
    search.update_acceptance(64, 60, 80)
    assert search.skip == kept


def test_without_steps_swift_keeps_the_uniform_mask() -> None:
    """Every other layer, the first and the last kept."""
    make = strategy("swift", "steps=0")
    got = generate(Session(DECODER), [5, 6], make(), Limits(60))
    [mask] = {cycle.plan.mask for cycle in got.cycles}
    assert mask is not None
    assert mask.attention_skipped == mask.mlp_skipped == 4
    assert not {0, 1, 14, 15} & set(mask)


def test_the_gaussian_process_prefers_what_is_like_good_masks() -> None:
    random = np.random.default_rng(0)
    good = random.random(40) < 0.5
    tried = np.asarray([good ^ (random.random(40) < share) for share in np.linspace(0.15, 0.5, 30)])
    scores = [1 - float((mask != good).mean()) for mask in tried]
    near, far = tried[int(np.argmax(scores))].copy(), ~good
    near[np.flatnonzero(near != good)[0]] ^= True
    assert most_promising(tried, scores, np.asarray([far, near])) == 1


@pytest.mark.parametrize(("probability", "count"), [(0.1, 10), (0.49, 10), (0.51, 5), (0.79, 5), (0.81, 3), (0.96, 1)])
def test_swift_verifies_more_candidates_the_less_sure_it_is(probability: float, count: int) -> None:
    """SWIFT §4.2: 10, 5, 3 and 1 for probabilities up to 0.5, 0.8, 0.95 and 1."""
    assert Masked(WEAK, 0.0, TREE)._count(-math.log(probability)) == count


def test_swift_without_steps_keeps_its_mask_however_little_is_accepted() -> None:
    search = SwiftSearch(20, SwiftSettings(steps=0))
    before = search.best
    for _ in range(5):
        search.update_acceptance(64, 0, 20)
    assert search.best == before


@pytest.mark.parametrize("protect", [0, 1, 3])
def test_swift_protects_as_many_layers_as_it_is_told(protect: int) -> None:
    search, ends = SwiftSearch(8, SwiftSettings(protect=protect, skip=0.9)), 2 * protect
    tried = {index for _ in range(40) for index in search.suggest()}
    assert tried == set(range(ends, 16 - ends))


# DEL


@pytest.mark.parametrize("right", [{2}, {4}, {6}, {4, 6}, {2, 4, 6}])
def test_del_drafts_from_the_first_exit_that_is_always_right(right: set[int]) -> None:
    """Tokens a layer are most where each token costs fewest layers, and where drafts are longest (KnapSpec eq. 2)."""
    planner = DelPlanner(HEADS, 8, DelSettings(every=2, max_draft=6))
    last, other = torch.randn(8, DECODER.shape.hidden), torch.randn(8, DECODER.shape.hidden)
    states = [last if place // 2 in right else other for place in range(16)] + [last]
    planner.observe(SimpleNamespace(tokens=list(range(8))), states)  # type: ignore[arg-type]
    ModelRunner(DECODER).finish(planner.searching(10))
    plan = planner.plan(10)
    assert isinstance(plan.drafter, EarlyExit)
    assert (plan.drafter.stops, plan.draft_length) == ((min(right),), 6)


def test_del_drafts_from_one_exit_for_a_cycle() -> None:
    planner = strategy("del", "every=1", "refresh=4")()
    plans = planned(planner)
    generate(Session(DECODER), [2, 7, 1], planner, Limits(80))
    exits = [plan.drafter for plan in plans if isinstance(plan.drafter, EarlyExit)]
    assert exits
    assert all(len(drafter.stops) == 1 and drafter.threshold == 0.7 for drafter in exits)


def speeds(got: Generation) -> float:
    return len(got.token_ids) / got.target_forwards


def test_swifts_tree_accepts_more_than_its_chain() -> None:
    arguments = ["steps=0", "skip=0.5", "confidence=0"]
    tree, chain = (
        generate(Session(DECODER), [1, 2, 3], strategy("swift", *arguments, f"tree={tree}")(), Limits(60))
        for tree in (1, 0)
    )
    assert tree.token_ids == chain.token_ids
    assert speeds(tree) > speeds(chain)
    assert max(cycle.verified - cycle.drafted for cycle in tree.cycles) > 1
