"""Pictures of a bundle and of a finished stream, drawn from files alone.

`python -m bench.papers.tools.pictures --artifact build/bundle-domains --stream build/papers/domains-0.3 --out
docs/pictures`

They show the domains' masks (KNN-SSD's Figure 9), how often frontiers skip each sub-layer, and speed along a mixed
stream. Features are drawn in two dimensions with the anchors (KNN-SSD's Figure 5).
"""

from __future__ import annotations

import argparse
import importlib.util
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np

from bench.fixtures.bundles import model_title
from bench.harness.drawing.chart import COLOURS, colours, saved
from bench.harness.ledger import NAME, Row, read_rows
from ssd_artifacts.bundle import Bundle
from ssd_artifacts.reference_bundle import bundle_path
from ssd_runtime.commands.command import run_guarded

SMOOTHED = 3
"""Number of prompts over which speed along a stream is averaged."""


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("--artifact", "--bundle", type=Path, required=True)
    parser.add_argument("--stream", type=Path, help="what bench.compare wrote for a stream")
    parser.add_argument("--out", type=Path, default=Path("build/pictures"))
    arguments = parser.parse_args()
    if importlib.util.find_spec("matplotlib") is None:
        print("no pictures: matplotlib is not installed; pip install '.[bench]' in a clone", file=sys.stderr)
        return
    bundle = Bundle.load(bundle_path(arguments.artifact))
    paths = [*masks(bundle, arguments.out), *shares(bundle, arguments.out), *features(bundle, arguments.out)]
    if arguments.stream is not None:
        rows = read_rows(arguments.stream / NAME)
        names = dict.fromkeys(row.contender for row in rows if row.contender != "plain")
        paths += stream(rows, list(names), model_title(bundle.model.name), arguments.out)
    for path in paths:
        print(f"picture: {path}", file=sys.stderr)


def masks(bundle: Bundle, out: Path) -> list[Path]:
    """Draw the sub-layers that each domain's chosen mask skips."""
    chosen = {
        name: record.frontier[record.choice.entry].skip_mask(bundle.model.num_layers)
        for name, record in bundle.domains.items()
        if record.choice is not None
    }
    figure = _figure(9, 0.6 + 0.45 * len(chosen))
    axes = figure.add_subplot()
    for row, mask in enumerate(chosen.values()):
        for part, (name, colour) in enumerate((("attention", COLOURS[0]), ("MLP", COLOURS[1]))):
            skipped = [index // 2 for index in mask if index % 2 == part]
            axes.broken_barh(
                [(layer - 0.45, 0.9) for layer in skipped],
                (row - 0.4 + 0.4 * part, 0.36),
                color=colour,
                label=name if not row else None,
            )
    axes.set_yticks(range(len(chosen)), list(chosen))
    axes.set_ylim(len(chosen) - 0.5, -0.5)
    axes.set_xlim(-1, bundle.model.num_layers)
    axes.set_xlabel("layer; what is coloured is skipped while drafting")
    axes.spines[["top", "right", "left"]].set_visible(False)
    return _save(figure, axes, model_title(bundle.model.name), out / "masks")


def shares(bundle: Bundle, out: Path) -> list[Path]:
    """Draw the share of all frontier masks that skip each sub-layer."""
    layers = bundle.model.num_layers
    skipped = [set(entry.skip_mask(layers)) for record in bundle.domains.values() for entry in record.frontier]
    figure = _figure(9, 3)
    axes = figure.add_subplot()
    for part, (name, colour) in enumerate((("attention", COLOURS[0]), ("MLP", COLOURS[1]))):
        share = [np.mean([2 * layer + part in mask for mask in skipped]) for layer in range(layers)]
        axes.bar(np.arange(layers) + 0.4 * part - 0.2, share, 0.38, color=colour, label=name)
    axes.set_xlabel(f"layer; {len(skipped)} masks")
    axes.set_ylabel("skipped in this share of them")
    axes.spines[["top", "right"]].set_visible(False)
    return _save(figure, axes, model_title(bundle.model.name), out / "shares")


def features(bundle: Bundle, out: Path) -> list[Path]:
    """Draw anchors and other prompts along the two principal directions."""
    anchors = bundle.anchors
    every = np.concatenate([anchors.features, anchors.others.astype(np.float32)]) - anchors.center
    directions = every / np.linalg.norm(every, axis=1, keepdims=True).clip(1e-12)
    centred = directions - directions.mean(0)
    flat = centred @ np.linalg.svd(centred, full_matrices=False)[2][:2].T
    labels = np.concatenate([anchors.labels, anchors.other_labels])
    is_anchor = np.arange(len(labels)) < len(anchors.labels)
    figure = _figure(6.5, 5)
    axes = figure.add_subplot()
    for number, name in enumerate(anchors.domains):
        colour = COLOURS[number % len(COLOURS)]
        for some, marker, size in ((is_anchor, "o", 26), (~is_anchor, "x", 16)):
            picked = flat[(labels == number) & some]
            label = name if marker == "o" else None
            axes.scatter(picked[:, 0], picked[:, 1], marker=marker, s=size, color=colour, linewidths=1, label=label)
    axes.set_xlabel("features of prompts, first two principal directions; dots are anchors")
    axes.spines[["top", "right"]].set_visible(False)
    return _save(figure, axes, model_title(bundle.model.name), out / "features")


def stream(rows: Sequence[Row], names: Sequence[str], title: str, out: Path) -> list[Path]:
    """Draw speed ÷ plain decoding along the stream as a moving average, with the domains as bands."""
    order = list(dict.fromkeys(row.prompt for row in rows))
    speeds = {(row.prompt, row.contender): row.counted / row.seconds for row in rows if row.seconds}
    domains = {row.prompt: row.category for row in rows}
    kinds = list(dict.fromkeys(domains.values()))
    figure = _figure(9, 4)
    axes = figure.add_subplot()
    for place, prompt in enumerate(order):
        shade = 0.04 + 0.2 * kinds.index(domains[prompt]) / len(kinds)
        axes.axvspan(place - 0.5, place + 0.5, color="#57606a", alpha=shade, linewidth=0)
    for name, colour in zip(names, colours(names), strict=True):
        ratio = [speeds.get((p, name), np.nan) / speeds.get((p, "plain"), np.nan) for p in order]
        smooth = [np.nanmean(ratio[max(0, i - SMOOTHED + 1) : i + 1]) for i in range(len(ratio))]
        axes.plot(smooth, color=colour, linewidth=1.4, label=name)
    axes.axhline(1.0, color="#57606a", linewidth=1)
    axes.set_xlabel(f"prompt of the stream; bands are its domains: {', '.join(kinds)}")
    axes.set_ylabel("÷ plain decoding")
    axes.spines[["top", "right"]].set_visible(False)
    return _save(figure, axes, title, out / "stream")


def _save(figure: Any, axes: Any, title: str, path: Path) -> list[Path]:
    """Save a figure with its title and legend."""
    axes.set_title(title, loc="left", fontsize=10)
    figure.legend(loc="outside right upper", frameon=False, fontsize=8)
    return saved(figure, path)


def _figure(width: float, height: float) -> Any:
    from matplotlib.figure import Figure

    return Figure(figsize=(width, height), layout="constrained")


if __name__ == "__main__":
    run_guarded(main)
