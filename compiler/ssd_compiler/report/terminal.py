"""The figures of a compile on the terminal: a table that fits 80 columns, the masks, and what to do next."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from rich.console import Console
from rich.table import Table

from ssd_artifacts.bundle import Bundle
from ssd_compiler.report.added import added_by
from ssd_compiler.report.summary import domain_summary, load_text, self_sd_text, skips_layers

COLUMNS = ("domain", "skipped", "α", "predicted", "measured (95%)", "verdict")


def show(bundle: Bundle, out: Path) -> None:
    """Print what a compile has found for each domain."""
    layers = bundle.model.num_layers
    summaries = [domain_summary(config, layers) for config in bundle.domains.values()]
    table = Table(title=f"{bundle.model.name}: speed against plain decoding on this device")
    for column in COLUMNS:
        table.add_column(column, justify="left" if column in ("domain", "verdict") else "right", no_wrap=True)
    for summary in summaries:
        table.add_row(*_row(summary, 2 * layers))
    console = Console(highlight=False, markup=False)
    console = console if console.is_terminal else Console(highlight=False, markup=False, width=100)
    console.print(table)
    for config in bundle.domains.values():
        if config.choice is not None:
            mask = config.frontier[config.choice.entry].sub_layer_plan(layers)
            console.print(f"{config.name} skips {mask}", soft_wrap=True)
        if told := load_text(config):
            console.print(f"{config.name} with several at once: {told}", soft_wrap=True)
        if told := self_sd_text(config):
            console.print(f"{config.name}: {told}", soft_wrap=True)
    for name, added in added_by(bundle).items():
        console.print(f"{name}: {added.text}", soft_wrap=True)
    paying = [summary for summary in summaries if summary["verdict"] == "speculate"]
    if paying and not any(map(skips_layers, paying)):
        console.print(
            "no layer is skipped: what pays here are light weights, on which `auto` drafts without a bundle too",
            soft_wrap=True,
        )
    console.print(f"bundle: {out} · report: {out / 'report.html'}", soft_wrap=True)


def _row(summary: dict[str, Any], sublayers: int) -> tuple[str, ...]:
    measured = summary["measured_speedup"]
    low, high = summary["measured_interval"] or (0.0, 0.0)
    lighter = (f"{count} in {bits} bits" for bits, count in summary["lighter"].items())
    skipped = f"{summary['mixers_skipped']}+{summary['mlps_skipped']} of {sublayers}"
    return (
        summary["domain"],
        "\n".join((skipped, *lighter)),
        f"{summary['draft_acceptance_rate']:.2f}" if measured else "–",
        f"{summary['predicted_speedup']:.2f}x" if summary["predicted_speedup"] else "–",
        f"{measured:.2f}x ({low:.2f}–{high:.2f})" if measured else "–",
        summary["verdict"],
    )
