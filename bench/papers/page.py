"""The page docs/papers.md: each paper's claims in a table, then where the figures come from."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path

from bench.harness.outcomes import Outcome
from bench.papers.claims import CLAIMS
from bench.papers.parts import LATE, PARTS
from bench.papers.scoreboard import Claim, Look, NotMeasuredError, measured_once, verdict

PAGE = Path("docs/papers.md")
LAST = "ed03226"
"""The last commit with the tools and fixtures that have left the tree."""
HEAD = """# The five papers, claim by claim

Written by `python -m bench.papers` from [bench/papers](../bench/papers); what follows from it stands in the
[lab notes](lab-notes.md#the-five-papers). `--only NAMES` measures the named comparisons first, `--only all` all of
them. The papers' figures are from GPUs and models of 1B to 70B parameters; ours from SmolLM2-135M on a processor with
two cores, and from models into which skippable layers were planted.

## Scoreboard

*Reproduced*: all conditions of a row (`bench/papers/claims`) hold in what was measured, *partly*: some, *not*: none.
Figures without a unit are decoding speed ÷ plain decoding's, without the prefill. *Priced*: every forward, searches
included, costs what the device's latency table says, so there is no timing noise. *M*: new tokens ÷ cycles that
drafted; *α*: accepted ÷ drafted tokens; *TPT*: expected tokens per second of a mask and a draft length.

*Real* is SmolLM2-135M-Instruct. *Planted* is the same model with 30 inserted layers that do next to nothing,
*late-weak* has these at its end, and *diffuse* has sub-layers that are weak by degrees. *KNN*, *Fix* and *Mix* are the
masks of the nearest domain, of one domain, and of all domains together; *r* is the mix ratio of a stream's domains.
`swift+tree=0` is a strategy with a parameter that is not its default.
"""
SOURCES = f"""## Where the figures come from

Prompts are Spec-Bench's, two of each category, unless a title says otherwise. *Stale*: the code has changed since.
*Once*: the tool or the model's fixture has left the tree; commit {LAST} is the last that has it.

| name | what | prompts × tokens | machine | measured |
|---|---|---|---|---|
"""


def page(outcomes: Mapping[str, list[Outcome]], packages: str) -> str:
    """Render the page in Markdown from all outcomes; those of other code than `packages` are marked as stale."""
    look = Look(outcomes)
    papers = dict.fromkeys(claim.paper for claim in CLAIMS)
    tables = [f"### {paper}\n\n" + table([each for each in CLAIMS if each.paper == paper], look) for paper in papers]
    titles = {part.name: part.title + ", priced" * part.is_priced for part in PARTS}
    titles |= {name: f"{title}, priced; once" for name, title in LATE.items()}
    lines = [_compared(name, title, outcomes[name][0], packages) for name, title in titles.items() if name in outcomes]
    lines += [
        f"| {name} | {once['title']} (`{once['tool'].rpartition('.')[2]}`); once | – | {once['processor']} "
        f"| {once['commit']}, {once['date']} |\n"
        for name, once in measured_once().items()
    ]
    return "\n".join([HEAD, *tables, SOURCES + "".join(lines)])


def table(claims: Sequence[Claim], look: Look) -> str:
    """The claims of one paper, one per row."""
    lines = ["| what it says | what we have | verdict | reason | from |", "|---|---|---|---|---|"]
    for claim in claims:
        try:
            ours = claim.ours if isinstance(claim.ours, str) else claim.ours(look)
        except NotMeasuredError as error:
            ours = str(error)
        names = ", ".join(claim.part.split(",")) or "–"
        lines.append(f"| {claim.says} | {ours} | {verdict(claim, look)} | {claim.reason} | {names} |")
    return "\n".join(lines) + "\n"


def _compared(name: str, title: str, outcome: Outcome, packages: str) -> str:
    settings = outcome.settings or {}
    size = f"{settings['prompts'][1]} × {settings['max_new_tokens']}"
    told = f"{outcome.commit}, {outcome.date}" + "; stale" * outcome.is_stale(packages)
    return f"| {name} | {title} | {size} | {outcome.processor} | {told} |\n"
