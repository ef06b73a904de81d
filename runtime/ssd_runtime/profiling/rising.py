"""Takes noise from measurements that can only rise."""

from __future__ import annotations

import numpy as np

from ssd_profiles.latency import Array


def rising(values: Array) -> Array:
    """The sequence nearest to `values` that never falls (isotonic regression by pooling neighbours)."""
    pools: list[tuple[float, int]] = []
    for value in values:
        mean, count = float(value), 1
        while pools and pools[-1][0] > mean:
            before, many = pools.pop()
            mean, count = (before * many + mean * count) / (many + count), many + count
        pools.append((mean, count))
    return np.repeat([mean for mean, _ in pools], np.asarray([count for _, count in pools], int))
