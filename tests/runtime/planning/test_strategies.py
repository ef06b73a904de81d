"""Each paper's strategy: the output of plain decoding, and what its paper says it does."""

from __future__ import annotations

import itertools
import math

import numpy as np
import pytest
import torch

from bench.fixtures.planted import plant
from ssd_artifacts.domain_config import MAX_DRAFT, ExitChoice
from ssd_profiles.errors import UserError
from ssd_profiles.mask import SubLayerPlan
from ssd_runtime.drafting.masked import Masked
from ssd_runtime.model.batch.batch import Batch
from ssd_runtime.model.cache.kv_cache import LOOKBACK
from ssd_runtime.model.decoder import Decoder
from ssd_runtime.model.exit_heads import ExitHeads
from ssd_runtime.model.runner import ModelRunner
from ssd_runtime.planning.auto.auto import AutoPlanner
from ssd_runtime.planning.cost import Entry
from ssd_runtime.planning.frontier import Frontier
from ssd_runtime.planning.papers.knapsack import KnapsackPlanner
from ssd_runtime.planning.papers.recent import RecentStates
from ssd_runtime.planning.papers.swift import TREE, SwiftSearch
from ssd_runtime.planning.plan import PlainPlanner
from ssd_runtime.planning.settings import KnapsackSettings, SwiftSettings
from ssd_runtime.sampling.params import GREEDY, SamplingParams
from ssd_runtime.search.gaussian import most_promising
from ssd_runtime.search.knapsack import searching_knapsack
from ssd_runtime.search.replay import ReferenceStates
from ssd_runtime.search.weights import Weights
from ssd_runtime.sequence.session import Session
from tests.decoding import as_plain, plainly, speculate, strategy_of
from tests.models import tiny_model
from tests.streams import stream_by_the_table
from tests.tables import latency_table, profile

MODEL, WEAK = plant(tiny_model("qwen3", seed=4, max_position_embeddings=512), 0.02, 4)
DECODER = Decoder(MODEL)
HEADS = ExitHeads(DECODER)
FAST: dict[str, list[str]] = {
    "auto": [],
    "knapsack": ["refresh=6", "window=3", "share=1"],
    "clasp": ["refresh=4"],
    "swift": ["window=8", "steps=60", "bayes_interval=5"],
    "exit": ["threshold=0.1", "depth=0.8"],
    "del": ["every=1", "refresh=3", "confidence=0.1"],
    "lookup": [],
}


@pytest.mark.parametrize("sampling", [GREEDY, SamplingParams(0.9, top_p=0.95, repetition_penalty=1.1, seed=3)])
@pytest.mark.parametrize("name", sorted(FAST))
def test_a_stream_of_prompts_gives_plain_decoding(
    name: str, sampling: SamplingParams, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("ssd_runtime.planning.auto.auto.Stream", stream_by_the_table)
    make = strategy_of(name, DECODER, *FAST[name])
    answers = [as_plain(DECODER, ids, make(), 50, sampling) for ids in ([7, 7, 9], [1, 2, 3, 4])]
    assert sum(answer.num_draft_tokens for answer in answers) > 5


@pytest.mark.parametrize("sampling", [GREEDY, SamplingParams(0.7, seed=1)])
def test_auto_with_masks_and_guesses_behind_them_gives_plain_decoding(sampling: SamplingParams) -> None:
    table = latency_table(DECODER.shape.num_layers, per_token=1e-6)
    masks = {"mix": Frontier((Entry("weak", WEAK, profile(0.95)),))}
    stream, reasons = stream_by_the_table(), set[str]()
    for ids in ([7, 7, 9], [1, 2, 3, 4], [5, 6] * 9):
        got = as_plain(DECODER, ids, AutoPlanner(masks, {}, HEADS, None, table, stream), 90, sampling)
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
            begun += sum(cycle.begun for cycle in as_plain(DECODER, ids, planner, 90, sampling).cycles)
        assert begun


@pytest.mark.parametrize("layers", [1, 3])
@pytest.mark.parametrize("name", sorted(FAST))
def test_models_of_few_layers(name: str, layers: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """A single layer cannot be skipped, but exits before it, and guesses, draft all the same."""
    monkeypatch.setattr("ssd_runtime.planning.auto.auto.Stream", stream_by_the_table)
    decoder = Decoder(tiny_model("llama", seed=3, num_hidden_layers=layers))
    got = as_plain(decoder, [3, 5], strategy_of(name, decoder, *FAST[name])(), 30)
    assert bool(got.num_draft_tokens) == (layers > 1 or name in ("auto", "exit", "lookup"))


DRAFTLESS = {
    *("clasp skip=0", "knapsack budget=0", "knapsack similarity=1", "swift skip=0", "exit width=0", "exit annealing=9")
}
"""Parameters that leave no mask to skip layers with, or no token sure enough."""


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
    got = as_plain(DECODER, [7, 7, 9], strategy_of(name, DECODER, *FAST[name], extreme)(), 40)
    assert bool(got.num_draft_tokens) == (f"{name} {extreme}" not in DRAFTLESS)


@pytest.mark.parametrize(("name", "window", "tokens"), [("knapsack", 5, 5 * 65), ("swift", 128, 128 + 65)])
def test_a_search_keeps_the_keys_of_the_longest_drafts(name: str, window: int, tokens: int) -> None:
    """Else a sliding layer has dropped keys of the tokens that the search looks at."""
    session = Session(DECODER)
    planner = strategy_of(name, DECODER, f"window={window}", "max_draft=64")()
    planner.start(session, session.prefill([7, 7, 9]))
    assert session.cache.lookback >= tokens > LOOKBACK


def test_a_search_after_a_bundles_masks_keeps_the_keys_of_their_longest_drafts() -> None:
    session = Session(DECODER)
    planner = KnapsackPlanner(latency_table(8), KnapsackSettings(window=5, max_draft=1), PlainPlanner())
    planner.start(session, session.prefill([7, 7, 9]))
    assert session.cache.lookback >= 5 * (MAX_DRAFT + 1)


def recent_reference(tokens: int) -> ReferenceStates:
    """States of the last of some tokens that the model has just generated."""
    session, ids, recent = Session(DECODER), [3, 1, 4, 1, 5], RecentStates(1)
    session.prefill(ids)
    answer = plainly(DECODER, ids, tokens)
    recent.add(session.forward_states(answer))
    session.commit(answer)
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
    return float(torch.cosine_similarity(DECODER.head.norm(x), DECODER.head.norm(reference.states[-1]), -1)[0])


@pytest.mark.parametrize("count", [2, 4])
def test_clasps_programme_comes_close_to_brute_force(count: int) -> None:
    reference = recent_reference(40)
    work = searching_knapsack(DECODER, reference, Weights((1,) * 8), threshold=-1.0, exactly=count)
    found = ModelRunner(DECODER).finish(work)
    assert len(found) == 1
    chosen = {index // 2 for index in found[0].mask}
    assert len(chosen) == count
    assert found[0].mask == SubLayerPlan.of(8, {i for layer in chosen for i in (2 * layer, 2 * layer + 1)})
    assert cosine_of(reference, chosen) == pytest.approx(found[0].cosine, abs=1e-4)
    every = [cosine_of(reference, set(some)) for some in itertools.combinations(range(8), count)]
    assert found[0].cosine >= np.quantile(every, 0.9)
    assert found[0].cosine >= max(every) - 0.02


def test_swift_finds_weak_layers_and_keeps_them_for_the_stream() -> None:
    settings = "window=16", "steps=200", "enough=1", "idle=200", "bayes_interval=10", "skip=0.3", "protect=0"
    make = strategy_of("swift", DECODER, *settings)  # the uniform mask then begins with a layer that matters
    search = make()._search  # type: ignore[attr-defined]
    before = search.best
    runs = [speculate(DECODER, [seed, 5, seed], make(), 150) for seed in range(1, 9)]
    assert search.tried > 30, "the search goes on from prompt to prompt"
    assert len(set(search.best) & set(WEAK)) > len(set(before) & set(WEAK))
    assert runs[-1].num_accepted_tokens / runs[-1].num_draft_tokens > 0.5


@pytest.mark.parametrize(("protect", "skip"), [(0, 0.5), (1, 0.3), (2, 0.5), (3, 0.9)])
def test_swifts_candidates_skip_their_share_and_no_protected_layer(protect: int, skip: float) -> None:
    search = SwiftSearch(8, SwiftSettings(protect=protect, skip=skip, bayes_interval=4))
    free = range(2 * protect, 16 - 2 * protect)
    for number in range(24):
        mask = search.suggest()
        assert set(mask) <= set(free)
        assert len(list(mask)) == min(round(16 * skip), len(free))
        search.update(mask, number % 7 / 10)


def test_swift_skips_less_step_by_step_while_acceptance_is_low() -> None:
    """Over 64 draft steps at a time, and only once enough candidates were tried."""
    search, shares = SwiftSearch(8, SwiftSettings(bayes_interval=2, skip=0.5, least_skip=0.42)), list[float]()
    for _ in range(3):
        search.update_acceptance(99, 0, 99)
        for _ in range(2):
            search.update(search.suggest(), 0.5)
        search.update_acceptance(40, 20, 40)
        search.update_acceptance(24, 24, 24)
        shares.append(search.skip)
    assert shares == pytest.approx([0.45, 0.42, 0.42])
    assert search.searches == 3
    other = SwiftSearch(8, SwiftSettings(bayes_interval=1))
    other.update(other.suggest(), 0.5)
    for accepted in (45, 45, 44):
        assert other.skip == 0.5
        other.update_acceptance(64, accepted, 64)
    assert other.skip == pytest.approx(0.45)


def test_swift_ends_its_search_after_so_many_candidates_in_a_row_that_are_no_better() -> None:
    search = SwiftSearch(8, SwiftSettings(idle=3))
    for score in (0.1, 0.1, 0.1, 0.2, 0.3, 0.3, 0.2):
        search.update(search.suggest(), score)
        assert search.running
    search.update_best(0.5)
    assert [score for _, score in search._seen[1:]] == pytest.approx([0.3, 0.3, 0.3, 0.4, 0.5, 0.5, 0.4])
    search.update(search.suggest(), 0.5)
    assert not search.running


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


@pytest.mark.parametrize("share", ["0.5", "1"])
def test_swift_with_lighter_sublayers_changes_nothing(share: str) -> None:
    decoder = Decoder(MODEL)
    with pytest.raises(UserError, match="--set light="):
        strategy_of("swift", decoder, f"light={share}")
    decoder.lighten("8")
    make = strategy_of("swift", decoder, "window=8", "steps=20", f"light={share}")
    for ids in ([1, 2, 3], [9, 5, 9, 5]):
        got = as_plain(decoder, ids, make(), 60)
        assert any(cycle.plan.mask is not None and cycle.plan.mask.light for cycle in got.cycles)


def test_without_steps_swift_keeps_the_uniform_mask() -> None:
    """Every other layer, the first and the last kept."""
    got = speculate(DECODER, [5, 6], strategy_of("swift", DECODER, "steps=0")(), 60)
    [mask] = {cycle.plan.mask for cycle in got.cycles}
    assert mask.mixers_skipped == mask.mlps_skipped == 4
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
