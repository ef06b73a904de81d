"""Decoding by a tiny model, compared with plain decoding and with transformers."""

from __future__ import annotations

import torch

from ssd_profiles.mask import FULL, SubLayerPlan
from ssd_runtime.engine.loop import generate
from ssd_runtime.engine.output.divergence import Kind, compare
from ssd_runtime.engine.output.generation import Generation
from ssd_runtime.engine.output.output import Limits
from ssd_runtime.model.decoder import Decoder
from ssd_runtime.model.runner import Head, ModelRunner
from ssd_runtime.planning.makers import make_strategy
from ssd_runtime.planning.plan import ConstantPlanner, PlainPlanner, Plan, Planner
from ssd_runtime.planning.registry import read_settings
from ssd_runtime.planning.strategy import MakePlanner, StrategyInputs
from ssd_runtime.sampling.params import GREEDY, SamplingParams
from ssd_runtime.sequence.session import Session
from tests.tables import latency_table


def plainly(decoder: Decoder, ids: list[int], new: int, params: SamplingParams = GREEDY) -> list[int]:
    """The tokens of plain decoding."""
    return generate(Session(decoder, params), ids, PlainPlanner(), Limits(new)).token_ids


def speculate(
    decoder: Decoder, ids: list[int], by: Planner | Plan, new: int, params: SamplingParams = GREEDY
) -> Generation:
    """The output of a planner, or of the same plan in every cycle."""
    planner = ConstantPlanner(by) if isinstance(by, Plan) else by
    return generate(Session(decoder, params), ids, planner, Limits(new))


def as_plain(
    decoder: Decoder, ids: list[int], by: Planner | Plan, new: int, params: SamplingParams = GREEDY
) -> Generation:
    """The output of a planner or of a plan, which must have the tokens of plain decoding."""
    got = speculate(decoder, ids, by, new, params)
    assert got.token_ids == plainly(decoder, ids, new, params)
    return got


def assert_same(decoder: Decoder, ids: list[int], expected: list[int], got: list[int]) -> None:
    """Require equal tokens, up to a tie of logits."""
    difference = compare(Session(decoder), ids, expected, got)
    assert difference.kind is not Kind.ERROR, (difference, expected, got)


def strategy_of(name: str, decoder: Decoder, *assignments: str) -> MakePlanner:
    """A strategy without a bundle, with made-up latencies."""
    table = latency_table(decoder.shape.num_layers, per_token=1e-6)
    return make_strategy(
        StrategyInputs(
            name=name, settings=read_settings(name, list(assignments)), decoder=decoder, bundle=None, latency=table
        )
    )


def logits_of(decoder: Decoder, ids: list[int], mask: SubLayerPlan | None = None) -> torch.Tensor:
    """The logits of one forward, of a draft by a mask or of the whole model."""
    runner = ModelRunner(decoder)
    [x] = runner.answer([Session(decoder).request(ids, mask=mask)])
    [logits] = runner.answer([Head(x, bits=mask.head_bits if mask else FULL)])
    return logits


@torch.no_grad()
def assert_as_transformers(decoder: Decoder, ids: list[int]) -> torch.Tensor:
    """Require the logits of one forward to be those of transformers with the decoder's model; returns them."""
    got = logits_of(decoder, ids)
    torch.testing.assert_close(got, decoder.model(torch.tensor([ids])).logits[0], atol=5e-5, rtol=5e-5)
    return got
