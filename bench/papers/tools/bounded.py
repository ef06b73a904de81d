"""SpecBound's eq. 5 beside priced speed: what its formula promises for the token agreement that was seen.

`python -m bench.papers.tools.bounded build/papers/late` reads what `bench.priced` wrote. The token agreement of early
exits is that for which a draft of the mean length has as many tokens accepted as were (KnapSpec eq. 1). Depth and width
are those of the contender's name.
"""

from __future__ import annotations

import argparse
from collections.abc import Sequence
from pathlib import Path

from bench.compare import PLAIN
from bench.harness.ledger import NAME, Row, read_rows
from bench.harness.standings import against
from ssd_profiles.formulas import bounded_speedup, expected_tokens
from ssd_runtime.commands.command import run_guarded
from ssd_runtime.planning.registry import read_settings
from ssd_runtime.planning.settings import ExitSettings

HEADER = "depth  width  agreement    eq. 5   priced   contender"


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("folder", type=Path)
    parser.add_argument("--layers", type=int, required=True, help="the model's layers")
    arguments = parser.parse_args()
    rows = read_rows(arguments.folder / NAME)
    print(HEADER)
    for name in dict.fromkeys(row.contender for row in rows):
        if line := formula_beside_price(rows, name, arguments.layers):
            print(line)


def formula_beside_price(rows: Sequence[Row], name: str, layers: int) -> str | None:
    """One line for a contender with depth and width in its name; None for others, and where nothing was drafted."""
    strategy, *assignments = name.split("+")
    settings = read_settings(strategy, assignments)
    if not isinstance(settings, ExitSettings) or settings.depth < 0 or settings.width < 0:
        return None
    found = against(rows, PLAIN, name)
    drafts, drafted, accepted = (
        sum(row.cycles[key] for row in rows if row.contender == name) for key in ("drafts", "drafted", "accepted")
    )
    if found is None or not drafts:
        return None
    agreement = token_agreement(drafted / drafts, accepted / drafts)
    promised = bounded_speedup(agreement, settings.width, round(settings.depth * layers), layers)
    figures = f"{agreement:9.2f}  {promised:7.2f}  {found['speedup']:7.2f}"
    return f"{settings.depth:5.2f}  {settings.width:5}  {figures}   {name}"


def token_agreement(length: float, accepted: float) -> float:
    """The agreement of each token for which a draft of `length` tokens has `accepted` of them accepted on average."""
    low, high = 0.0, 1.0
    for _ in range(50):
        middle = (low + high) / 2
        # The formula holds for lengths between whole numbers too.
        low, high = (middle, high) if expected_tokens(middle, length) - 1.0 < accepted else (low, middle)  # type: ignore[arg-type]
    return (low + high) / 2


if __name__ == "__main__":
    run_guarded(main)
