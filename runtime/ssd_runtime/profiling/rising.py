"""Removes noise from measurements that never fall."""

from __future__ import annotations

import numpy as np

from ssd_profiles.arrays import Array


def rising(values: Array) -> Array:
    """The non-decreasing sequence nearest to `values` (isotonic regression by pooling neighbours)."""
    pools: list[tuple[float, int]] = []
    for value in values:
        mean = float(value)
        count = 1
        while pools and pools[-1][0] > mean:
            before, many = pools.pop()
            mean = (before * many + mean * count) / (many + count)
            count += many
        pools.append((mean, count))
    return np.repeat([mean for mean, _ in pools], np.asarray([count for _, count in pools], int))
