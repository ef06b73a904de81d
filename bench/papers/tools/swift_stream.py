"""SWIFT along a stream of prompts: what its search costs, and what it brings, as the stream goes on (its Figure 6).

`python -m bench.papers.tools.swift_stream build/papers/swift-stream` reads what `bench.priced` wrote. Instance speed is
that of the group's prompts, cumulative speed that of all prompts so far, ÷ plain decoding of the same prompts.
Acceptance stands for the paper's matchness, which is the same share on the tokens of the search.
"""

from __future__ import annotations

import argparse
from collections.abc import Sequence
from pathlib import Path

from bench.compare import PLAIN
from bench.harness.ledger import NAME, Row, read_rows
from bench.harness.standings import against
from ssd_profiles.errors import UserError
from ssd_runtime.commands.command import run_guarded

HEADER = "prompts   accepted of drafted   searches' share of the time   instance speed   cumulative speed"


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("folder", type=Path)
    parser.add_argument("--group", type=int, default=10, help="prompts of a row")
    arguments = parser.parse_args()
    rows = read_rows(arguments.folder / NAME)
    for name in dict.fromkeys(row.contender for row in rows if row.contender != PLAIN):
        print(f"{name}\n{HEADER}")
        print("\n".join(along(rows, name, arguments.group)))


def along(rows: Sequence[Row], name: str, group: int) -> list[str]:
    """One line for each `group` prompts of a contender, in the stream's order."""
    prompts = list(dict.fromkeys(row.prompt for row in rows))
    lines = []
    for begin in range(0, len(prompts), group):
        end = min(begin + group, len(prompts))
        some = [row for row in rows if row.prompt in prompts[begin:end]]
        own = [row for row in some if row.contender == name]
        accepted, drafted, planned = (
            sum(row.cycles[key] for row in own) for key in ("accepted", "drafted", "plan_seconds")
        )
        share = planned / sum(row.seconds for row in own)
        so_far = [row for row in rows if row.prompt in prompts[:end]]
        lines.append(
            f"{begin + 1:3}-{end:3}   {accepted / max(1, drafted):19.2f}   {share:27.1%}   "
            f"{_speed(some, name):14.2f}   {_speed(so_far, name):16.2f}"
        )
    return lines


def _speed(rows: Sequence[Row], name: str) -> float:
    """A contender's speed ÷ plain decoding's over some prompts. Raises UserError where there is none."""
    found = against(rows, PLAIN, name)
    if found is None:
        raise UserError(f"{name}: has no tokens to compare with plain decoding's")
    return found["speedup"]


if __name__ == "__main__":
    run_guarded(main)
