from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from ssd_profiles.acceptance import DRAFT_LENGTHS, THRESHOLDS, AcceptanceProfile, Trace, replay
from ssd_profiles.formulas import expected_tokens

traces = st.lists(st.tuples(st.booleans(), st.floats(0.0, 1.0)), min_size=1, max_size=80).map(
    lambda rows: Trace(np.array([match for match, _ in rows]), np.array([p for _, p in rows]))
)


@given(traces, st.sampled_from(DRAFT_LENGTHS), st.sampled_from(THRESHOLDS))
def test_replay_yields_every_token_once(trace: Trace, length: int, threshold: float) -> None:
    found = replay(trace, length, threshold)
    assert len(trace.matches) <= found.tokens <= len(trace.matches) + 1
    assert found.cycles <= found.steps <= found.cycles * length
    assert found.tokens - found.cycles <= found.steps


def test_replay_by_hand() -> None:
    trace = Trace(np.array([1, 1, 0, 1, 1, 1, 1, 0], bool), np.array([0.9, 0.9, 0.4, 0.9, 0.4, 0.9, 0.9, 0.9]))
    # 4 drafts: 2 right, correction; then 4 right and the bonus token falls on the last, wrong, position.
    found = replay(trace, 4, 0.0)
    assert (found.cycles, found.steps, found.tokens) == (2, 8, 8)
    # With a threshold the first draft ends behind the unsure wrong token, the second behind the unsure right one.
    found = replay(trace, 4, 0.5)
    assert (found.cycles, found.steps, found.tokens) == (3, 3 + 2 + 2, 8)


def test_the_profile_of_independent_matches_is_the_formula() -> None:
    random = np.random.default_rng(0)
    matches = random.random(40_000) < 0.8
    profile = AcceptanceProfile.of_traces([Trace(matches, np.ones(matches.size))])
    assert profile.token_agreement == pytest.approx(0.8, abs=0.01)
    for row, length in enumerate(DRAFT_LENGTHS):
        assert profile.tokens[row, 0] == pytest.approx(expected_tokens(0.8, length), rel=0.03)
        assert profile.steps[row, 0] == pytest.approx(length, rel=0.01)


def test_a_profile_needs_positions() -> None:
    with pytest.raises(ValueError, match="position"):
        AcceptanceProfile.of_traces([])
