"""What calibration keeps of the model's own continuations."""

from __future__ import annotations

from ssd_compiler.calibrate import continue_prompts, samples_of
from ssd_runtime.decoder import Decoder
from ssd_runtime.followers import RANKS
from tests.models import tiny_model


def test_the_best_follower_of_a_greedy_continuation_is_what_follows() -> None:
    decoder = Decoder(tiny_model("llama", seed=3))
    for sample in samples_of(continue_prompts(decoder, [[1, 2, 3], [9, 4]], 21, frozenset(), lambda: None), "test"):
        whole = [sample.prompt[-1], *sample.continuation]
        followed = {(a, b): c for a, b, c in zip(whole, whole[1:], whole[2:], strict=False)}
        assert {(before, token): best for before, token, best, *_ in sample.followers} == followed
        assert all(len(set(row[2:])) == RANKS for row in sample.followers)
