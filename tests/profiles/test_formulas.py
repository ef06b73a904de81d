"""The golden numbers of the papers."""

from __future__ import annotations

import math

import pytest
from hypothesis import given
from hypothesis import strategies as st

from ssd_profiles.formulas import (
    annealed_temperature,
    expected_speedup,
    expected_tokens,
    tokens_per_layer,
    tokens_per_time,
)


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
