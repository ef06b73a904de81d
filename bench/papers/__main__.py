"""Runs every strategy on every model and stream, and writes docs/papers.md: the five papers side by side.

`python -m bench.papers` is the quick mode, an hour on two cores. It decodes 48 new tokens for 26 prompts of Spec-Bench,
two per category, on one planted model and one mixed stream, and derives what follows from these. `--only` selects
parts; `all` of them take some four hours. `--full` runs all parts with all prompts and 128 tokens, and in streams 40
prompts per domain and 64 tokens; give it another --out.

A killed run resumes. `build/bundle05`, `build/bundle02` and `build/bundle-domains` are required, and the commands that
build them are printed where they are missing.
"""

from __future__ import annotations

import argparse
import sys
from pathlib import Path

from bench.papers.parts import COMPARISONS, MEASUREMENTS
from ssd_runtime.command import run_guarded

PAGE = Path("docs/papers.md")
HEAD = """# The five papers, side by side

Written by `python -m bench.papers`; what follows from it stands in [results.md](results.md#the-five-papers). One
engine, one process a table, everything in turn; speed is decoding only, ÷ plain decoding of the same engine; intervals
are 95% over prompts by Student's t, for three prompts or more. M: tokens a verification of drafts. α: accepted ÷
drafted. c, v: draft step and verification ÷ a plain step, measured. E(Spd) takes v as 1; the next column takes v as
measured. Skipped: attention and MLP blocks on average. Identical: outputs that are plain decoding's.
"""


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    everything = {part.name: part for part in (*COMPARISONS, *MEASUREMENTS)}
    parser.add_argument("--full", action="store_true")
    parser.add_argument("--only", default="", help=f"all, or of {', '.join(everything)}; comma-separated")
    parser.add_argument("--out", type=Path, default=Path("build/papers"))
    arguments = parser.parse_args()
    every = arguments.full or arguments.only == "all"
    usual = [name for name, part in everything.items() if every or not part.optional]
    names = usual if arguments.only in ("", "all") else arguments.only.split(",")
    if unknown := set(names) - set(everything):
        parser.error(f"--only: no such part: {', '.join(sorted(unknown))}")
    wanted = [everything[name] for name in names]
    if missing := dict.fromkeys(part.bundle.missing for part in wanted if part.bundle.missing):
        sys.exit("\n".join(f"error: {each}" for each in missing))
    for part in wanted:
        part.run(arguments.out, arguments.full)
        for picture in part.pictures:
            picture.publish(arguments.out, PAGE)
    PAGE.write_text(page(arguments.out), encoding="utf-8")
    print(f"written: {PAGE}")


def page(folder: Path) -> str:
    """Render the page in Markdown from all results in `folder`."""
    sections = list[str | None]()
    for part in (*COMPARISONS, *MEASUREMENTS):
        if section := part.section(folder):
            sections += [section, *(picture.markdown(folder) for picture in part.pictures)]
    return "\n".join([HEAD, *filter(None, sections)])


if __name__ == "__main__":
    run_guarded(main)
