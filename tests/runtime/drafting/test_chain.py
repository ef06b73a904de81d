"""Chains of draft steps: where they end, and the origin of accepted tokens, which follows from their place."""

from __future__ import annotations

import math
from collections.abc import Sequence

import torch

from ssd_profiles.mask import SubLayerPlan
from ssd_runtime.drafting.chain import Chain
from ssd_runtime.drafting.combined import _joined
from ssd_runtime.drafting.lookup import Node
from ssd_runtime.drafting.masked import Masked
from ssd_runtime.drafting.on_device import DeviceChain, Step
from ssd_runtime.drafting.tree import Draft
from ssd_runtime.model.decoder import Decoder
from ssd_runtime.model.runner import ModelRunner, Work
from ssd_runtime.planning.plan import Plan
from ssd_runtime.sequence.session import Session
from tests.decoding import speculate
from tests.models import tiny_model

LAYERS = 4


def test_guesses_after_a_chain_and_siblings_of_its_tokens() -> None:
    chain = Draft.branching([5, 6], [[], []], origin="light")
    guess, sibling = (
        Node(token=7, parent=0, probability=1.0, depth=1),
        Node(token=8, parent=1, probability=1.0, depth=2),
    )
    draft = _joined(chain, [guess], [sibling])
    assert draft.tokens == [5, 6, 7, 8]
    assert draft.origins([0, 1, 2, 3], tokens=4) == ["light", "light", "guess", "plain"]
    assert draft.origins([0, 1, 4], tokens=2) == ["light", "light"], "the answer ends with an accepted sibling"
    assert Draft([7], steps=0).origins([0], tokens=1) == ["plain"]


def test_steps_are_light_only_if_nothing_is_skipped() -> None:
    decoder = Decoder(tiny_model("qwen3", seed=3))
    decoder.lighten("8")
    skipping = SubLayerPlan.of(LAYERS, {5})
    for mask, origin in ((decoder.light.mask, "light"), (skipping, "skipped"), (skipping.lightened(8), "skipped")):
        answer = speculate(decoder, list(range(3, 13)), Plan("test", Masked(mask), 5), 60)
        origins = [each for cycle in answer.cycles for each in cycle.origins]
        assert set(origins) == {origin, "plain"}
        assert len(origins) == len(answer.token_ids) - 1
        assert origins.count(origin) == answer.num_accepted_tokens


class Unscored(Chain):
    """Steps whose head scores no token that a structure allows."""

    threshold, branching, origin = 0.5, (), "skipped"

    def stepping(self, session: Session) -> Step:
        def step(tokens: Sequence[int] | torch.Tensor, ahead: int) -> Work[torch.Tensor]:
            yield from ()
            return torch.full((1, 97), -math.inf)

        return step


def test_a_draft_ends_where_nothing_that_is_allowed_has_a_score() -> None:
    decoder = Decoder(tiny_model("qwen3", seed=3))
    session = Session(decoder)
    session.pending = 5
    runner = ModelRunner(decoder)
    assert runner.finish(Unscored().drafting(session, 8)).steps == 1
    chain = DeviceChain(step=Unscored().stepping(session), confidence=True, candidates=0)
    runner.finish(chain.growing(5, 8, 0.7))
    runner.finish(chain.reading(0.7))
    assert len(chain.steps) == 1
