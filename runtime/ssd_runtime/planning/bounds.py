"""Bounds of the strategies' parameters, which hold wherever a value comes from: no parameter is without."""

from __future__ import annotations

from dataclasses import Field, field, fields
from typing import Any, TypeVar

from ssd_profiles.errors import UserError

Number = TypeVar("Number", int, float)
SHOWN = 40
"""Most characters of a value in an error."""


def number(default: Number, least: Number, most: Number) -> Number:
    """A parameter from `least` to `most`; a default outside of these stands for what a bundle or a paper has."""
    given: Number = field(default=default, metadata={"bounds": (least, most)})
    return given


class Bounded:
    """A dataclass of parameters, each of which is a `number`, or has its possible texts as metadata.

    Raises UserError, which names the parameter, its value and its range, for a value of another type or range.
    """

    __slots__ = ()

    def __post_init__(self) -> None:
        for each in fields(self):  # type: ignore[arg-type]
            value = getattr(self, each.name)
            if not _is_within(each, value):
                raise out_of_range(each, value)


def read_value(parameter: Field[Any], text: str) -> Any:
    """The value that a text stands for. Raises UserError if it is of another type; its range is not checked."""
    kind: type[Any] = type(parameter.default)
    try:
        return kind(text)
    except ValueError:
        raise out_of_range(parameter, text) from None


def range_text(parameter: Field[Any]) -> str:
    """The range of a parameter, such as `1 to 64`, `0 to 1, or -1`, or the texts that it may be."""
    if "bounds" not in parameter.metadata:
        return ", ".join(parameter.metadata["texts"])
    least, most = parameter.metadata["bounds"]
    between = f"{least:g} to {most:,}" if isinstance(most, int) else f"{least:g} to {most:g}"
    return between if least <= parameter.default <= most else f"{between}, or {parameter.default:g}"


def out_of_range(parameter: Field[Any], value: Any) -> UserError:
    """The error of a value that a parameter cannot have."""
    kind = {int: "a whole number from ", float: "a number from "}.get(type(parameter.default), "one of ")
    # Python refuses to write whole numbers of thousands of digits.
    long = isinstance(value, int) and value.bit_length() > 128
    shown = f"one of {value.bit_length()} bits" if long else repr(value)
    if len(shown) > SHOWN:
        shown = shown[:SHOWN] + "…"
    return UserError(f"{parameter.name}: expected {kind}{range_text(parameter)}, got {shown}")


def _is_within(parameter: Field[Any], value: Any) -> bool:
    if "bounds" not in parameter.metadata:
        return value in parameter.metadata["texts"]
    least, most = parameter.metadata["bounds"]
    kinds = (int,) if isinstance(parameter.default, int) else (int, float)
    return isinstance(value, kinds) and (value == parameter.default or least <= value <= most)
