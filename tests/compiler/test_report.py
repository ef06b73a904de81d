"""The report of a compile, for people."""

from __future__ import annotations

import re
from dataclasses import replace
from html.parser import HTMLParser
from pathlib import Path

import pytest
from rich.console import Console

from ssd_artifacts.domain_config import DomainConfig, LoadValidation, SearchCost
from ssd_compiler.report.advice import advice
from ssd_compiler.report.html import html_report
from ssd_compiler.report.pictures import origin_colour
from ssd_compiler.report.summary import domain_summary, load_text, self_sd_text
from ssd_compiler.report.terminal import show
from ssd_profiles.mask import SubLayerPlan
from tests.bundles import LAYERS, bundle, fingerprint, light_record, record
from tests.tables import latency_table, with_light_costs


def test_the_search_is_drawn_as_steps_that_rise_and_reach_its_end() -> None:
    cost = SearchCost(seconds=8.0, evaluations=9, target_forwards=4.2, progress=[(1.0, 0.8), (2.0, 0.9), (4.0, 1.3)])
    searched = record("one", {(2, 3): 0.9}).model_copy(update={"search": cost})
    page = html_report(bundle(one=searched, two=record("two", {})))
    [line] = re.findall(r'one: 0.80x.*?<polyline points="([^"]*)"', page.partition("<h2>Anchors")[0])
    x, y = zip(*(map(float, corner.split(",")) for corner in line.split()), strict=True)
    assert x[1] == x[2]
    assert x[3] == x[4]
    assert x[1] - x[0] == pytest.approx((x[3] - x[2]) / 2, abs=0.2), "one second and two"
    assert x[5] - x[4] == pytest.approx(4 * (x[1] - x[0]), abs=0.5), "until the end"
    assert y[::2] == y[1::2]
    assert y[0] > y[2] > y[4], "up is better"
    assert "one: 0.80x in 1 s, 1.30x in 4 of 8 s" in page


def test_the_report_says_from_which_search_every_mask_came() -> None:
    rated = [("0c", "knapsack", 1.1), ("30", "bayesian", 1.3), ("03", "bayesian", 0.7)]
    cost = SearchCost(seconds=8.0, evaluations=3, target_forwards=4.2, progress=[(1.0, 1.1), (2.0, 1.3)], rated=rated)
    searched = record("one", {(2, 3): 0.9}).model_copy(update={"search": cost})
    page = html_report(bundle(one=searched))
    assert "best by origin: knapsack 1.10x (1 masks), bayesian 1.30x (2 masks)" in page
    for told, origin in (("knapsack: 1.10x in 1.0 s", "knapsack"), ("bayesian: 1.30x in 2.0 s", "bayesian")):
        assert re.search(rf'fill="{origin_colour(origin)}"[^>]*><title>{told}', page), "an improvement in its colour"
    for number, (mask, origin, speedup) in enumerate(rated, 1):
        told = f"{number}, {origin}: {speedup:.2f}x, mask {mask}"
        assert re.search(rf'fill="{origin_colour(origin)}"[^>]*><title>{told}', page)
    summary = domain_summary(searched, LAYERS)
    assert summary["origins"]["bayesian"] == {"evaluations": 2, "best": 1.3}
    assert summary["rated"] == rated


def test_a_search_by_the_clock_says_what_the_papers_whole_one_would_take() -> None:
    def searched(*origins: str) -> DomainConfig:
        rated = [("0c", origin, 1.1) for origin in origins]
        cost = SearchCost(seconds=360.0, evaluations=6, target_forwards=4.2, progress=[(1.0, 1.1)], rated=rated)
        return record("one", {(2, 3): 0.9}).model_copy(update={"search": cost})

    clock = searched("self-sd", "self-sd")
    assert domain_summary(clock, LAYERS)["self_sd_seconds_extrapolated"] == 60_000.0
    assert self_sd_text(clock) == "6 masks were timed in 360 s; the papers' 1000 would take 16.7 h (extrapolated)"
    assert "would take 16.7 h (extrapolated)" in html_report(bundle(one=clock))
    for other in (searched(), searched("knapsack"), searched("knapsack", "bayesian")):
        assert domain_summary(other, LAYERS)["self_sd_seconds_extrapolated"] is None
        assert "extrapolated" not in html_report(bundle(one=other))


def test_the_report_shows_the_precision_of_each_sublayer() -> None:
    """A cell per sub-layer and one of the head: strong where it is skipped, paler in 4 bits and palest in 8."""
    mask = SubLayerPlan.of(LAYERS, {2}).lightened({0: 8, 1: 4, 3: 4, 2 * LAYERS: 8})
    searched = light_record("one", {mask: 0.9})
    assert searched.choice is not None
    chosen = searched.model_copy(update={"choice": searched.choice.model_copy(update={"entry": 1})})
    table = with_light_costs(latency_table(LAYERS), 0.5, (8, 4))
    page = html_report(replace(bundle(one=chosen), latency={table.device.slug(): table}))
    drawn = page.partition("<h2>Masks by domain</h2>")[2].partition("<h2>Validation</h2>")[0]
    cells = re.findall(r"<rect [^>]*/>", drawn)
    shown = [re.sub(r'.*fill-opacity="([^"]*)".*', r"\1", cell) if "opacity" in cell else "full" for cell in cells]
    assert shown == ["0.25", "0.5", "1", "0.5", *["full"] * (2 * LAYERS - 4), "0.25"]
    assert "1 attention, 0 MLP; 2 in 8 bits; 2 in 4 bits" in page
    assert "MLP, 8 bits" in page
    assert domain_summary(chosen, LAYERS)["lighter"] == {8: 2, 4: 2}
    in_full = html_report(bundle(one=record("one", {(2, 3): 0.9})))
    assert "in 4 bits" not in in_full


def test_the_report_begins_with_the_verdict() -> None:
    one, two = record("one", {(2, 3): 0.9}, measured=1.3), record("two", {(2, 3): 0.9}, measured=0.8)
    two = two.model_copy(update={"pays": False})
    told = re.findall(r'<p class="headline[^>]*>(.*?)</p>', html_report(bundle(one=one, two=two)))
    assert len(told) == 1
    assert "pays in <b>1 of 2</b> domains, most in one: <b>1.30x" in told[0]
    assert "pays in <b>none of 1</b> domains (best: two, 0.80x" in html_report(bundle(two=two))
    assert "No mask was timed" in html_report(bundle(two=record("two", {})))


def test_lighter_weights_alone_are_not_called_skipping(capsys: pytest.CaptureFixture[str]) -> None:
    lighter = light_record("one", {SubLayerPlan.of(LAYERS, set()).lightened({1: 8, 3: 4}): 0.9})
    assert lighter.choice is not None
    chosen = lighter.model_copy(update={"choice": lighter.choice.model_copy(update={"entry": 1}), "pays": True})
    measured = record("one", {(2, 3): 0.9}, measured=1.3)
    timed = chosen.model_copy(update={"validation": measured.validation})
    for config, skips in ((timed, False), (measured, True)):
        page = html_report(bundle(one=config))
        assert ("No layer is skipped: drafting on light weights pays in" in page) is not skips
        assert ("Skipping layers pays in" in page) is skips
        show(bundle(one=config), Path("out"))
        printed = capsys.readouterr().out
        assert ("no layer is skipped" in printed) is not skips
        assert ("one skips nothing; in 8 bits" in printed) is not skips


def test_the_table_of_a_compile_fits_a_terminal(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(Console, "is_terminal", True)
    monkeypatch.setenv("COLUMNS", "80")
    names = {name: record(name, {(2, 3): 0.9}, measured=1.3) for name in ("humaneval", "tinystories")}
    show(bundle(**names), Path("out"))
    printed = capsys.readouterr().out
    assert "…" not in printed
    assert all(name in printed for name in (*names, "speculate", "1.30x (", "1+1 of 8"))


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
    page = html_report(bundle(one=timed))
    assert "one with several at once: 4: 1.20x" in page
    never = timed.model_copy(
        update={"pays": False, "validation": timed.validation.model_copy(update={"under_load": measured[1:]})}
    )  # type: ignore[union-attr]
    assert load_text(never).endswith("masks pay at no load that was timed")


class Balanced(HTMLParser):
    """Raises where a tag ends that did not begin last, and collects the text."""

    def __init__(self) -> None:
        super().__init__()
        self.open: list[str] = []
        self.text: list[str] = []

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        assert tag != "script"
        assert not any(name.startswith("on") or name in ("src", "href") for name, _ in attrs), "nothing is fetched"
        if tag not in ("meta", "br"):
            self.open.append(tag)

    def handle_endtag(self, tag: str) -> None:
        assert self.open.pop() == tag

    def handle_data(self, data: str) -> None:
        self.text.append(data)


def test_the_page_is_whole_escaped_and_needs_no_network() -> None:
    hostile = "<script>alert(1)</script>&\"'"
    config = bundle().domains["one"]
    entry = config.frontier[0].model_copy(update={"origin": hostile})
    evil = replace(
        bundle(one=config.model_copy(update={"frontier": [entry]})),
        model=fingerprint().model_copy(update={"name": hostile, "architecture": hostile, "dtype": hostile}),
        created=hostile,
    )
    for page in (html_report(bundle()), html_report(evil)):
        parser = Balanced()
        parser.feed(page)
        assert parser.open == []
        assert "http" not in page.replace("http-equiv", "")
    assert hostile in "".join(parser.text)


def test_a_bundle_without_latencies_or_masks_has_a_page() -> None:
    page = html_report(replace(bundle(one=record("one", {})), latency={}))
    assert "No domain has a mask" in page
    assert "By context" not in page


def test_advice_drafts_where_masks_are_predicted_to_pay() -> None:
    table = latency_table(LAYERS)
    paying, failing = record("one", {(2, 3, 4, 5): 0.99}), record("one", {(2,): 0.3})
    for each in advice(paying, table, LAYERS):
        assert each.option is not None
        assert each.text.startswith(f"{each.option.speedup:.2f}x: {each.option.draft_length} drafts")
    assert all(each.text.startswith("plain") for each in advice(failing, table, LAYERS))
    assert all(each.text == "plain: no masks" for each in advice(record("one", {}), table, LAYERS))
