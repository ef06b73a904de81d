"""The page docs/papers.md: each paper's claims in a table, then where the figures come from."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path

from bench.harness.outcomes import Outcome
from bench.papers.claims import CLAIMS
from bench.papers.claims.conditions import REAL, SMALL
from bench.papers.parts import LATE, PARTS
from bench.papers.picture import PICTURE
from bench.papers.scoreboard import Claim, Look, NotMeasuredError, measured_once, verdict

PAGE = Path("docs/papers.md")
LINKS = {
    paper: f"[{paper}](https://arxiv.org/abs/{number})"
    for paper, number in {
        "KNN-SSD": "2505.16162",
        "SWIFT": "2410.06916",
        "CLaSp": "2505.24196",
        "KnapSpec": "2602.20217",
        "SpecBound": "2604.12247",
    }.items()
}
LAST = "ed03226"
"""The last commit with the tools and fixtures that have left the tree."""
HEAD = """# The five papers, claim by claim

Written by `python -m bench.papers` from [bench/papers](../bench/papers); what follows from it stands in the
[lab notes](lab-notes.md#the-five-papers). `--only NAMES` measures the named comparisons first, `--only all` all of
them. The papers' figures are from GPUs and models of 1B to 405B parameters; ours from Qwen2.5-Coder-1.5B-Instruct and
SmolLM2-135M-Instruct on a processor with two cores, and from models into which skippable layers were planted.

{otherwise}

![Speed of drafts by skipped layers, ÷ plain decoding, by model size]({picture})

## Scoreboard

*Reproduced*: all conditions of a row (`bench/papers/claims`) hold in what was measured, *partly*: some, *not*: none.
Figures without a unit are decoding speed ÷ plain decoding's, without the prefill. *Priced*: every forward, searches
included, costs what a latency table says that was measured once, so there is no timing noise; the
[last table](#where-the-figures-come-from) names its machine. *M*: new tokens ÷ cycles that drafted; *α*: accepted ÷
drafted tokens; *TPT*: expected tokens per second of a mask and a draft length.

*1.5B* is packed Qwen2.5-Coder-1.5B-Instruct (Q4_K_M), *135M* is SmolLM2-135M-Instruct in fp32. Where all strategies
are compared, the former is priced and the latter timed: **they differ in more than size**. *Planted* is the latter
model with 30 inserted layers that do next to nothing, *late-weak* has these at its end, and *diffuse* has sub-layers
that are weak by degrees. *KNN*, *Fix* and *Mix* are the masks of the nearest domain, of one domain, and of all domains
together; *r* is the mix ratio of a stream's domains.
`swift+tree=0` is a strategy with a parameter that is not its default.
"""
SOURCES = f"""## Where the figures come from

Prompts are Spec-Bench's, in turn from each of its categories, unless a title says otherwise. *Machine*: the one whose
clock or whose latency table the times come from. *Stale*: the code has changed since. *Once*: the tool or the model's
fixture is not in the tree; commit {LAST} is the last that has those that were. The commit of swift-stream is not in
this repository; its first 32 prompts were decoded again on 2026-11-25, and every price was the same.

| name | what | prompts × tokens | machine | measured |
|---|---|---|---|---|
"""


def page(outcomes: Mapping[str, list[Outcome]], packages: str) -> str:
    """Render the page in Markdown from all outcomes; those of other code than `packages` are marked as stale."""
    look = Look(outcomes)
    papers = dict.fromkeys(claim.paper for claim in CLAIMS)
    tables = [
        f"### {LINKS.get(paper, paper)}\n\n" + table([each for each in CLAIMS if each.paper == paper], look)
        for paper in papers
    ]
    titles = {part.name: part.title + ", priced" * part.is_priced for part in PARTS}
    titles |= {name: f"{title}, priced; once" for name, title in LATE.items()}
    lines = [_compared(name, title, outcomes[name][0], packages) for name, title in titles.items() if name in outcomes]
    lines += [
        f"| {name} | {once['title']} (`{once['tool'].rpartition('.')[2]}`); once | – | {once['processor']} "
        f"| {once['commit']}, {once['date']} |\n"
        for name, once in measured_once().items()
    ]
    head = HEAD.replace("{otherwise}", otherwise(look)).replace("{picture}", PICTURE)
    return "\n".join([head, *tables, SOURCES + "".join(lines)])


def otherwise(look: Look) -> str:
    """The sentence of the speeds that differ between 1.5B and 135M."""
    gained = {"KNN-SSD's masks": "knn", "CLaSp": "clasp", "tuned exits": "exit", "guesses alone": "lookup"}
    changes = ", ".join(f"{title} {look(REAL, name):.2f} ({look(SMALL, name):.2f})" for title, name in gained.items())
    return f"**Otherwise at 1.5B than at 135M** (in brackets), ÷ plain decoding: {changes}. SWIFT and DEL lose on both."


def trend(look: Look) -> dict[str, dict[float, float]]:
    """Our own series of the picture, by billions of parameters: masks of two domains on other prompts of these."""
    parts = {0.135: "smollm2-domains", 1.5: "qwen-domains"}
    return {
        "ours, masks": {size: look(part, "knn") for size, part in parts.items()},
        "ours, perfect stopping": {
            0.135: look.number("perfect stopping at 135M"),
            1.5: look.number("perfect stopping at 1.5B"),
        },
    }


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
    return f"| {name} | {title} | {size} | {settings.get('latency', outcome.processor)} | {told} |\n"
