"""Measures every strategy on every model and stream, and writes docs/papers.md: the five papers side by side.

`python -m bench.papers` is the quick mode, an hour on two cores. It decodes 48 new tokens for 26 prompts of Spec-Bench,
two per category, on one planted model and one mixed stream, and derives what follows from these. `--only` selects
parts; `all` of them take many hours. `--full` runs all parts with all prompts and 128 tokens, and in streams 40
prompts per domain and 64 tokens.

Every part's outcome is kept in bench/papers/outcomes, by processor, and the page shows all of them. A part whose
outcome was measured with the same code, bundle and arguments is not measured again; a killed part resumes. Parts may
so be measured on several days, one at a time. `--page` measures nothing.

Most parts require bundles whose masks skip sub-layers and no more; the commands that build them are printed where they
are missing.
"""

from __future__ import annotations

import argparse
import sys
from pathlib import Path

from bench.harness.code_digest import packages_digest
from bench.harness.measurement import processor
from bench.harness.outcomes import outcome_of, read_outcomes
from bench.papers.page import PAGE, page
from bench.papers.parts import PARTS
from ssd_artifacts.files import write_atomically
from ssd_runtime.commands.command import run_guarded


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    everything = {part.name: part for part in PARTS}
    parser.add_argument("--full", action="store_true")
    parser.add_argument("--only", default="", help=f"all, or of {', '.join(everything)}; comma-separated")
    parser.add_argument("--page", action="store_true", help="write the page from the outcomes that there are")
    parser.add_argument("--out", type=Path, default=Path("build/papers"), help="folder of unfinished parts")
    arguments = parser.parse_args()
    every = arguments.full or arguments.only == "all"
    usual = [name for name, part in everything.items() if every or not part.optional]
    names = usual if arguments.only in ("", "all") else arguments.only.split(",")
    if unknown := set(names) - set(everything):
        parser.error(f"--only: no such part: {', '.join(sorted(unknown))}")
    wanted = [] if arguments.page else [everything[name] for name in names]
    needed = [part.bundle for part in wanted if not part.without_bundle]
    if missing := dict.fromkeys(bundle.missing for bundle in needed if bundle.missing):
        sys.exit("\n".join(f"error: {each}" for each in missing))
    packages = packages_digest()
    # Rows of different code must not meet, so each has its own folder.
    folder = arguments.out / packages
    for part in wanted:
        known = outcome_of(read_outcomes(), part.outcome_name(arguments.full), processor())
        if known is not None and not known.is_stale(packages) and part.is_current(known):
            print(f"{part.name}: measured already")
            part.restore(known, folder)
        else:
            part.measure(folder, arguments.full, packages).write()
        for picture in part.pictures:
            picture.publish(folder, PAGE)
        write_atomically(PAGE, page(read_outcomes(), packages))
    write_atomically(PAGE, page(read_outcomes(), packages))
    print(f"written: {PAGE}")


if __name__ == "__main__":
    run_guarded(main)
