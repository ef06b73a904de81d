"""Writes docs/papers.md, the claims of the five papers with their verdicts, from the outcomes that are kept.

`python -m bench.papers` measures nothing. `--only planted05,demo` measures these comparisons first, `--only all` every
one of them, which takes many hours. Outcomes are kept in bench/papers/outcomes, by processor. A comparison whose
outcome was measured with the same code, bundle and contenders is not measured again; a killed one resumes.

`--quick` measures those of the real model on a quarter of their prompts, with a bundle of 24 evaluations, in less than
an hour with the compile. It keeps no outcome: build/papers/quick.md is the page with these figures in place of the
kept ones.

Most comparisons require bundles whose masks skip sub-layers and no more; the commands that build them are printed
where they are missing.
"""

from __future__ import annotations

import argparse
import os
from pathlib import Path

from bench.fixtures.prompts.prompt_files import PROMPTS
from bench.harness.code_digest import packages_digest
from bench.harness.outcomes import outcome_of, read_outcomes
from bench.harness.provenance import processor
from bench.papers.page import PAGE, page, trend
from bench.papers.parts import PARTS, quick_parts
from bench.papers.picture import PICTURE, picture
from bench.papers.scoreboard import Look
from bench.prompts import FILES, provide
from ssd_artifacts.files import write_atomically
from ssd_profiles.errors import UserError
from ssd_runtime.commands.command import run_guarded

SHOWN = Path("build/papers")
"""Folder of unfinished comparisons."""


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    known = {part.name: part for part in PARTS}
    some = parser.add_mutually_exclusive_group()
    some.add_argument("--quick", action="store_true", help="measure those at 1.5B in an hour, into a page of its own")
    some.add_argument("--only", help=f"comparisons to measure first: all, or of {', '.join(known)}; comma-separated")
    arguments = parser.parse_args()
    only = arguments.only
    names = list(known) if only == "all" else only.split(",") if only else []
    if unknown := set(names) - set(known):
        parser.error(f"--only: no such comparison: {', '.join(sorted(unknown))}")
    wanted = quick_parts() if arguments.quick else [known[name] for name in names]
    os.chdir(Path(__file__).parents[2])  # the commands of comparisons name paths in the clone
    if missing := dict.fromkeys(part.bundle.missing for part in wanted if part.bundle.missing):
        raise UserError("; ".join(filter(None, missing)))
    if wanted and (wrong := provide(FILES, PROMPTS)):
        raise UserError("; ".join(wrong))
    packages = packages_digest()
    if arguments.quick:
        outcomes = {part.name: [part.measure(SHOWN / "quick" / packages, packages)] for part in wanted}
        write_atomically(SHOWN / "quick.md", page(read_outcomes() | outcomes, packages))
        print(f"written: {SHOWN / 'quick.md'}")
        return
    for part in wanted:
        outcome = outcome_of(read_outcomes(), part.name, processor())
        if outcome is not None and not outcome.is_stale(packages) and part.is_current(outcome):
            print(f"{part.name}: measured already")
            continue
        # Rows of different code must not meet, so each has its own folder.
        part.measure(SHOWN / packages, packages).write()
        write_atomically(PAGE, page(read_outcomes(), packages))
    write_atomically(PAGE, page(read_outcomes(), packages))
    write_atomically(PAGE.parent / PICTURE, picture(trend(Look(read_outcomes()))))
    print(f"written: {PAGE}")


if __name__ == "__main__":
    run_guarded(main)
