"""Every strategy on every model and stream: writes docs/papers.md, the page of the five papers side by side.

`python -m bench.papers` is the quick mode (13 prompts, one of each category, 48 tokens; under an hour once the bundles
are there); `--full` takes all prompts and 128 tokens. Killed, it goes on where it was. Needs `build/bundle05`,
`build/bundle02` and `build/bundle-domains`, whose commands it names where they are missing.
"""

from __future__ import annotations

import argparse
import json
import subprocess
import sys
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from bench.prompt_files import POOLS, SPEC_BENCH
from bench.streams import mixed_stream, read_pool, write_stream
from ssd_artifacts.bundle import EXITS
from ssd_runtime.command import run_guarded

PAGE = Path("docs/papers.md")
SPECBOUND = "depth=0.3125+width=8+threshold=0.55+annealing=0.2"
"""Its paper's own figures, in place of what the compiler tuned."""
ALL = (
    "auto",
    "knn",
    "fixed:{first}",
    "fixed:mix",
    "knapsack+warm_start=0",
    "clasp",
    "swift",
    "exit",
    f"exit+{SPECBOUND}",
    "del",
    "lookup",
)
ROUTED = ("auto", "knn", "fixed:{first}", "fixed:mix", "swift")
RATIOS = (0.0, 0.3, 0.7, 1.0)


@dataclass(frozen=True, slots=True)
class Case:
    """One comparison."""

    name: str
    title: str
    artifact: str
    first: str
    """The domain that Self-SD (Fix) is searched on: the first of the stream."""
    contenders: Sequence[str]
    make: str
    """What compiles the bundle."""
    ratio: float | None = None
    """A mixed stream's; None for Spec-Bench prompts by category."""
    optional: bool = False
    """Left out unless asked for by `--only`."""
    count: int = 13
    """Prompts in the quick mode, half of them of either domain in a stream."""
    tokens: int = 48
    """New tokens in the quick mode."""


ABLATIONS = {
    "knn": ("strangers=mix", "strangers=plain"),
    "swift": ("confidence=0", "tree=0", "steps=0", "window=16", "window=64", "steps=100", "bayes_interval=5"),
    "clasp": (
        "skip=0.3",
        "skip=0.4",
        "refresh=4",
        "refresh=16",
        "refresh=128",
        "confidence=0.4",
        "confidence=0.9",
        "sublayers=1",
    ),
    "knapsack": (
        "warm_start=0",
        *(f"warm_start=0+{change}" for change in ("share=1", "similarity=0.9", "refresh=16", "confidence=0")),
    ),
    "exit": (
        SPECBOUND,
        *(f"{SPECBOUND}+{change}" for change in ("annealing=0", "depth=0.9", "width=25", "threshold=0.9")),
    ),
}
"""What each strategy is without a part of it, or with another value of a parameter."""

PLANT = "python -m bench.planted --epsilon {0} --out build/{1} && ssd-compile --model build/{1} --domains cnn,gsm8k"
DOMAINS = "python -m bench.domain_planted --out build/domain-planted && ssd-compile --model build/domain-planted"
CASES = (
    Case(
        *("planted05", "Planted, ε = 0.05", "build/bundle05", "cnn", ALL),
        PLANT.format("0.05", "planted") + " --evaluations 24 --exits 8 --out build/bundle05",
    ),
    Case(
        *("planted02", "Planted, ε = 0.02", "build/bundle02", "cnn", ALL),
        PLANT.format("0.02", "planted02") + " --evaluations 24 --exits 8 --out build/bundle02",
    ),
    Case("demo", "SmolLM2-135M-Instruct", "demo", "cnn", ALL, "it comes with the repository"),
    *(
        Case(
            *(f"domains-{ratio:g}", f"Domain-planted, mix ratio {ratio:g}", "build/bundle-domains", "gsm8k", ROUTED),
            f"{DOMAINS} --domains gsm8k,humaneval --evaluations 24 --out build/bundle-domains",
            ratio,
            count=12,
        )
        for ratio in RATIOS
    ),
    *(
        Case(
            *(f"ablation-{name}", f"{name} with parts changed; planted, ε = 0.05", "build/bundle05", "cnn"),
            (name, *(f"{name}+{change}" for change in changes)),
            PLANT.format("0.05", "planted") + " --evaluations 24 --exits 8 --out build/bundle05",
            optional=True,
            count=6,
            # KnapSpec searches again behind 64 cycles only.
            tokens=256 if name == "knapsack" else 128,
        )
        for name, changes in ABLATIONS.items()
    ),
)


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("--full", action="store_true")
    parser.add_argument("--only", default="", help=f"of {', '.join(case.name for case in CASES)}; comma-separated")
    parser.add_argument("--out", type=Path, default=Path("build/papers"))
    arguments = parser.parse_args()
    known = [case.name for case in CASES]
    names = arguments.only.split(",") if arguments.only else [case.name for case in CASES if not case.optional]
    if unknown := set(names) - set(known):
        parser.error(f"--only: no such case: {', '.join(sorted(unknown))}")
    wanted = [case for case in CASES if case.name in names]
    for case in wanted:
        exits = "--exits" not in case.make or (Path(case.artifact) / EXITS).is_file()
        if case.artifact != "demo" and not (Path(case.artifact).is_dir() and exits):
            sys.exit(f"error: {case.artifact} is missing, or made in another way; make it with: {case.make}")
    for case in wanted:
        _run(case, arguments.out, arguments.full)
    found = {case: _summary(arguments.out / case.name) for case in CASES}
    PAGE.write_text(page({case: summary for case, summary in found.items() if summary}), encoding="utf-8")
    print(f"written: {PAGE}")


def _run(case: Case, out: Path, full: bool) -> None:
    contenders = ",".join(name.format(first=case.first) for name in case.contenders)
    options = ["--artifact", case.artifact, "--contenders", contenders, "--out", str(out / case.name)]
    if case.ratio is None:
        options += [
            "--prompts",
            str(SPEC_BENCH),
            *(["--full"] if full else ["--count", str(case.count), "--max-new-tokens", str(case.tokens)]),
        ]
    else:
        stream = out / f"stream-{case.ratio:g}.jsonl"
        count = 40 if full else case.count // 2
        pools = {name: read_pool(path)[-count:] for name, path in POOLS.items()}
        write_stream(mixed_stream(pools, case.ratio, seed=1), stream)
        options += ["--prompts", str(stream), "--full", "--max-new-tokens", "64" if full else str(case.tokens)]
    if code := subprocess.run([sys.executable, "-m", "bench.compare", *options], check=False).returncode:
        sys.exit(code)


def _summary(folder: Path) -> dict[str, Any] | None:
    path = folder / "summary.json"
    return json.loads(path.read_text(encoding="utf-8")) if path.is_file() else None


def page(found: dict[Case, dict[str, Any]]) -> str:
    """The page, in Markdown."""
    parts = [
        "# The five papers, side by side\n\nWritten by `python -m bench.papers`; what follows from it stands in "
        "[results.md](results.md#the-five-papers). One engine, one process a table, everything in turn; speed is "
        "decoding only, ÷ plain decoding of the same engine; intervals are 95% bootstrap over prompts. M: tokens a "
        "verification of drafts. α: accepted ÷ drafted. c, v: draft step and verification ÷ a plain step, measured. "
        "E(Spd) takes v as 1; the next column takes v as measured. Skipped: attention and MLP blocks on average.\n"
    ]
    for case, summary in found.items():
        settings, standings = summary["settings"], summary["standings"]
        parts.append(
            f"## {case.title}\n\n{settings['device']['device']}, {settings['device']['threads']} threads, "
            f"torch {settings['device']['torch']}, {settings['device']['dtype']}; {settings['prompts'][1]} prompts of "
            f"{settings['prompts'][0]}, {settings['max_new_tokens']} new tokens. Bundle: `{case.make}`.\n"
        )
        parts.append(_table(standings))
    return "\n".join(parts)


def _table(standings: dict[str, Any]) -> str:
    lines = [
        "| strategy | ÷ plain | M | α | c | v | E(Spd) | with v | skipped | drafted | planning | output |",
        "|---|---|---|---|---|---|---|---|---|---|---|---|",
    ]
    for name, figures in standings.items():
        each = figures["overall"]
        ratio = each["against"]["plain"]
        drafting = ["–"] * 8
        if "draft_cost" in each:
            drafting = [
                f"{each['mean_acceptance_length']:.2f}",
                f"{each['draft_acceptance_rate']:.2f}",
                f"{each['draft_cost']:.2f}",
                f"{each['verify_cost']:.2f}",
                f"{each['expected_speedup']:.2f}",
                f"{each['expected_speedup_with_verification']:.2f}",
                f"{each['skipped_attention']:.0f} + {each['skipped_mlp']:.0f}",
                f"{each['share_of_tokens_drafted']:.0%}",
            ]
        same = f"{each['identical']} of {each['prompts']} identical" + (
            f", {each['error']} WRONG" if each["error"] else ""
        )
        cells = [
            *(f"`{name}`", f"**{ratio['speedup']:.2f}** ({ratio['low']:.2f}–{ratio['high']:.2f})", *drafting),
            *(f"{each.get('share_planning', 0.0):.1%}", same),
        ]
        lines.append("| " + " | ".join(cells) + " |")
    return "\n".join(lines) + "\n"


if __name__ == "__main__":
    run_guarded(main)
