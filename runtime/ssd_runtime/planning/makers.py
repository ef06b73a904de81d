"""Makes planners from a strategy's name: one planner per request."""

from __future__ import annotations

from collections.abc import Callable, Mapping

from ssd_runtime.planning.auto.auto import make_auto
from ssd_runtime.planning.light import make_light
from ssd_runtime.planning.lookup import make_lookup
from ssd_runtime.planning.mtp import make_mtp
from ssd_runtime.planning.papers.clasp import make_clasp
from ssd_runtime.planning.papers.del_exit import make_del
from ssd_runtime.planning.papers.knapsack import make_knapsack
from ssd_runtime.planning.papers.knn import make_fixed, make_knn
from ssd_runtime.planning.papers.specbound import make_exit
from ssd_runtime.planning.papers.swift import make_swift
from ssd_runtime.planning.plan import PlainPlanner
from ssd_runtime.planning.registry import FIXED, find_strategy
from ssd_runtime.planning.strategy import MakePlanner, StrategyInputs

MAKERS: Mapping[str, Callable[[StrategyInputs], MakePlanner]] = {
    "auto": make_auto,
    "plain": lambda _: PlainPlanner,
    "knn": make_knn,
    "knapsack": make_knapsack,
    "clasp": make_clasp,
    "swift": make_swift,
    "exit": make_exit,
    "del": make_del,
    "lookup": make_lookup,
    "light": make_light,
    "mtp": make_mtp,
    f"{FIXED}NAME": make_fixed,
}
"""Makers of planners for one stream, by the name of the registry's strategy."""


def make_strategy(inputs: StrategyInputs) -> MakePlanner:
    """A maker of planners for the requests of one stream.

    Raises UserError if the bundle lacks a domain or mixture that the strategy needs.
    """
    return MAKERS[find_strategy(inputs.name).name](inputs)
