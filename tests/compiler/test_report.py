"""The report of a compile, for people."""

from __future__ import annotations

import re

from ssd_artifacts.domain_config import LoadValidation, SearchCost
from ssd_compiler.report.html import html_report
from ssd_compiler.report.summary import domain_summary, load_text
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


def test_the_report_says_from_which_search_every_mask_came() -> None:
    rated = [("0c", "knapsack", 1.1), ("30", "bayesian", 1.3), ("03", "bayesian", 0.7)]
    cost = SearchCost(seconds=8.0, evaluations=3, target_forwards=4.2, progress=[(1.0, 1.1), (2.0, 1.3)], rated=rated)
    searched = record("one", {(2, 3): 0.9}).model_copy(update={"search": cost})
    page = html_report(fingerprint(), latency_table(LAYERS), {"one": searched}, "today")
    assert "best by origin: knapsack 1.10x (1 masks), bayesian 1.30x (2 masks)" in page
    summary = domain_summary(searched, LAYERS)
    assert summary["origins"]["bayesian"] == {"evaluations": 2, "best": 1.3}
    assert summary["rated"] == rated


def test_the_report_says_at_which_loads_masks_pay() -> None:
    measured = [
        LoadValidation(concurrency=count, speedup=speed, speedup_interval=(speed - 0.05, speed + 0.05), identical=True)
        for count, speed in ((4, 1.2), (8, 0.9))
    ]
    alone = record("one", {(2, 3): 0.9}, measured=1.3)
    assert alone.validation is not None
    timed = alone.model_copy(update={"validation": alone.validation.model_copy(update={"under_load": tuple(measured)})})
    assert load_text(alone) == ""
    assert load_text(timed) == "4: 1.20x (1.15–1.25), 8: 0.90x (0.85–0.95); masks pay at 1, 4"
    assert domain_summary(timed, LAYERS)["pays_with"] == [1, 4]
    page = html_report(fingerprint(), latency_table(LAYERS), {"one": timed}, "today")
    assert "one with several at once: 4: 1.20x" in page
    never = timed.model_copy(
        update={"pays": False, "validation": timed.validation.model_copy(update={"under_load": measured[1:]})}
    )  # type: ignore[union-attr]
    assert load_text(never).endswith("masks pay at no load that was timed")
