"""Removes noise from measurements that never fall."""

from __future__ import annotations

import numpy as np

from ssd_profiles.arrays import Array


def rising(values: Array) -> Array:
    """The non-decreasing sequence nearest to `values`."""
    from scipy.optimize import isotonic_regression  # which takes a third of a second, and only measuring needs

    return np.asarray(isotonic_regression(values).x)
