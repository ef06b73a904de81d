from __future__ import annotations

import numpy as np

from ssd_profiles.intervals import bootstrap_interval, speedup


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
