"""From a strategy's name to planners, one for each request."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from ssd_artifacts.bundle import Bundle
from ssd_profiles.errors import UserError
from ssd_profiles.latency import LatencyTable
from ssd_runtime.planning.frontier import AutoPlanner, FixedPlanner, Frontier, NearestAnchorPlanner
from ssd_runtime.planning.knapsack import KnapsackPlanner
from ssd_runtime.planning.plan import PlainPlanner, Planner
from ssd_runtime.routing import Router

MakePlanner = Callable[[], Planner]


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
