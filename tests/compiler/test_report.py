"""The report of a compile, for people."""

from __future__ import annotations

import json
import re
from dataclasses import asdict, replace
from html.parser import HTMLParser
from pathlib import Path

import pytest

from ssd_artifacts.domain_config import LoadValidation
from ssd_artifacts.reference_bundle import bundle_path
from ssd_compiler.bundles.summary import summary_text
from ssd_compiler.report.added import added_by
from ssd_compiler.report.advice import advice
from ssd_compiler.report.html import html_report
from ssd_compiler.report.summary import domain_summary, load_text
from ssd_compiler.report.terminal import show
from ssd_profiles.mask import SubLayerPlan
from tests.bundles import LAYERS, bundle, fingerprint, light_record, record
from tests.tables import latency_table


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


def test_the_report_says_at_which_loads_masks_pay() -> None:
    measured = [
        LoadValidation(concurrency=count, speedup=speed, speedup_interval=(speed - 0.05, speed + 0.05), identical=True)
        for count, speed in ((4, 1.2), (8, 0.9))
    ]
    alone = record("one", {(2, 3): 0.9}, measured=1.3)
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
        assert each.text.startswith(f"{each.option.speedup:.2f}x: {each.option.draft_length} drafts")
    assert all(each.text.startswith("plain") for each in advice(failing, table, LAYERS))
    assert all(each.text == "plain: no masks" for each in advice(record("one", {}), table, LAYERS))


def test_the_report_is_of_the_device_of_the_latest_compile() -> None:
    """A base's latencies are from other devices, and may come first."""
    table = latency_table(LAYERS)
    tables = [replace(table, device=replace(table.device, device=name)) for name in ("A", "B")]
    both = replace(bundle(), latency={each.device.slug(): each for each in tables})
    for table in tables:
        report = json.dumps({"device": asdict(table.device), "domains": []})
        assert f"on {table.device.device}" in html_report(replace(both, report=report))
    for report in ("[]", "[" * 100_000):
        assert html_report(replace(both, report=report))


def test_what_a_bundle_adds_is_said_where_its_report_has_figures(capsys: pytest.CaptureFixture[str]) -> None:
    """The report of a foreign bundle may hold anything; only figures of domains that there are count."""
    figures = {"one": (1.2, 1.1, 1.3), "two": (0.8, 0.7, 0.9), "\x1b[2J": (1.2, 1.1, 1.3)}
    domains = [
        {
            "domain": name,
            "verdict": "any",
            "added": {"prompts": 8, "speedup": mid, "interval": (low, high), "text": "x"},
        }
        for name, (mid, low, high) in figures.items()
    ]
    told = replace(bundle(), report=json.dumps({"domains": [*domains, {"domain": "three"}]}))
    one = "one: auto is 1.20 (1.10–1.30) times as fast with the bundle as without it, on 8 prompts"
    two = "two: auto is 0.80 (0.70–0.90) times as fast with the bundle as without it, on 8 prompts; decode without it"
    show(told, Path("out"))
    for text in (capsys.readouterr().out, html_report(told), summary_text(told, bundle_path(Path("demo")))):
        assert one in text
        assert two in text
        assert "\x1b" not in text
    wrong = json.dumps({"domains": [{"domain": "one", "added": "x"}]})
    for report in (None, "[]", "[" * 100_000, wrong):
        assert added_by(replace(bundle(), report=report)) == {}
