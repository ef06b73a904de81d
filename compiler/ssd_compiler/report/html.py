"""Renders report.html, one page for people, from a bundle's checked contents and without scripts."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterable
from dataclasses import asdict
from functools import partial
from html import escape
from itertools import product
from typing import Any

from ssd_artifacts.bundle import Bundle
from ssd_artifacts.domain_config import DomainConfig
from ssd_compiler.report import pictures
from ssd_compiler.report.added import added_by
from ssd_compiler.report.advice import advice
from ssd_compiler.report.charts import COLOURS, legend
from ssd_compiler.report.summary import domain_summary, load_text, skips_layers, speedup_text
from ssd_profiles.latency import LatencyTable
from ssd_profiles.mask import FULL

QUERIES = (1, 2, 4, 8, 16, 32)
_HEAD = (
    "<!doctype html><html lang=en><head><meta charset=utf-8><meta name=viewport content='width=device-width'>"
    "<meta http-equiv=Content-Security-Policy content=\"default-src 'none'; style-src 'unsafe-inline'\">"
    "<title>ssd-compile report</title><style>"
    ":root{--ink:#1b2330;--soft:#5c6b7a;--line:#dfe4ea;--paper:#fff;--cell:#e8ecf1}"
    "@media(prefers-color-scheme:dark){:root{--ink:#e6eaf0;--soft:#9aa7b5;--line:#2f3945;--paper:#141a21;--cell:#28313c}}"
    "body{font:15px/1.5 system-ui,'DejaVu Sans',sans-serif;max-width:66rem;margin:2rem auto;padding:0 1.2rem;"
    "color:var(--ink);background:var(--paper)}h1{margin-bottom:.2rem}h2{margin-top:2.6rem;border-top:1px solid "
    "var(--line);padding-top:1.2rem}p{color:var(--soft);max-width:48rem}table{border-collapse:collapse;font-size:14px;"
    "display:block;overflow-x:auto}td,th{padding:.3rem .8rem;border-bottom:1px solid var(--line);text-align:right;"
    "white-space:nowrap}td:first-child,th:first-child{text-align:left;font-weight:600}.grid{stroke:var(--line)}"
    ".kept{fill:var(--cell)}svg{max-width:100%;height:auto}svg text{font-size:11px;fill:var(--soft)}"
    ".figures{display:grid;grid-template-columns:repeat(auto-fill,minmax(19rem,1fr));gap:1.4rem 1.6rem}"
    ".headline{color:var(--ink);font-size:1.25rem;max-width:none;margin:1.2rem 0;padding:.9rem 1.2rem;"
    "border-left:5px solid var(--soft);background:var(--cell);border-radius:4px}.headline.pays{border-color:#3a8f6b}"
    "tbody tr:hover{background:var(--cell)}figure{margin:0}figcaption{font-weight:600;font-size:14px}"
    ".legend span{margin-right:1.2rem;white-space:nowrap}.legend i{display:inline-block;width:.8em;height:.8em;"
    "margin-right:.4em;border-radius:2px}"
    "</style></head>"
)


def _own_table(bundle: Bundle) -> LatencyTable | None:
    """The latencies of the device of the latest compile, else any; those of a base are from other devices."""
    try:
        device = json.loads(bundle.report or "{}").get("device")
    except (ValueError, AttributeError, RecursionError):  # whoever made the bundle may have written anything
        device = None
    tables = list(bundle.latency.values())
    return next((each for each in tables if asdict(each.device) == device), next(iter(tables), None))


def html_report(bundle: Bundle) -> str:
    """Render a self-contained page with verdicts, masks, frontiers, advice by context, anchors and latencies."""
    model = bundle.model
    domains = bundle.domains
    table = _own_table(bundle)
    summaries = [domain_summary(config, model.num_layers) for config in domains.values()]
    parts = [
        f"<h1>{escape(model.name)}</h1>",
        f"<p>{escape(model.architecture)}, {model.num_layers} layers, {escape(model.dtype)} · compiled "
        f"{escape(bundle.created)}{escape(_measured_on(table))}</p>",
        _headline(domains, {summary["domain"]: summary for summary in summaries}),
        "<h2>Domains</h2>",
        _table(
            ("domain", "skipped", "α", "M", "predicted", "measured (95%)", "possible", "verdict", "search"),
            (_row(summary) for summary in summaries),
        ),
        *(
            f"<p>{escape(name)} with several at once: {escape(told)}</p>"
            for name, config in domains.items()
            if (told := load_text(config))
        ),
        *(f"<p>{escape(name)}: {escape(added.text)}</p>" for name, added in added_by(bundle).items()),
        "<h2>Masks by domain</h2><p>A column for each layer, the first on the left: "
        "the mixer (attention in most models) above, the MLP below. "
        "Strong colours are skipped, pale ones run on light copies of their weights.</p>",
        pictures.masks(domains, model.num_layers),
        "<h2>Validation</h2><p>Timed decoding of prompts that the search never saw.</p>",
        pictures.validation(domains),
    ]
    if table is not None:
        parts += [
            "<h2>By context</h2><p>The best plan with a domain's masks, predicted from the latencies below and the "
            "acceptance measured in calibration: its speed-up, how many tokens are drafted at most, below which "
            "confidence a draft ends, and c, a draft step in plain steps. <b>auto</b> begins with it, tries guesses "
            "besides, and corrects both by what it sees.</p>",
            _advice_table(domains, table, model.num_layers),
        ]
    origins = [(name, pictures.origin_colour(name)) for name in pictures.ORIGINS]
    parts += [
        "<h2>Frontiers</h2><p>Masks that no other beats: left is cheaper, up is better; the large dot was chosen.</p>",
        legend([*origins, ("other", COLOURS[5])]),
        _figures(pictures.frontier(config) for config in domains.values()),
        *_searches(domains),
        "<h2>Anchors</h2><p>Prompts by which others find their domain, in the two directions in which they differ "
        "most. Near ones are alike.</p>",
        pictures.anchors(bundle.anchors),
    ]
    if table is not None:
        parts += ["<h2>Latency</h2>", _figures([pictures.latency(table)]), _latency_table(table)]
    return f"{_HEAD}<body>{''.join(parts)}</body></html>\n"


def _headline(domains: dict[str, DomainConfig], summaries: dict[str, dict[str, Any]]) -> str:
    """The verdict in a sentence: in how many of the timed domains masks pay, and where most."""
    timed = {name: config.validation for name, config in domains.items() if config.validation is not None}
    if not timed:
        return '<p class="headline">No mask was timed on this device; <b>auto</b> finds out which of them pay.</p>'
    paying = [name for name in timed if domains[name].pays]
    best = max(paying or timed, key=lambda name: timed[name].speedup)
    told = speedup_text(timed[best])
    if paying:
        skips = any(skips_layers(summaries[name]) for name in paying)
        what = "Skipping layers" if skips else "No layer is skipped: drafting on light weights"
        alone = "" if skips else " <b>auto</b> does this without a bundle too."
        return (
            f'<p class="headline pays">{what} pays in <b>{len(paying)} of {len(timed)}</b> domains, most in '
            f"{escape(best)}: <b>{told}</b> of plain decoding.{alone}</p>"
        )
    return (
        f'<p class="headline">Skipping layers pays in <b>none of {len(timed)}</b> domains (best: {escape(best)}, '
        f"{told} of plain decoding). <b>auto</b> drafts otherwise, by guesses or on light weights.</p>"
    )


def _measured_on(table: LatencyTable | None) -> str:
    if table is None:
        return ""
    return f" on {table.device.device}, {table.device.threads} threads, torch {table.device.torch}"


def _searches(domains: dict[str, DomainConfig]) -> list[str]:
    drawn = [drawn for config in domains.values() if (drawn := pictures.search(config))]
    told = "<p>The best speed-up predicted so far, and all masks that were rated; colours as above.</p>"
    return ["<h2>Search</h2>" + told, _figures(drawn)] if drawn else []


def _figures(drawn: Iterable[str]) -> str:
    return f'<div class="figures">{"".join(drawn)}</div>'


def _row(summary: dict[str, Any]) -> tuple[str, ...]:
    interval = summary["measured_interval"]
    lighter = "".join(f"; {count} in {bits} bits" for bits, count in summary["lighter"].items())
    return (
        summary["domain"],
        f"{summary['mixers_skipped']} mixers, {summary['mlps_skipped']} MLPs{lighter}",
        _number(summary["draft_acceptance_rate"]),
        _number(summary["mean_acceptance_length"]),
        _times(summary["predicted_speedup"]),
        f"{_times(summary['measured_speedup'])} ({interval[0]:.2f}–{interval[1]:.2f})" if interval else "–",
        _times(summary["oracle_speedup"]),
        summary["verdict"],
        f"{summary['search_seconds']:.0f} s, {summary['evaluations']} masks",
    )


def _advice_table(domains: dict[str, DomainConfig], table: LatencyTable, num_layers: int) -> str:
    found = {name: advice(config, table, num_layers) for name, config in domains.items()}
    contexts = [each.context for each in next(iter(found.values()), [])]
    rows = [(name, *(each.text for each in told)) for name, told in found.items()]
    return _table(("domain", *(f"{context} tokens" for context in contexts)), rows)


def _latency_table(latency: LatencyTable) -> str:
    queries = [n for n in QUERIES if n <= latency.queries[-1]]
    rows = list[tuple[str, ...]]()

    def add(name: str, seconds: Callable[[int], float], digits: int = 3) -> None:
        rows.append((name, *(f"{seconds(n) * 1e3:.{digits}f}" for n in queries)))

    for kind, context in product(latency.attention, latency.contexts):
        add(f"mixer ({kind}), {context:.0f} cached", partial(latency.mixer_seconds, context, kind=kind))
    for bits in (FULL, *latency.light):
        named = f", {bits} bits" if bits else ""
        for kind in latency.attention if bits else ():
            context = latency.light[bits].context
            add(
                f"mixer ({kind}){named}, {context} cached",
                partial(latency.mixer_seconds, context, kind=kind, bits=bits),
            )
        add(f"MLP{named}", partial(latency.mlp_seconds, bits=bits))
        add(f"head{named}", partial(latency.head_seconds, bits=bits))
    context = float(latency.contexts[latency.base])
    add(f"whole step, {context:.0f} cached", partial(latency.step_seconds, context), digits=2)
    return _table(("milliseconds", *(f"{n} tokens" for n in queries)), rows)


def _table(head: Iterable[str], rows: Iterable[tuple[str, ...]]) -> str:
    top = "".join(f"<th>{escape(cell)}</th>" for cell in head)
    body = "".join("<tr>" + "".join(f"<td>{escape(cell)}</td>" for cell in row) + "</tr>" for row in rows)
    return f"<table><thead><tr>{top}</tr></thead><tbody>{body}</tbody></table>"


def _number(value: float | None) -> str:
    return "–" if value is None else f"{value:.2f}"


def _times(value: float | None) -> str:
    return f"{value:.2f}x" if value else "–"
