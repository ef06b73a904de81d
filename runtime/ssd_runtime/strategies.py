"""The strategies that a user can select, and what can be said of them before anything is loaded."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import fields
from typing import Any

from ssd_profiles.errors import UserError
from ssd_runtime.planning.settings import KnapsackSettings

NAMES = ("auto", "plain", "knn", "knapsack", "fixed:NAME")
WITHOUT_BUNDLE = frozenset({"plain", "knapsack"})
SETTINGS: Mapping[str, type[Any]] = {"knapsack": KnapsackSettings}
"""Strategies with parameters for `--set`."""


def check_strategy(name: str, has_bundle: bool) -> None:
    """Raise UserError when there is no such strategy, or when it needs a bundle and there is none."""
    if name.partition(":")[0] not in {known.partition(":")[0] for known in NAMES} or name == "fixed":
        raise UserError(f"--strategy: {name!r} is unknown; give one of {', '.join(NAMES)}")
    if not has_bundle and name not in WITHOUT_BUNDLE:
        raise UserError(f"--strategy {name}: needs a bundle; give one with --artifact, or use plain or knapsack")


def needs_latency(name: str) -> bool:
    """Whether the strategy plans with measured latencies."""
    return name != "plain"


def read_settings(strategy: str, assignments: list[str]) -> Any:
    """The strategy's parameters with `NAME=VALUE` assignments applied; None for strategies without any.

    Raises UserError naming the parameters there are.
    """
    kind = SETTINGS.get(strategy)
    types = {field.name: field.type for field in fields(kind)} if kind else {}
    values: dict[str, Any] = {}
    for assignment in assignments:
        name, separator, text = assignment.partition("=")
        if not separator or name not in types:
            known = ", ".join(types) or "none"
            raise UserError(f"--set {assignment}: {strategy} has no such parameter; it has: {known}")
        convert = int if types[name] == "int" else float
        try:
            values[name] = convert(text)
        except ValueError:
            raise UserError(f"--set {assignment}: expected a number ({types[name]})") from None
        if not 0 <= values[name] < math.inf:
            raise UserError(f"--set {assignment}: must be a number from 0 on")
    return kind(**values) if kind else None
