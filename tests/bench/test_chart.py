"""A strategy has one colour in all pictures."""

from bench.harness.drawing.chart import BY_STRATEGY, colours
from ssd_runtime.planning.registry import NAMES


def test_every_strategy_has_a_colour_of_its_own() -> None:
    strategies = {name.partition(":")[0] for name in NAMES} - {"plain"}
    assert strategies <= set(BY_STRATEGY)
    assert len(set(BY_STRATEGY.values())) == len(BY_STRATEGY)


def test_a_strategy_keeps_its_colour_whatever_is_beside_it() -> None:
    assert colours(["knn", "auto"]) == colours(["auto", "knn"])[::-1]
    first, variant, single = colours(["swift", "swift+tree=0", "single:auto"])
    assert first == BY_STRATEGY["swift"]
    assert variant not in (first, single)
    assert single == BY_STRATEGY["auto"]
    many = ["auto", *(f"auto+light={number}" for number in range(20))]
    assert len(colours(many)) == len(many)
