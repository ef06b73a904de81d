"""The golden numbers of the papers, and statistics of speed and acceptance."""

from __future__ import annotations

import math

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from ssd_profiles.acceptance import DRAFT_LENGTHS, THRESHOLDS, AcceptanceProfile, Replay, Trace, replay
from ssd_profiles.formulas import (
    annealed_temperature,
    expected_speedup,
    expected_tokens,
    tokens_per_layer,
    tokens_per_time,
)
from ssd_profiles.intervals import speedup_interval


@pytest.mark.parametrize(
    ("mean_length", "rate", "skipped", "published"),
    [(4.34, 0.99, 0.45, 1.52), (3.13, 0.98, 0.45, 1.43), (8.21, 1.00, 0.45, 1.65), (3.85, 0.99, 0.5, 1.58)],
)
def test_expected_speedup_of_swifts_table(mean_length: float, rate: float, skipped: float, published: float) -> None:
    assert expected_speedup(mean_length, rate, 1 - skipped) == pytest.approx(published, abs=0.01)


def test_tpt_and_expected_speedup_agree() -> None:
    tpt = tokens_per_time(0.9, 5, 0.5, 1.0)
    tokens = expected_tokens(0.9, 5)
    assert tpt == pytest.approx(1.3387, abs=1e-4)
    assert expected_speedup(tokens, (tokens - 1) / 5, 0.5) == pytest.approx(tpt)


@given(st.floats(0.0, 1.0), st.integers(1, 20))
def test_expected_tokens_is_the_sum_of_powers(agreement: float, length: int) -> None:
    expected = sum(agreement**i for i in range(length + 1))
    assert expected_tokens(agreement, length) == pytest.approx(expected, rel=1e-6)


def test_limits() -> None:
    assert expected_tokens(1.0, 7) == 8.0
    assert math.isnan(expected_speedup(1.0, 0.0, 0.5))
    assert math.isnan(expected_speedup(0.0, 1.0, 1.0)), "a cycle yields a token at least"
    assert expected_speedup(3.0, 0.8, 0.5, verify_cost=1.5) < expected_speedup(3.0, 0.8, 0.5)


def test_temperatures_anneal_to_one() -> None:
    assert annealed_temperature(1, 32, 0.2) == pytest.approx(1.19375)
    assert annealed_temperature(32, 32, 0.2) == 1.0
    temperatures = [annealed_temperature(layer, 32, 0.2) for layer in range(1, 33)]
    assert temperatures == sorted(temperatures, reverse=True)


@given(st.floats(0.0, 1.0), st.integers(1, 12), st.floats(0.1, 0.9), st.floats(1e-3, 1.0))
def test_tpl_is_tpt_of_layers_that_cost_the_same(agreement: float, length: int, share: float, layer: float) -> None:
    exit_layer = max(1, round(share * 40))
    per_time = tokens_per_time(agreement, length, exit_layer * layer, 40 * layer)
    assert tokens_per_layer(agreement, length, exit_layer, 40) == pytest.approx(per_time * layer)


traces = st.lists(st.tuples(st.booleans(), st.floats(0.0, 1.0)), min_size=1, max_size=80).map(
    lambda rows: Trace(np.array([match for match, _ in rows]), np.array([p for _, p in rows]))
)


@given(traces, st.sampled_from(DRAFT_LENGTHS), st.sampled_from(THRESHOLDS))
def test_replay_yields_every_token_once(trace: Trace, length: int, threshold: float) -> None:
    found = replay(trace, length, threshold)
    assert len(trace.matches) <= found.tokens <= len(trace.matches) + 1
    assert found.cycles <= found.steps <= found.cycles * length
    assert found.tokens - found.cycles <= found.steps


@given(traces, st.sampled_from(DRAFT_LENGTHS), st.sampled_from(THRESHOLDS))
def test_replay_drafts_token_by_token(trace: Trace, length: int, threshold: float) -> None:
    position = cycles = steps = 0
    while position < len(trace.matches):
        drafted = range(position, min(position + length, len(trace.matches)))
        unsure = next((place for place in drafted if trace.confidence[place] < threshold), drafted[-1])
        wrong = next((place for place in range(position, unsure + 1) if not trace.matches[place]), unsure + 1)
        cycles, steps, position = cycles + 1, steps + unsure + 1 - position, wrong + 1
    assert replay(trace, length, threshold) == Replay(cycles, position, steps)


def test_the_profile_of_independent_matches_is_the_formula() -> None:
    random = np.random.default_rng(0)
    matches = random.random(8_000) < 0.8
    profile = AcceptanceProfile.of_traces([Trace(matches, np.ones(matches.size))])
    assert profile.token_agreement == pytest.approx(0.8, abs=0.02)
    for row, length in enumerate(DRAFT_LENGTHS):
        assert profile.tokens[row, 0] == pytest.approx(expected_tokens(0.8, length), rel=0.06)
        assert profile.steps[row, 0] == pytest.approx(length, rel=0.02)


def test_a_profile_of_several_texts_is_of_all_their_cycles_and_tokens() -> None:
    right, wrong = (Trace(np.full(count, each), np.ones(count)) for count, each in ((40, True), (20, False)))
    profile = AcceptanceProfile.of_traces([right, wrong])
    assert profile.token_agreement == pytest.approx(40 / 60)
    for row, length in enumerate(DRAFT_LENGTHS):
        parts = [replay(trace, length, 0.0) for trace in (right, wrong)]
        cycles, tokens, steps = (sum(getattr(part, name) for part in parts) for name in ("cycles", "tokens", "steps"))
        assert (profile.tokens[row, 0], profile.steps[row, 0]) == pytest.approx((tokens / cycles, steps / cycles))


def test_a_profile_needs_positions() -> None:
    with pytest.raises(ValueError, match="position"):
        AcceptanceProfile.of_traces([])


@pytest.mark.parametrize("count", [2, 3, 4, 6, 40])
def test_the_interval_holds_the_truth_as_often_as_it_says(count: int) -> None:
    random = np.random.default_rng(count)
    held = sure = 0
    for _ in range(400):
        plain = random.uniform(1, 1.5, count)
        same = plain / random.normal(1.0, 0.1, count)
        found = speedup_interval(list(plain), list(same))
        assert found is not None
        low, high = found
        held += low <= 0.99 <= high  # total over total: the harmonic mean of N(1, 0.1)
        sure += low > 1.0
    assert held >= 368
    assert sure <= 18, "a speed-up that is none is claimed in one of forty"


def test_the_interval_is_a_point_where_all_agree() -> None:
    assert speedup_interval([1.0, 2.0, 3.0], [0.5, 1.0, 1.5]) == (2.0, 2.0)


@given(st.lists(st.tuples(st.floats(0.5, 2.0), st.floats(0.5, 2.0)), min_size=2, max_size=9), st.floats(0.1, 10.0))
def test_the_interval_of_a_plain_decoding_that_is_slower_by_a_factor_is_higher_by_it(
    seconds: list[tuple[float, float]], factor: float
) -> None:
    plain, other = zip(*seconds, strict=True)
    found = speedup_interval([factor * each for each in plain], other)
    assert found == pytest.approx([factor * end for end in speedup_interval(plain, other) or ()])


def test_one_prompt_does_not_tell_how_sure_it_is() -> None:
    assert speedup_interval([2.0], [1.0]) is None
