"""What a compile found, for programs (report.json) and for people (report.html)."""

from __future__ import annotations

import json
from collections.abc import Iterable
from dataclasses import asdict
from html import escape
from typing import Any

from ssd_artifacts.domain_config import DomainConfig
from ssd_artifacts.fingerprint import ModelFingerprint
from ssd_compiler.settings import CompileSettings
from ssd_profiles.formulas import expected_speedup
from ssd_profiles.latency import LatencyTable
from ssd_profiles.mask import SkipMask

QUERIES = (1, 2, 4, 8, 16, 32)


def domain_summary(record: DomainConfig, num_layers: int) -> dict[str, Any]:
    """The figures of a domain that people ask for first."""
    choice, validation = record.choice, record.validation
    entry = record.frontier[choice.entry] if choice else None
    mask = entry.skip_mask(num_layers) if entry else None
    return {
        "domain": record.name,
        "context": record.context,
        "mask": entry.mask if entry else None,
        "attention_skipped": mask.attention_skipped if mask else 0,
        "mlp_skipped": mask.mlp_skipped if mask else 0,
        "draft_length": choice.draft_length if choice else 0,
        "threshold": choice.threshold if choice else 0.0,
        "token_agreement": entry.token_agreement if entry else None,
        "draft_cost": entry.draft_cost if entry else None,
        "draft_acceptance_rate": validation.draft_acceptance_rate if validation else None,
        "mean_acceptance_length": validation.mean_acceptance_length if validation else None,
        "potential": record.potential,
        "predicted_speedup": choice.predicted_speedup if choice else None,
        "measured_speedup": validation.speedup if validation else None,
        "measured_interval": list(validation.speedup_interval) if validation else None,
        "expected_speedup": (
            round(
                expected_speedup(validation.mean_acceptance_length, validation.draft_acceptance_rate, entry.draft_cost),
                4,
            )
            if validation and entry and validation.draft_acceptance_rate > 0
            else None
        ),
        "under_load": [each.model_dump(mode="json") for each in validation.under_load] if validation else [],
        "pays_with": _paying_loads(record),
        "verdict": "not timed" if choice and not validation else "speculate" if record.pays else "plain",
        "search_seconds": record.search.seconds,
        "evaluations": record.search.evaluations,
        "target_forwards": record.search.target_forwards,
    }


def load_text(record: DomainConfig) -> str:
    """What masks bring where several sequences decode at once, in one sentence; empty where nobody timed it."""
    if record.validation is None or not record.validation.under_load:
        return ""
    figures = [
        f"{each.concurrency}: {each.speedup:.2f}x ({each.speedup_interval[0]:.2f}–{each.speedup_interval[1]:.2f})"
        for each in record.validation.under_load
    ]
    paying = ", ".join(map(str, _paying_loads(record))) or "no load that was timed"
    return f"{', '.join(figures)}; masks pay at {paying}"


def _paying_loads(record: DomainConfig) -> list[int]:
    """The numbers of sequences at once with which masks were faster than plain decoding, beyond doubt."""
    timed = record.validation.under_load if record.validation is not None else ()
    return [1] * record.pays + [each.concurrency for each in timed if each.speedup_interval[0] > 1.0]


def json_report(
    settings: CompileSettings,
    model: ModelFingerprint,
    latency: LatencyTable,
    records: dict[str, DomainConfig],
    seconds: float,
) -> str:
    """Everything in numbers."""
    return json.dumps(
        {
            "settings": asdict(settings),
            "model": model.model_dump(mode="json"),
            "device": asdict(latency.device),
            "seconds": round(seconds, 1),
            "domains": [domain_summary(record, model.num_layers) for record in records.values()],
        },
        indent=1,
    )


def html_report(model: ModelFingerprint, latency: LatencyTable, records: dict[str, DomainConfig], created: str) -> str:
    """One self-contained page: verdicts, masks, frontiers, latencies."""
    summaries = [domain_summary(record, model.num_layers) for record in records.values()]
    parts = [
        f"<h1>{escape(model.name)}</h1>",
        f"<p>{escape(model.architecture)}, {model.num_layers} layers, {escape(model.dtype)} · compiled {created} on "
        f"{escape(latency.device.device)}, {latency.device.threads} threads, torch {escape(latency.device.torch)}</p>",
        "<h2>Domains</h2>",
        _table(
            ("domain", "skipped", "α", "M", "predicted", "measured (95%)", "possible", "verdict", "search"),
            (_row(summary) for summary in summaries),
        ),
        *(f"<p>{escape(name)} with several at once: {escape(told)}</p>" for name, told in _told_loads(records)),
        "<h2>Chosen masks</h2><p>Upper row attention, lower row MLP, layer 0 on the left; filled is skipped.</p>",
        *(_mask_picture(record, model.num_layers) for record in records.values()),
        "<h2>Frontiers</h2><p>Draft cost (left is cheaper) against token agreement (up is better).</p>",
        *(_frontier_picture(record) for record in records.values()),
        "<h2>Search</h2><p>The best speed-up predicted so far (up) against seconds (right), where it was kept.</p>",
        *(_progress_picture(record) for record in records.values()),
        "<h2>Latency</h2>",
        _latency_table(latency),
    ]
    return f"{_HEAD}<body>{''.join(parts)}</body></html>\n"


def _told_loads(records: dict[str, DomainConfig]) -> list[tuple[str, str]]:
    return [(name, told) for name, record in records.items() if (told := load_text(record))]


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
        _times(summary["potential"]),
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


def _mask_picture(record: DomainConfig, num_layers: int) -> str:
    if record.choice is None:
        return ""
    mask = record.frontier[record.choice.entry].skip_mask(num_layers)
    cell, colours = min(16, 960 // num_layers), ("#d1495b", "#2e6f9e")
    squares = [
        f'<rect x="{i // 2 * cell}" y="{i % 2 * (cell + 2)}" width="{cell - 1}" height="{cell}" '
        f'fill="{colours[i % 2] if skipped else "#e6eaf0"}"/>'
        for i, skipped in enumerate(mask.bits)
    ]
    size = f'width="{num_layers * cell}" height="{2 * cell + 2}"'
    return f"<div>{escape(record.name)}: {escape(_mask_text(mask))}<svg {size}>{''.join(squares)}</svg></div>"


def _frontier_picture(record: DomainConfig) -> str:
    width, height, chosen = 360, 200, record.choice.entry if record.choice else -1
    low = min((entry.token_agreement for entry in record.frontier), default=0.0)
    span = max(1.0 - low, 1e-6)
    dots = [
        f'<circle cx="{20 + entry.draft_cost * (width - 40):.1f}" '
        f'cy="{20 + (1 - entry.token_agreement) / span * (height - 40):.1f}" r="{6 if i == chosen else 3.5}" '
        f'fill="{"#d1495b" if i == chosen else "#2e6f9e"}"><title>{escape(entry.origin)}: agreement '
        f"{entry.token_agreement:.3f}, cost {entry.draft_cost:.3f}</title></circle>"
        for i, entry in enumerate(record.frontier)
    ]
    return _framed(record.name, width, height, "".join(dots))


def _progress_picture(record: DomainConfig) -> str:
    progress, whole = record.search.progress, max(record.search.seconds, 1e-6)
    if not progress:
        return ""
    width, height, best = 360, 120, progress[-1][1]
    low = min(1.0, progress[0][1])
    span = max(best - low, 1e-6)
    # A staircase: what is known holds until something better is found, the last of it until the search ends.
    ends = [seconds for seconds, _ in progress[1:]] + [whole]
    corners = [
        f"{20 + second / whole * (width - 40):.1f},{20 + (best - speedup) / span * (height - 40):.1f}"
        for (began, speedup), end in zip(progress, ends, strict=True)
        for second in (began, end)
    ]
    line = f'<polyline points="{" ".join(corners)}" fill="none" stroke="#2e6f9e" stroke-width="2"/>'
    told = (
        f"{_times(progress[0][1])} in {progress[0][0]:.0f} s, {_times(best)} in {progress[-1][0]:.0f} of {whole:.0f} s"
    )
    return _framed(f"{record.name}: {told}", width, height, line)


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
