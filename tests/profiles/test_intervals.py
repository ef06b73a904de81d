from __future__ import annotations

import numpy as np
import pytest

from ssd_profiles.intervals import bootstrap_interval, interval_of_few, speedup


def test_the_interval_holds_the_truth_as_often_as_it_says() -> None:
    random = np.random.default_rng(0)
    held = 0
    for seed in range(100):
        plain = random.uniform(1, 2, 40)
        fast = plain / random.normal(1.3, 0.1, 40)
        low, high = bootstrap_interval(list(plain), list(fast), seed)
        held += low <= 1.2923 <= high  # total over total: the harmonic mean of N(1.3, 0.1)
    assert held >= 88


def test_equal_times_are_no_speedup() -> None:
    assert speedup([1.0, 2.0], [1.0, 2.0]) == 1.0
    assert bootstrap_interval([1.0, 2.0], [1.0, 2.0]) == (1.0, 1.0)


@pytest.mark.parametrize("count", [2, 3, 4, 6])
def test_an_interval_of_few_holds_the_truth_as_often_as_it_says(count: int) -> None:
    random = np.random.default_rng(count)
    held = sure = 0
    for _ in range(1000):
        plain = random.uniform(1, 1.5, count)
        same = plain / random.normal(1.0, 0.1, count)
        low, high = interval_of_few(list(plain), list(same))
        held += low <= 0.99 <= high  # total over total: the harmonic mean of N(1, 0.1)
        sure += low > 1.0
    assert held >= 930
    assert sure <= 35, "a speed-up that is none is claimed in one of forty"


def test_an_interval_of_few_is_a_point_where_all_agree() -> None:
    assert interval_of_few([1.0, 2.0, 3.0], [0.5, 1.0, 1.5]) == (2.0, 2.0)
