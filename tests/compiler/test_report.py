"""The report of a compile, for people."""

from __future__ import annotations

import re

from ssd_artifacts.domain_config import SearchCost
from ssd_compiler.report.html import html_report
from tests.bundles import LAYERS, fingerprint, record
from tests.tables import latency_table


def test_the_search_is_drawn_as_steps_that_rise_and_reach_its_end() -> None:
    cost = SearchCost(seconds=8.0, evaluations=9, target_forwards=4.2, progress=[(1.0, 0.8), (2.0, 0.9), (4.0, 1.3)])
    searched = record("one", {(2, 3): 0.9}).model_copy(update={"search": cost})
    page = html_report(fingerprint(), latency_table(LAYERS), {"one": searched, "two": record("two", {})}, "today")
    [line] = re.findall(r'<polyline points="([^"]*)"', page)
    x, y = zip(*(map(float, corner.split(",")) for corner in line.split()), strict=True)
    assert x == (60.0, 100.0, 100.0, 180.0, 180.0, 340.0)
    assert y[::2] == y[1::2]
    assert y[0] > y[2] > y[4] == 20.0, "up is better"
    assert "one: 0.80x in 1 s, 1.30x in 4 of 8 s" in page
