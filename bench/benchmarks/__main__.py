"""Measures the figures of docs/benchmarks.md, and writes that page and the figures that other texts quote.

`python -m bench.benchmarks` takes some twenty minutes on two cores, a part at most four. `--only` selects parts; a part
that was measured with this code and this command is not measured again, and a killed one resumes. `--count 3` takes at
most so many prompts. `--page` measures nothing.
"""

from __future__ import annotations

import argparse
from pathlib import Path
from time import perf_counter

from bench.benchmarks.page import PAGE, QUOTING, page, quoted
from bench.benchmarks.parts import PARTS, SHOWN, Part
from bench.harness.code_digest import packages_digest
from bench.harness.outcomes import outcome_of, read_outcomes
from bench.harness.provenance import processor
from bench.prompts import FILES, provide
from ssd_artifacts.files import write_atomically
from ssd_profiles.errors import UserError
from ssd_runtime.commands.command import run_guarded

OUTCOMES = Path("bench/benchmarks/outcomes")


def main() -> None:
    known = {part.name: part for part in PARTS}
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("--only", default=",".join(known), help=f"of {', '.join(known)}; comma-separated")
    parser.add_argument("--count", type=int, help="prompts per part, at most")
    parser.add_argument("--page", action="store_true", help="write the page from the outcomes that there are")
    arguments = parser.parse_args()
    if unknown := set(names := arguments.only.split(",")) - set(known):
        parser.error(f"--only: no such part: {', '.join(sorted(unknown))}")
    if not arguments.page:
        if wrong := provide(FILES, SHOWN.parent / "prompts"):
            raise UserError("; ".join(wrong))
        for name in names:
            measure(known[name], arguments.count)
            write()
    write()
    print(f"written: {PAGE}")


def measure(part: Part, count: int | None) -> None:
    """Measure a part unless its outcome is that of this code and this command."""
    packages = packages_digest()
    outcome = outcome_of(read_outcomes(OUTCOMES), part.name, processor())
    if outcome is not None and not outcome.is_stale(packages) and part.is_current(outcome, count):
        print(f"{part.name}: measured already")
        return
    if part.missing and not part.makes_itself:
        print(f"{part.name}: left out, because {part.needs} is missing; make it with: {part.make}")
        return
    began = perf_counter()
    # Rows of different code or of another number of prompts must not meet, so each has its own folder.
    folder = SHOWN / f"{packages}-{count or 'all'}"
    part.measure(folder, count, packages).write(OUTCOMES)
    print(f"{part.name}: {perf_counter() - began:.0f} s")


def write() -> None:
    """Write the page, and the quoted figures of other texts."""
    outcomes = read_outcomes(OUTCOMES)
    write_atomically(PAGE, page(outcomes, packages_digest()))
    for path in QUOTING:
        text = path.read_text(encoding="utf-8")
        if (filled := quoted(text, outcomes)) != text:
            write_atomically(path, filled)


if __name__ == "__main__":
    run_guarded(main)
