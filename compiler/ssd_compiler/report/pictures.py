"""The pictures of a bundle's report, each from its checked contents."""

from __future__ import annotations

from html import escape

import numpy as np

from ssd_artifacts.anchors import AnchorSet
from ssd_artifacts.domain_config import DomainConfig
from ssd_compiler.report.charts import COLOURS, Chart, colour, legend, powers, ticks
from ssd_compiler.report.summary import origins, self_sd_text, speedup_text
from ssd_profiles.latency import LatencyTable

OTHER = COLOURS[5]
ORIGINS = {"light": COLOURS[6]} | dict(
    zip(("knapsack", "uniform", "random", "bayesian", "self-sd"), COLOURS, strict=False)
)
"""Colours of the searches that masks come from; `OTHER` for any other."""
ROWS = (1, 4, 16)
"""Numbers of rows whose steps are drawn against the context."""
MAX_DRAWN = 600
"""Most anchors, and most steps of one search, that are drawn."""
MIXER, MLP, HEAD = COLOURS[1], COLOURS[0], COLOURS[2]
OPACITY = {4: 0.5, 8: 0.25}
"""Opacity of the cells of light sub-layers, by width."""


def masks(domains: dict[str, DomainConfig], num_layers: int) -> str:
    """The chosen masks of all domains, one below the other: a column per layer, the mixer above the MLP.

    Sub-layers on light copies are paler than skipped ones, and the head's cell follows the last layer's.
    """
    chosen = [(config.name, config.frontier[config.choice.entry]) for config in domains.values() if config.choice]
    if not chosen:
        return "<p>No domain has a mask.</p>"
    cell = max(3, min(18, 720 // num_layers))
    left = 110
    parts = [
        f'<text x="{left + layer * cell + cell / 2:.0f}" y="12" text-anchor="middle">{layer}</text>'
        for layer in range(0, num_layers, max(1, -(-40 // cell)))
    ]
    top = 20
    for name, entry in chosen:
        mask = entry.sub_layer_plan(num_layers)
        parts.append(f'<text x="{left - 8}" y="{top + 17}" text-anchor="end">{escape(name[:16])}</text>')
        for index, skipped in enumerate(mask.skipped):
            fill = _fill((MIXER, MLP)[index % 2], skipped, mask.bits_of(index))
            x, y = left + index // 2 * cell, top + index % 2 * 12
            parts.append(f'<rect x="{x}" y="{y}" width="{cell - 1}" height="11" {fill}/>')
        if mask.light:
            fill = _fill(HEAD, False, mask.head_bits)
            parts.append(f'<rect x="{left + num_layers * cell + 6}" y="{top}" width="{cell - 1}" height="23" {fill}/>')
        top += 32
    width = left + (num_layers + 1) * cell + 16
    svg = f'<svg viewBox="0 0 {width} {top}" width="{width}" height="{top}" role="img" aria-label="Masks by domain">'
    names = [("mixer skipped", MIXER), ("MLP skipped", MLP)]
    if any(entry.sub_layer_plan(num_layers).light for _, entry in chosen):
        names += [("head", HEAD), ("darker: in 4 bits; pale: in 8 bits; grey: in full", "none")]
    return f"{legend(names)}<figure>{svg}{''.join(parts)}</svg></figure>"


def _fill(colour_of_part: str, skipped: bool, bits: int) -> str:
    """Attributes of a sub-layer's cell."""
    if not skipped and not bits:
        return 'class="kept"'
    return f'fill="{colour_of_part}" fill-opacity="{1 if skipped else OPACITY[bits]:g}"'


def frontier(config: DomainConfig) -> str:
    """A domain's masks: draft cost across, token agreement upward, coloured by the search that found them."""
    if not config.frontier:
        return ""
    agreements = [entry.token_agreement for entry in config.frontier]
    low = min(0.9, *agreements)
    most = max(1.0, *(min(entry.draft_cost, 10.0) for entry in config.frontier))
    chart = Chart(
        title=config.name,
        x=(0.0, most),
        y=(low, 1.0),
        x_label="draft cost, in plain steps",
        y_label="token agreement",
        x_ticks=ticks(0.0, most),
        y_ticks=ticks(low, 1.0, 4),
    )
    for index, entry in enumerate(config.frontier):
        chosen = config.choice is not None and index == config.choice.entry
        told = f"{entry.origin}: agreement {entry.token_agreement:.3f}, cost {entry.draft_cost:.3f}"
        chart.dot(
            (entry.draft_cost, entry.token_agreement),
            origin_colour(entry.origin),
            f"{told}{', chosen' if chosen else ''}",
            7.0 if chosen else 4.0,
        )
    return chart.render()


def origin_colour(origin: str) -> str:
    """The colour of the search that found a mask."""
    return ORIGINS.get(origin, OTHER)


def search(config: DomainConfig) -> str:
    """The best predicted speed-up so far against seconds, and every mask that was rated, coloured by its search."""
    progress = config.search.progress[:MAX_DRAWN]
    if not progress:
        return ""
    whole = max(config.search.seconds, progress[-1][0], 1e-6)
    low = min(1.0, progress[0][1])
    high = max(1.0, progress[-1][1]) + 1e-9
    chart = Chart(
        title=f"{config.name}: {progress[0][1]:.2f}x in {progress[0][0]:.0f} s, "
        f"{progress[-1][1]:.2f}x in {progress[-1][0]:.0f} of {whole:.0f} s",
        x=(0.0, whole),
        y=(low, high),
        x_label="seconds of search",
        y_label="best predicted speed-up",
        height=200,
        x_ticks=ticks(0.0, whole),
        y_ticks=ticks(low, high, 4),
    )
    # Each value holds until the next improvement, the last one until the end.
    ends = [seconds for seconds, _ in progress[1:]] + [whole]
    steps = [(second, speedup) for (began, speedup), end in zip(progress, ends, strict=True) for second in (began, end)]
    chart.line(steps, COLOURS[5])
    origin_of = {speedup: origin for _, origin, speedup in config.search.rated}
    for seconds, speedup in progress:
        if (origin := origin_of.get(speedup)) is not None:
            chart.dot((seconds, speedup), origin_colour(origin), f"{origin}: {speedup:.2f}x in {seconds:.1f} s")
    return f"<div>{chart.render()}{_rated(config)}{_best_by_origin(config)}</div>"


def _rated(config: DomainConfig) -> str:
    """The predicted speed-up of every mask in the order in which they were rated."""
    rated = config.search.rated[:MAX_DRAWN]
    if not rated:
        return ""
    speedups = [speedup for _, _, speedup in rated]
    low, high = min(1.0, *speedups), max(1.0, *speedups) + 1e-9
    chart = Chart(
        title="Every mask that was rated",
        x=(0.0, len(rated) + 1.0),
        y=(low, high),
        x_label="masks in order",
        y_label="predicted speed-up",
        height=200,
        x_ticks=ticks(0.0, float(len(rated))),
        y_ticks=ticks(low, high, 4),
    )
    chart.line([(0.0, 1.0), (len(rated) + 1.0, 1.0)], COLOURS[5], "plain decoding", dashed=True)
    for number, (mask, origin, speedup) in enumerate(rated, 1):
        chart.dot((number, speedup), origin_colour(origin), f"{number}, {origin}: {speedup:.2f}x, mask {mask}", 3.0)
    return chart.render()


def _best_by_origin(config: DomainConfig) -> str:
    """Lines on what each search has found, and on what the papers' own would take."""
    told = ", ".join(
        f"{origin} {each['best']:.2f}x ({each['evaluations']:.0f} masks)" for origin, each in origins(config).items()
    )
    lines = ([f"best by origin: {told}"] if told else []) + [line for line in [self_sd_text(config)] if line]
    return "".join(f"<p>{escape(line)}</p>" for line in lines)


def validation(domains: dict[str, DomainConfig]) -> str:
    """Measured speed-ups with their intervals, a row per domain and load."""
    rows = [
        (name if load is None else f"{name}, {load.concurrency} at once", load or config.validation)
        for name, config in domains.items()
        if config.validation is not None
        for load in (None, *config.validation.under_load)
    ]
    if not rows:
        return "<p>Nothing was timed.</p>"
    ends = [bound for _, timed in rows if timed is not None for bound in timed.speedup_interval]
    low, high = max(0.0, min(0.8, *ends)), min(10.0, max(1.2, *ends))
    height = 70 + 24 * len(rows)
    chart = Chart(
        title="Speed-up against plain decoding, with 95% intervals",
        x=(low, high),
        y=(0.0, len(rows) + 0.5),
        x_label="speed-up",
        width=760,
        height=height,
        x_ticks=ticks(low, high, 6),
        y_ticks=range(len(rows), 0, -1),
        y_names=[name for name, _ in rows],
        left=150,
    )
    chart.line([(1.0, 0.0), (1.0, len(rows) + 0.5)], COLOURS[5], "plain decoding", dashed=True)
    for place, (name, timed) in enumerate(rows):
        if timed is None:
            continue
        y = len(rows) - place
        begin, end = timed.speedup_interval
        fill = COLOURS[2] if begin > 1.0 else COLOURS[5]
        told = f"{name}: {speedup_text(timed)}"
        chart.line([(begin, y), (end, y)], fill, told)
        chart.dot((timed.speedup, y), fill, told, 5.0)
    return chart.render()


def latency(table: LatencyTable) -> str:
    """Milliseconds of a whole step against the context, and against its rows."""
    contexts = [float(context) for context in table.contexts]
    rows = [n for n in ROWS if n <= table.most_queries]
    by_context = {n: [(max(c, 1.0), table.step_seconds(c, n) * 1e3) for c in contexts] for n in rows}
    base = contexts[table.base]
    grid = [float(n) for n in (*table.queries, *table.wide_queries)]
    by_rows = [(n, table.step_seconds(base, n) * 1e3) for n in grid]
    return _milliseconds(
        "A step against the context it sees",
        "tokens of context",
        [(f"{n} rows" if n > 1 else "1 row", by_context[n]) for n in rows],
    ) + _milliseconds(f"A step against its rows, {base:.0f} tokens of context", "rows", [("", by_rows)])


def _milliseconds(title: str, across: str, series: list[tuple[str, list[tuple[float, float]]]]) -> str:
    values = [y for _, points in series for _, y in points]
    places = [x for _, points in series for x, _ in points]
    low, high = min(places), max(max(places), min(places) * 1.01)
    most = max(values) * 1.05
    chart = Chart(
        title=title,
        x=(low, high),
        y=(0.0, most),
        x_label=across,
        y_label="milliseconds",
        log_x=True,
        x_ticks=powers(low, high, 4.0) or [low],
        y_ticks=ticks(0.0, most, 5),
    )
    for index, (name, points) in enumerate(series):
        chart.line(points, colour(index), name)
        for x, y in points:
            chart.dot((x, y), colour(index), f"{name} {x:g}: {y:.2f} ms".strip(), 2.5)
    names = [(name, colour(index)) for index, (name, _) in enumerate(series) if name]
    return f"<div>{chart.render()}{legend(names) if names else ''}</div>"


def anchors(known: AnchorSet) -> str:
    """Anchors in the two directions in which they differ most, after centring, coloured by domain."""
    rows = known.directions(known.features[:MAX_DRAWN]).astype(np.float64)
    centred = rows - rows.mean(0)
    # Principal components by the rows' inner products: there are fewer rows than dimensions.
    values, vectors = np.linalg.eigh(centred @ centred.T)
    places = (vectors * np.sqrt(np.maximum(values, 0.0)))[:, ::-1][:, :2]
    if places.shape[1] < 2:
        places = np.column_stack([places, np.zeros(len(places))])
    reach = float(np.abs(places).max(initial=1e-6)) * 1.1
    chart = Chart(
        title="Anchors in two dimensions",
        x=(-reach, reach),
        y=(-reach, reach),
        width=560,
        height=420,
    )
    for place, label in zip(places, known.labels, strict=False):
        chart.dot((float(place[0]), float(place[1])), colour(int(label)), known.domains[int(label)], 5.0)
    return chart.render() + legend([(name, colour(index)) for index, name in enumerate(known.domains)])
