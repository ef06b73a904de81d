"""A search's price counts the forwards that the search itself requests."""

from __future__ import annotations

from typing import Any

import pytest

from bench.harness.pricing.latencies import QUIET, read_latency
from bench.harness.pricing.priced import price, sublayer_prices
from bench.papers.tools.search_prices import clasp_price, search_price
from ssd_compiler.calibrate import continue_prompts, reference_states, samples_of
from ssd_runtime.model.decoder import Decoder
from ssd_runtime.model.runner import Forward, ModelRunner
from ssd_runtime.planning.papers.knapsack import FEWEST_ROWS
from ssd_runtime.planning.settings import KnapsackSettings
from ssd_runtime.search.knapsack import Weights, searching_knapsack
from ssd_runtime.search.replay import ReferenceStates
from tests.models import tiny_model
from tests.tables import latency_table

LAYERS = 6
DECODER = Decoder(tiny_model("llama", num_hidden_layers=LAYERS, max_position_embeddings=256))
TABLE = latency_table(LAYERS, per_context=0.0, per_token=1e-6)
"""Attention costs as much at any context, so that the tokens' own positions do not matter."""


def requested(reference: ReferenceStates, one_by_one: bool = False, **options: Any) -> float:
    """The price of what a search requests, in seconds; `one_by_one` for every state in a forward of its own."""
    runner = ModelRunner(DECODER)
    work = searching_knapsack(DECODER, reference, **options)
    total = 0.0
    answer = None
    while True:
        try:
            request = work.send(answer)
        except StopIteration:
            return total
        if isinstance(request, Forward):
            sizes = [1] * request.size if one_by_one else [request.size]
            total += sum(sum(sublayer_prices(TABLE, 0, n)[request.first : request.last]) for n in sizes)
        else:
            total += price(TABLE, request)
        [answer] = runner.answer([request])


@pytest.fixture(scope="module")
def reference() -> ReferenceStates:
    found = continue_prompts(DECODER, [[1, 2, 3]], 12, frozenset(), lambda: None)
    return reference_states(DECODER, samples_of(found, "test"))


@pytest.mark.parametrize("most", [0, 4])
def test_the_price_is_that_of_the_searchs_own_requests(reference: ReferenceStates, most: int) -> None:
    weights = Weights((1, 2) * LAYERS)
    some = reference.every(4)
    total = requested(some, weights=weights, threshold=-1.0, most=most)
    expected = search_price(TABLE, weights, 0, len(some), most) * TABLE.step_seconds(0)
    assert total == pytest.approx(expected, rel=1e-6 if not most else 0.2)


@pytest.mark.parametrize("parallel", [True, False])
@pytest.mark.parametrize("skipped", [1, 3, 5])
def test_clasps_price_is_that_of_its_searchs_own_requests(
    reference: ReferenceStates, skipped: int, parallel: bool
) -> None:
    weights = Weights((1,) * LAYERS)
    one = reference.every(len(reference))
    total = requested(one, not parallel, weights=weights, threshold=-1.0, exactly=skipped)
    assert total == pytest.approx(clasp_price(TABLE, skipped, 0, parallel) * TABLE.step_seconds(0))


@pytest.mark.parametrize("context", [128, 512, 2048, 4096, 7500])
def test_knapsacks_own_search_stays_within_its_share_of_the_time(context: int) -> None:
    """On the fewest tokens, of sixty layers; a cycle that drafts takes two plain steps at least."""
    latency = read_latency(QUIET, 60)
    settings = KnapsackSettings()

    def price_with(states: int) -> float:
        return search_price(latency, Weights.of(latency, context), context, FEWEST_ROWS, states)

    allowed = settings.share * settings.refresh * 2.0
    assert price_with(settings.states) <= allowed
    assert price_with(0) > allowed, "all budgets, as in the paper, do not fit"
