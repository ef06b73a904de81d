"""Arrays of measured numbers: how pydantic reads them, and what stands between their points."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
from numpy.typing import NDArray
from pydantic import GetPydanticSchema
from pydantic_core.core_schema import no_info_after_validator_function

Array = NDArray[np.float64]


def read_as(kind: Any, convert: Callable[[Any], Any]) -> GetPydanticSchema:
    """Let pydantic read a value of this type, and convert it."""
    return GetPydanticSchema(lambda _, handler: no_info_after_validator_function(convert, handler(kind)))


def listed(kind: Any) -> GetPydanticSchema:
    """Let pydantic read an array from lists of this type, which bounds their numbers."""
    return read_as(kind, _array)


def _array(values: list[Any]) -> Array:
    try:
        return np.asarray(values, float)
    except ValueError:
        raise ValueError("expected rows of equal length") from None


def interpolate(x: float, grid: Array, values: Array) -> float:
    """Interpolate linearly; before the grid hold the first value, after it extrapolate the last slope if that rises."""
    if x > grid[-1] and grid.size > 1:
        # A slope that falls is noise, and would lead below zero.
        slope = max(0.0, (values[-1] - values[-2]) / (grid[-1] - grid[-2]))
        return float(values[-1] + slope * (x - grid[-1]))
    return float(np.interp(x, grid, values))


def rounded(values: Array, digits: int) -> Any:
    """The numbers of an array to so many significant digits, as nested lists."""
    if values.ndim > 1:
        return [rounded(row, digits) for row in values]
    return [float(f"{value:.{digits}g}") for value in values]
