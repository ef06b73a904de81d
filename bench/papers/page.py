"""The page docs/papers.md: the scoreboard, then a section for each outcome."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path

from bench.harness.code_digest import changes_section
from bench.harness.comparison import FULL
from bench.harness.outcomes import Outcome
from bench.papers.claims import CLAIMS
from bench.papers.parts import PARTS
from bench.papers.scoreboard import scoreboard

PAGE = Path("docs/papers.md")
HEAD = """# The five papers, claim by claim

Written by `python -m bench.papers` from [bench/papers/outcomes](../bench/papers/outcomes); what follows from it stands
in [lab-notes.md](lab-notes.md#the-five-papers).
"""
WORDS = """## How to read the tables

Each table comes from one engine in one process, which decodes with all strategies in turn. *÷ plain* is decoding speed
without the prefill, divided by that of plain decoding. Brackets are 95% intervals over prompts (Student's t), for three
prompts or more. *Priced*: every forward, searches included, costs what the device's latency table says, so there is no
timing noise.

Columns: *slowest prompt*, the smallest ratio of a prompt; *below 1*, the share of prompts that became slower; *M*, new
tokens ÷ cycles that drafted; *α*, accepted ÷ drafted tokens; *c* and *v*, the time of a draft step and of a
verification in plain steps; *E(Spd)*, the speed-up that follows from M, α and c if v is 1; *with v*, the same with the
measured v; *skipped*, attention + MLP blocks on average; *drafted*, the share of tokens from cycles that drafted;
*planning*, the share of the time that planning takes, searches included; *identical*, outputs equal to plain
decoding's. *TPT*: expected tokens per second of a mask and a draft length.

*Stale* tables, and figures with a star, were measured before the code changed.
"""


def page(outcomes: Mapping[str, list[Outcome]], packages: str) -> str:
    """Render the page in Markdown from all outcomes; those of other code than `packages` are marked as stale."""
    sections = [HEAD, WORDS, scoreboard(CLAIMS, outcomes, packages)]
    measured: list[str | None] = []
    for part in PARTS:
        found = [each for name in (part.name, part.name + FULL) for each in outcomes.get(name, [])]
        for outcome in found:
            sections.append(f"## {part.title}\n\n{outcome.origin}{_provenance(outcome, packages)}\n")
            sections.append(part.section(outcome))
        if found:
            measured += [outcome.packages for outcome in found]
            sections += [shown for picture in part.pictures if (shown := picture.markdown(PAGE))]
    sections.append(changes_section(measured, packages))
    return "\n".join(section for section in sections if section)


def _provenance(outcome: Outcome, packages: str) -> str:
    """Sentences about the code and the machine's other guests."""
    said = [f"Commit {outcome.commit}, {outcome.date}." if outcome.commit else outcome.date + "."]
    if outcome.disturbance:
        said.append(outcome.disturbance)
    if outcome.is_stale(packages):
        said.append("*Stale.*")
    return " " + " ".join(said)
