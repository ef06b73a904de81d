"""The page docs/papers.md: the scoreboard, then a section for each outcome."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path

from bench.harness.comparison import FULL
from bench.harness.outcomes import Outcome
from bench.papers.claims import CLAIMS
from bench.papers.parts import COMPARISONS, MEASUREMENTS
from bench.papers.scoreboard import scoreboard

PAGE = Path("docs/papers.md")
HEAD = """# The five papers, claim by claim

Written by `python -m bench.papers` from [bench/papers/outcomes](../bench/papers/outcomes); what follows from it stands
in [lab-notes.md](lab-notes.md#the-five-papers).
"""
TABLES = """## How to read the tables

One engine, one process a table, everything in turn; speed is decoding only, ÷ plain decoding of the same engine;
intervals are 95% over prompts by Student's t, for three prompts or more. *Priced*: every forward costs what the
device's latency table says, searches included, so there is no timing noise. Slowest prompt, below 1: the smallest ratio
of a prompt, and the share of prompts that became slower. M: tokens a verification of drafts. α: accepted ÷ drafted.
c, v: draft step and verification ÷ a plain step, measured. E(Spd) takes v as 1; the next column takes v as measured.
Skipped: attention and MLP blocks on average. Identical: outputs that are plain decoding's. *Stale*: the packages have
changed since.
"""


def page(outcomes: Mapping[str, list[Outcome]], packages: str) -> str:
    """Render the page in Markdown from all outcomes; those of other code than `packages` are marked as stale."""
    sections = [HEAD, scoreboard(CLAIMS, outcomes, packages), TABLES]
    for part in (*COMPARISONS, *MEASUREMENTS):
        found = [each for name in (part.name, part.name + FULL) for each in outcomes.get(name, [])]
        for outcome in found:
            sections.append(f"## {part.title}\n\n{outcome.origin}{_provenance(outcome, packages)}\n")
            sections.append(part.section(outcome))
        if found:
            sections += [shown for picture in part.pictures if (shown := picture.markdown(PAGE))]
    return "\n".join(section for section in sections if section)


def _provenance(outcome: Outcome, packages: str) -> str:
    """Sentences about the code and the machine's other guests."""
    said = [f"Commit {outcome.commit}, {outcome.date}." if outcome.commit else outcome.date + "."]
    if outcome.disturbance:
        said.append(outcome.disturbance)
    if outcome.is_stale(packages):
        said.append("*Stale.*")
    return " " + " ".join(said)
