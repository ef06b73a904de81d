"""From a strategy's name to planners, one for each request."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from ssd_artifacts.bundle import Bundle
from ssd_artifacts.domain_config import MIXTURE
from ssd_profiles.errors import UserError
from ssd_profiles.latency import LatencyTable
from ssd_runtime.drafting.lookup import LookupStats
from ssd_runtime.drafting.successors import Successors
from ssd_runtime.model.decoder import Decoder
from ssd_runtime.model.exit_heads import ExitHeads
from ssd_runtime.planning.auto.auto import AutoPlanner
from ssd_runtime.planning.auto.stream import Stream
from ssd_runtime.planning.lookup import LookupPlanner
from ssd_runtime.planning.papers.clasp import ClaspPlanner
from ssd_runtime.planning.papers.del_exit import DelPlanner
from ssd_runtime.planning.papers.knapsack import KnapsackPlanner
from ssd_runtime.planning.papers.knn import FixedPlanner, Frontier, NearestAnchorPlanner
from ssd_runtime.planning.papers.specbound import BoundedExitPlanner
from ssd_runtime.planning.papers.swift import SwiftPlanner, SwiftSearch
from ssd_runtime.planning.plan import PlainPlanner, Planner
from ssd_runtime.planning.routing import Router
from ssd_runtime.planning.settings import NearestSettings

MakePlanner = Callable[[], Planner]
"""Called once a request. What its planners share is the state of a stream of requests: of `auto`, `lookup`, `swift`."""


def make_strategy(
    name: str,
    settings: Any,
    decoder: Decoder,
    bundle: Bundle | None,
    latency: LatencyTable | None,
    heads: ExitHeads | None = None,
) -> MakePlanner:
    """What makes a planner for each request of one stream.

    `heads` are the bundle's on the decoder's device, for several streams to share; made here by default.
    """
    layers = decoder.shape.num_layers
    if name == "plain":
        return PlainPlanner
    if name == "clasp":
        return lambda: ClaspPlanner(settings)
    if name == "swift":
        search = SwiftSearch(layers, settings)
        return lambda: SwiftPlanner(search)
    router = Router(bundle.anchors) if bundle is not None else None
    domains = bundle.domains if bundle is not None else {}
    tuned = {record.name: record.exit for record in domains.values() if record.exit is not None}
    heads = heads or ExitHeads(decoder, bundle.exits if bundle is not None else None)
    if name in ("exit", "del"):
        if name == "del":
            return lambda: DelPlanner(heads, layers, settings)
        return lambda: BoundedExitPlanner(heads, layers, settings, tuned, router)
    assert latency is not None, "every other strategy plans with latencies"
    if name == "lookup":
        lookup = _lookup_stats(bundle)
        return lambda: LookupPlanner(latency, settings, lookup)
    frontiers = Frontier.of_all(domains, layers, latency)
    if name == "auto":
        stream = Stream(_lookup_stats(bundle))
        return lambda: AutoPlanner(frontiers, tuned, heads, router, latency, stream)
    if name == "knapsack" and (router is None or not settings.warm_start):
        return lambda: KnapsackPlanner(latency, settings)
    assert router is not None, "check_strategy() comes first"
    if name.startswith("fixed:"):
        chosen = frontiers.get(name.removeprefix("fixed:"))
        if chosen is None:
            raise UserError(f"--strategy {name}: the bundle has no such domain; it has {', '.join(frontiers)}")
        return lambda: FixedPlanner(chosen, latency)
    if name == "knn":
        if settings.out_of_domain == "mix" and MIXTURE not in frontiers:
            raise UserError("--set out_of_domain=mix: the bundle has no mixture; compile two domains or more together")
        return lambda: NearestAnchorPlanner(frontiers, router, latency, settings)
    assert name == "knapsack", "check_strategy() comes first"
    nearest = NearestSettings()
    # Its own searches choose among masks and plain steps, too.
    return lambda: KnapsackPlanner(latency, settings, NearestAnchorPlanner(frontiers, router, latency, nearest, 1.0))


def _lookup_stats(bundle: Bundle | None) -> LookupStats:
    """With the followers that the bundle knows."""
    known = bundle.successors if bundle is not None else None
    return LookupStats(Successors(known.rows() if known is not None else ()))
