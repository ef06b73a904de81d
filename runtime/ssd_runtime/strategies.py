"""The strategies that a user can select, by name."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from dataclasses import fields
from typing import Any

from ssd_artifacts.bundle import Bundle
from ssd_profiles.errors import UserError
from ssd_profiles.latency import LatencyTable
from ssd_runtime.planning.frontier import AutoPlanner, FixedPlanner, Frontier, NearestAnchorPlanner
from ssd_runtime.planning.knapsack import KnapsackPlanner, KnapsackSettings
from ssd_runtime.planning.plan import PlainPlanner, Planner
from ssd_runtime.routing import Router

NAMES = ("auto", "plain", "knn", "knapsack", "fixed:NAME")
WITHOUT_BUNDLE = frozenset({"plain", "knapsack"})
SETTINGS: Mapping[str, type[Any]] = {"knapsack": KnapsackSettings}
"""Strategies with parameters for `--set`."""

MakePlanner = Callable[[], Planner]


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


def make_strategy(name: str, settings: Any, bundle: Bundle | None, latency: LatencyTable | None) -> MakePlanner:
    """What makes a planner for each request."""
    if name == "plain":
        return PlainPlanner
    assert latency is not None, "every other strategy plans with latencies"
    if name == "knapsack":
        return lambda: KnapsackPlanner(latency, settings)
    assert bundle is not None, "check_strategy() comes first"
    frontiers = {domain: Frontier.of(record, bundle.model.num_layers) for domain, record in bundle.domains.items()}
    if name.startswith("fixed:"):
        chosen = frontiers.get(name.removeprefix("fixed:"))
        if chosen is None:
            raise UserError(f"--strategy {name}: the bundle has no such domain; it has {', '.join(frontiers)}")
        return lambda: FixedPlanner(chosen, latency)
    router = Router(bundle.anchors)
    if name == "knn":
        return lambda: NearestAnchorPlanner(frontiers, router, latency)
    return lambda: AutoPlanner(frontiers, router, latency)
