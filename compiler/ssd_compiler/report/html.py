"""Renders report.html, one page for people."""

from __future__ import annotations

from collections.abc import Iterable
from html import escape
from typing import Any

from ssd_artifacts.domain_config import DomainConfig
from ssd_artifacts.fingerprint import ModelFingerprint
from ssd_compiler.report.summary import domain_summary, load_text, origins
from ssd_profiles.latency import LatencyTable
from ssd_profiles.mask import SkipMask

QUERIES = (1, 2, 4, 8, 16, 32)


def html_report(model: ModelFingerprint, latency: LatencyTable, domains: dict[str, DomainConfig], created: str) -> str:
    """Render a self-contained page with verdicts, masks, frontiers and latencies."""
    summaries = [domain_summary(config, model.num_layers) for config in domains.values()]
    parts = [
        f"<h1>{escape(model.name)}</h1>",
        f"<p>{escape(model.architecture)}, {model.num_layers} layers, {escape(model.dtype)} · compiled {created} on "
        f"{escape(latency.device.device)}, {latency.device.threads} threads, torch {escape(latency.device.torch)}</p>",
        "<h2>Domains</h2>",
        _table(
            ("domain", "skipped", "α", "M", "predicted", "measured (95%)", "possible", "verdict", "search"),
            (_row(summary) for summary in summaries),
        ),
        *(f"<p>{escape(name)} with several at once: {escape(told)}</p>" for name, told in _told_loads(domains)),
        "<h2>Chosen masks</h2><p>Upper row attention, lower row MLP, layer 0 on the left; filled is skipped.</p>",
        *(_mask_picture(config, model.num_layers) for config in domains.values()),
        "<h2>Frontiers</h2><p>Draft cost (left is cheaper) against token agreement (up is better).</p>",
        *(_frontier_picture(config) for config in domains.values()),
        "<h2>Search</h2><p>The best speed-up predicted so far (up) against seconds (right), where it was kept.</p>",
        *(_progress_picture(config) for config in domains.values()),
        "<h2>Latency</h2>",
        _latency_table(latency),
    ]
    return f"{_HEAD}<body>{''.join(parts)}</body></html>\n"


def _told_loads(domains: dict[str, DomainConfig]) -> list[tuple[str, str]]:
    return [(name, told) for name, config in domains.items() if (told := load_text(config))]


_HEAD = (
    "<!doctype html><html lang=en><head><meta charset=utf-8><title>ssd-compile report</title><style>"
    "body{font:15px/1.5 system-ui,sans-serif;max-width:62rem;margin:2rem auto;padding:0 1rem;color:#1b2330}"
    "table{border-collapse:collapse}td,th{padding:.25rem .7rem;border-bottom:1px solid #d5dbe3;text-align:right}"
    "td:first-child,th:first-child{text-align:left}svg{display:block;margin:.3rem 0 1rem}h2{margin-top:2rem}"
    "</style></head>"
)


def _row(summary: dict[str, Any]) -> tuple[str, ...]:
    interval = summary["measured_interval"]
    return (
        summary["domain"],
        f"{summary['attention_skipped']} attention, {summary['mlp_skipped']} MLP",
        _number(summary["draft_acceptance_rate"]),
        _number(summary["mean_acceptance_length"]),
        _times(summary["predicted_speedup"]),
        f"{_times(summary['measured_speedup'])} ({interval[0]:.2f}–{interval[1]:.2f})" if interval else "–",
        _times(summary["oracle_speedup"]),
        summary["verdict"],
        f"{summary['search_seconds']:.0f} s, {summary['evaluations']} masks",
    )


def _latency_table(latency: LatencyTable) -> str:
    queries = [n for n in QUERIES if n <= latency.queries[-1]]
    rows = [
        (
            f"{kind} attention, {int(context)} cached",
            *(f"{latency.attention_seconds(context, n, kind) * 1e3:.3f}" for n in queries),
        )
        for kind in latency.attention
        for context in latency.contexts
    ]
    rows.append(("MLP", *(f"{latency.mlp_seconds(n) * 1e3:.3f}" for n in queries)))
    rows.append(("head", *(f"{latency.head_seconds(n) * 1e3:.3f}" for n in queries)))
    context = float(latency.contexts[min(1, latency.contexts.size - 1)])
    rows.append(
        (f"whole step, {int(context)} cached", *(f"{latency.step_seconds(context, n) * 1e3:.2f}" for n in queries))
    )
    return _table(("milliseconds", *(f"{n} tokens" for n in queries)), rows)


def _mask_picture(config: DomainConfig, num_layers: int) -> str:
    if config.choice is None:
        return ""
    mask = config.frontier[config.choice.entry].skip_mask(num_layers)
    cell = min(16, 960 // num_layers)
    colours = ("#d1495b", "#2e6f9e")
    squares = [
        f'<rect x="{i // 2 * cell}" y="{i % 2 * (cell + 2)}" width="{cell - 1}" height="{cell}" '
        f'fill="{colours[i % 2] if skipped else "#e6eaf0"}"/>'
        for i, skipped in enumerate(mask.bits)
    ]
    size = f'width="{num_layers * cell}" height="{2 * cell + 2}"'
    return f"<div>{escape(config.name)}: {escape(_mask_text(mask))}<svg {size}>{''.join(squares)}</svg></div>"


def _frontier_picture(config: DomainConfig) -> str:
    width = 360
    height = 200
    chosen = config.choice.entry if config.choice else -1
    low = min((entry.token_agreement for entry in config.frontier), default=0.0)
    span = max(1.0 - low, 1e-6)
    dots = [
        f'<circle cx="{20 + entry.draft_cost * (width - 40):.1f}" '
        f'cy="{20 + (1 - entry.token_agreement) / span * (height - 40):.1f}" r="{6 if i == chosen else 3.5}" '
        f'fill="{"#d1495b" if i == chosen else "#2e6f9e"}"><title>{escape(entry.origin)}: agreement '
        f"{entry.token_agreement:.3f}, cost {entry.draft_cost:.3f}</title></circle>"
        for i, entry in enumerate(config.frontier)
    ]
    return _framed(config.name, width, height, "".join(dots))


def _progress_picture(config: DomainConfig) -> str:
    progress = config.search.progress
    whole = max(config.search.seconds, 1e-6)
    if not progress:
        return ""
    width = 360
    height = 120
    best = progress[-1][1]
    low = min(1.0, progress[0][1])
    span = max(best - low, 1e-6)
    # The curve is a staircase: each value holds until the next improvement, the last one until the end.
    ends = [seconds for seconds, _ in progress[1:]] + [whole]
    corners = [
        f"{20 + second / whole * (width - 40):.1f},{20 + (best - speedup) / span * (height - 40):.1f}"
        for (began, speedup), end in zip(progress, ends, strict=True)
        for second in (began, end)
    ]
    line = f'<polyline points="{" ".join(corners)}" fill="none" stroke="#2e6f9e" stroke-width="2"/>'
    came = ", ".join(
        f"{escape(origin)} {_times(each['best'])} ({each['evaluations']:.0f} masks)"
        for origin, each in origins(config).items()
    )
    told = (
        f"{_times(progress[0][1])} in {progress[0][0]:.0f} s, {_times(best)} in {progress[-1][0]:.0f} of {whole:.0f} s"
        + (f"; best by origin: {came}" if came else "")
    )
    return _framed(f"{config.name}: {told}", width, height, line)


def _framed(title: str, width: int, height: int, drawn: str) -> str:
    frame = f'<rect width="{width}" height="{height}" fill="none" stroke="#d5dbe3"/>'
    return f'<div>{escape(title)}<svg width="{width}" height="{height}">{frame}{drawn}</svg></div>'


def _mask_text(mask: SkipMask) -> str:
    return f"{mask.attention_skipped} attention and {mask.mlp_skipped} MLP blocks of {mask.num_layers} layers"


def _table(head: Iterable[str], rows: Iterable[tuple[str, ...]]) -> str:
    top = "".join(f"<th>{escape(cell)}</th>" for cell in head)
    body = "".join("<tr>" + "".join(f"<td>{escape(cell)}</td>" for cell in row) + "</tr>" for row in rows)
    return f"<table><tr>{top}</tr>{body}</table>"


def _number(value: float | None) -> str:
    return "–" if value is None else f"{value:.2f}"


def _times(value: float | None) -> str:
    return "–" if value is None else f"{value:.2f}x"
