"""Measures the figures of docs/benchmarks.md, and writes that page and the figures that other texts quote.

`python -m bench.benchmarks` measures all parts; the page says for how many minutes. `--only` selects parts; a part that
was measured with this code and this command is not measured again, and a killed one resumes. `--page` measures nothing.

`--count 3` takes at most so many prompts, for a first look. It keeps no outcome: build/benchmarks/quick.md is the page
with these figures in place of the kept ones.
"""

from __future__ import annotations

import argparse
import os
from pathlib import Path
from time import perf_counter

from bench.benchmarks.page import PAGE, QUOTING, page, quoted
from bench.benchmarks.parts import PARTS, SHOWN, Part
from bench.fixtures.prompts.prompt_files import PROMPTS
from bench.harness.code_digest import packages_digest
from bench.harness.outcomes import Outcome, outcome_of, read_outcomes
from bench.harness.provenance import processor
from bench.prompts import FILES, provide
from ssd_artifacts.files import write_atomically
from ssd_profiles.errors import UserError
from ssd_runtime.commands.command import run_guarded

OUTCOMES = Path("bench/benchmarks/outcomes")
QUICK = SHOWN / "quick.md"


def main() -> None:
    known = {part.name: part for part in PARTS}
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("--only", default=",".join(known), help=f"of {', '.join(known)}; comma-separated")
    parser.add_argument("--count", type=int, help=f"prompts per part, at most; keeps nothing and writes {QUICK}")
    parser.add_argument("--page", action="store_true", help="write the page from the outcomes that there are")
    arguments = parser.parse_args()
    if unknown := set(names := arguments.only.split(",")) - set(known):
        parser.error(f"--only: no such part: {', '.join(sorted(unknown))}")
    os.chdir(Path(__file__).parents[2])  # the commands that the page shows name paths in the clone
    failed = [] if arguments.page else measure_all([known[name] for name in names], arguments.count)
    if arguments.page or arguments.count is None:
        write()
        print(f"written: {PAGE}")
    if failed:
        raise UserError("; ".join(failed))


def measure_all(parts: list[Part], count: int | None) -> list[str]:
    """Measure parts and write the page after each. Returns what is wrong with those that failed, one line per part."""
    if wrong := provide(FILES, PROMPTS):
        raise UserError("; ".join(wrong))
    outcomes = read_outcomes(OUTCOMES)
    failed = []
    for part in parts:
        try:
            outcome = measure(part, count)
        except UserError as error:
            failed.append(f"{part.name}: {error}")
            print(failed[-1])
            continue
        if outcome is None:
            continue
        if count is None:
            outcome.write(OUTCOMES)
            write()
        else:
            outcomes[part.name] = [outcome]
            write_atomically(QUICK, page(outcomes, packages_digest()))
            print(f"written: {QUICK}")
    return failed


def measure(part: Part, count: int | None) -> Outcome | None:
    """Measure a part; None if its kept outcome is that of this code and this command, or what it needs is missing."""
    packages = packages_digest()
    kept = outcome_of(read_outcomes(OUTCOMES), part.name, processor())
    if count is None and kept is not None and not kept.is_stale(packages) and part.is_current(kept):
        print(f"{part.name}: measured already")
        return None
    if part.missing and not part.makes_itself:
        print(f"{part.name}: left out, because {', '.join(part.missing)} is missing; make it with:")
        print("\n".join(part.missing.values()))
        return None
    began = perf_counter()
    # Rows of different code or of another number of prompts must not meet, so each has its own folder.
    outcome = part.measure(SHOWN / f"{packages}-{count or 'all'}", count, packages)
    print(f"{part.name}: {perf_counter() - began:.0f} s")
    return outcome


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
