"""A search's price counts the forwards that the search itself requests."""

from __future__ import annotations

import pytest

from bench.harness.priced import price
from bench.papers.search_prices import search_price
from ssd_compiler.calibrate import continue_prompts, reference_states, samples_of
from ssd_runtime.model.decoder import Decoder
from ssd_runtime.model.runner import Forward, ModelRunner
from ssd_runtime.search.knapsack import Weights, searching_knapsack
from tests.models import tiny_model
from tests.tables import latency_table


@pytest.mark.parametrize("most", [0, 4])
def test_the_price_is_that_of_the_searchs_own_requests(most: int) -> None:
    decoder = Decoder(tiny_model("llama", num_hidden_layers=6, max_position_embeddings=256))
    layers = decoder.shape.num_layers
    found = continue_prompts(decoder, [[1, 2, 3]], 12, frozenset(), lambda: None)
    reference = reference_states(decoder, samples_of(found, "test")).every(4)
    # Attention costs as much at any context, so that the tokens' own positions do not matter.
    table = latency_table(layers, per_context=0.0, per_token=1e-6)
    weights = Weights((1, 2) * layers)
    runner = ModelRunner(decoder)
    work = searching_knapsack(decoder, reference, weights, threshold=-1.0, most=most)
    total = 0.0
    answer = None
    while True:
        try:
            request = work.send(answer)
        except StopIteration:
            break
        overhead = table.overhead_seconds(1) if isinstance(request, Forward) and request.first == 0 else 0.0
        total += price(table, request) - overhead
        [answer] = runner.answer([request])
    expected = search_price(table, weights, 0, len(reference), most) * table.step_seconds(0)
    assert total == pytest.approx(expected, rel=1e-6 if not most else 0.2)
