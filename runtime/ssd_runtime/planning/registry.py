"""The strategies that a user can select, and what can be said of them before anything is loaded."""

from __future__ import annotations

import math
import sys
from collections.abc import Mapping
from dataclasses import fields
from typing import Any, Literal, get_args, get_origin, get_type_hints

from ssd_profiles.errors import UserError
from ssd_runtime.planning.settings import (
    ClaspSettings,
    DelSettings,
    ExitSettings,
    KnapsackSettings,
    LookupSettings,
    NearestSettings,
    SwiftSettings,
)

NAMES = ("auto", "plain", "knn", "knapsack", "clasp", "swift", "exit", "del", "lookup", "fixed:NAME")
WITHOUT_BUNDLE = ("auto", "plain", "knapsack", "clasp", "swift", "exit", "del", "lookup")
SETTINGS: Mapping[str, type[Any]] = {
    "knn": NearestSettings,
    "knapsack": KnapsackSettings,
    "clasp": ClaspSettings,
    "swift": SwiftSettings,
    "exit": ExitSettings,
    "del": DelSettings,
    "lookup": LookupSettings,
}
"""Strategies with parameters for `--set`."""


def check_strategy(name: str, has_bundle: bool) -> None:
    """Raise UserError when there is no such strategy, or when it needs a bundle and there is none."""
    if name not in NAMES[:-1] and not name.startswith("fixed:"):
        raise UserError(f"--strategy: {name!r} is unknown; give one of {', '.join(NAMES)}")
    if not has_bundle and name not in WITHOUT_BUNDLE:
        others = ", ".join(WITHOUT_BUNDLE)
        raise UserError(f"--strategy {name}: needs a bundle; give one with --artifact, or use one of {others}")


def needs_latency(name: str) -> bool:
    """Whether the strategy plans with measured latencies."""
    return name in ("auto", "knn", "knapsack", "lookup") or name.startswith("fixed:")


def read_settings(strategy: str, assignments: list[str]) -> Any:
    """The strategy's parameters with `NAME=VALUE` assignments applied; None for strategies without any.

    A parameter's former name is accepted with a note on standard error. Raises UserError naming the parameters there
    are.
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
        if not separator or name not in types:
            known = ", ".join(types) or "none"
            raise UserError(f"--set {assignment}: {strategy} has no such parameter; it has: {known}")
        least = next(field.metadata.get("least", 0) for field in fields(kind) if field.name == name) if kind else 0
        values[name] = _read(assignment, text, types[name], least)
    return kind(**values) if kind else None


def _read(assignment: str, text: str, kind: Any, least: int) -> Any:
    if get_origin(kind) is Literal:
        if text not in get_args(kind):
            raise UserError(f"--set {assignment}: expected one of {', '.join(get_args(kind))}")
        return text
    try:
        value = kind(text)
    except ValueError:
        raise UserError(f"--set {assignment}: expected a number ({kind.__name__})") from None
    if not least <= value < math.inf:
        raise UserError(f"--set {assignment}: must be a number from {least} on")
    return value
