"""The table of strategies that a user can select. Importing it loads neither torch nor a planner: see `makers`."""

from __future__ import annotations

import math
import sys
from collections.abc import Mapping
from dataclasses import dataclass, fields
from typing import Any, Literal, get_args, get_origin, get_type_hints

from ssd_profiles.errors import UserError
from ssd_runtime.planning.settings import (
    AutoSettings,
    ClaspSettings,
    DelSettings,
    ExitSettings,
    KnapsackSettings,
    LightSettings,
    LookupSettings,
    NearestSettings,
    SwiftSettings,
)


@dataclass(frozen=True, slots=True, kw_only=True)
class Strategy:
    """A way to plan, with its parameters and needs."""

    name: str
    settings: type[Any] | None = None
    """Class of the parameters for `--set`; None without any."""
    needs_bundle: bool = False
    needs_latency: bool = False
    needs_light: bool = False
    """Whether it drafts on lighter copies of the weights."""
    uses_masks: bool = False
    """Whether it drafts with a bundle's masks, which may run on lighter copies too."""


FIXED = "fixed:"
"""Prefix of the strategy that is followed by a domain's name."""
STRATEGIES = (
    Strategy(
        name="auto",
        settings=AutoSettings,
        needs_latency=True,
        uses_masks=True,
    ),
    Strategy(name="plain"),
    Strategy(
        name="knn",
        settings=NearestSettings,
        needs_bundle=True,
        needs_latency=True,
        uses_masks=True,
    ),
    Strategy(
        name="knapsack",
        settings=KnapsackSettings,
        needs_latency=True,
        uses_masks=True,
    ),
    Strategy(name="clasp", settings=ClaspSettings),
    Strategy(name="swift", settings=SwiftSettings),
    Strategy(name="exit", settings=ExitSettings),
    Strategy(name="del", settings=DelSettings),
    Strategy(name="lookup", settings=LookupSettings, needs_latency=True),
    Strategy(name="light", settings=LightSettings, needs_light=True),
    Strategy(
        name=f"{FIXED}NAME",
        needs_bundle=True,
        needs_latency=True,
        uses_masks=True,
    ),
)
NAMES = tuple(strategy.name for strategy in STRATEGIES)
WITHOUT_BUNDLE = tuple(strategy.name for strategy in STRATEGIES if not strategy.needs_bundle)
SETTINGS: Mapping[str, type[Any]] = {each.name: each.settings for each in STRATEGIES if each.settings is not None}
"""Classes of the parameters for `--set`, by strategy."""


def find_strategy(name: str) -> Strategy:
    """The strategy that a user calls `name`. Raises UserError if there is none."""
    key = f"{FIXED}NAME" if name.startswith(FIXED) else name
    for strategy in STRATEGIES:
        if strategy.name == key:
            return strategy
    raise UserError(f"--strategy: {name!r} is unknown; give one of {', '.join(NAMES)}")


def check_strategy(name: str, has_bundle: bool) -> None:
    """Raise UserError when there is no such strategy, or when it needs a bundle and there is none."""
    if find_strategy(name).needs_bundle and not has_bundle:
        others = ", ".join(WITHOUT_BUNDLE)
        raise UserError(f"--strategy {name}: needs a bundle; give one with --bundle, or use one of {others}")


def needs_latency(name: str) -> bool:
    """Whether the strategy plans with measured latencies. Raises UserError if there is no such strategy."""
    return find_strategy(name).needs_latency


def read_settings(strategy: str, assignments: list[str]) -> Any:
    """The strategy's parameters with `NAME=VALUE` assignments applied; None for strategies without any.

    A parameter's former name is accepted with a note on standard error. Raises UserError that names the parameters.
    """
    kind = SETTINGS.get(strategy)
    types = get_type_hints(kind) if kind else {}
    renamed = {field.metadata["was"]: field.name for field in fields(kind) if "was" in field.metadata} if kind else {}
    values: dict[str, Any] = {}
    for assignment in assignments:
        name, separator, text = assignment.partition("=")
        if name in renamed:
            print(f"note: --set {name}: the parameter is called {renamed[name]} now", file=sys.stderr)
            name = renamed[name]
        if not separator:
            raise UserError(f"--set {assignment}: expected NAME=VALUE, such as --set {name}=1")
        if name not in types:
            known = ", ".join(types) or "none"
            raise UserError(f"--set {assignment}: {strategy} has no such parameter; it has: {known}")
        bounds = next(field.metadata for field in fields(kind) if field.name == name) if kind else {}
        most = bounds.get("most", 1.0 if types[name] is float else math.inf)
        values[name] = _read(assignment, text=text, kind=types[name], least=bounds.get("least", 0), most=most)
    return kind(**values) if kind else None


def _read(assignment: str, text: str, kind: Any, least: int, most: float) -> Any:
    """Convert the text of an assignment's value to `kind`, a number from `least` to `most` or a literal."""
    if get_origin(kind) is Literal:
        if text not in get_args(kind):
            raise UserError(f"--set {assignment}: expected one of {', '.join(get_args(kind))}")
        return text
    try:
        value = kind(text)
    except ValueError:
        raise UserError(f"--set {assignment}: expected a number ({kind.__name__})") from None
    if not least <= value <= most or value == math.inf:
        expected = f"from {least} on" if most == math.inf else f"from {least} to {most:g}"
        raise UserError(f"--set {assignment}: must be a number {expected}")
    return value
