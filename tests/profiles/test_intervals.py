from __future__ import annotations

import numpy as np
import pytest

from ssd_profiles.intervals import speedup, speedup_interval


@pytest.mark.parametrize("count", [2, 3, 4, 6, 40])
def test_the_interval_holds_the_truth_as_often_as_it_says(count: int) -> None:
    random = np.random.default_rng(count)
    held = sure = 0
    for _ in range(1000):
        plain = random.uniform(1, 1.5, count)
        same = plain / random.normal(1.0, 0.1, count)
        found = speedup_interval(list(plain), list(same))
        assert found is not None
        low, high = found
        held += low <= 0.99 <= high  # total over total: the harmonic mean of N(1, 0.1)
        sure += low > 1.0
    assert held >= 930
    assert sure <= 35, "a speed-up that is none is claimed in one of forty"


def test_equal_times_are_no_speedup() -> None:
    assert speedup([1.0, 2.0], [1.0, 2.0]) == 1.0
    assert speedup_interval([1.0, 2.0], [1.0, 2.0]) == (1.0, 1.0)


def test_the_interval_is_a_point_where_all_agree() -> None:
    assert speedup_interval([1.0, 2.0, 3.0], [0.5, 1.0, 1.5]) == (2.0, 2.0)


def test_one_prompt_does_not_tell_how_sure_it_is() -> None:
    assert speedup_interval([2.0], [1.0]) is None
