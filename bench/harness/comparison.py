"""A comparison for the page of `bench.papers`: strategies on one model and stream, and its section."""

from __future__ import annotations

import json
import subprocess
import sys
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from bench.fixtures.bundles import MadeBundle
from bench.fixtures.prompt_files import POOLS, SPEC_BENCH
from bench.fixtures.streams import mixed_stream, read_pool, write_stream
from bench.harness.picture import Picture
from bench.harness.provenance import disturbance
from bench.harness.tables import interval, sameness


@dataclass(frozen=True, slots=True)
class Comparison:
    """Contenders on one stream of prompts."""

    name: str
    title: str
    bundle: MadeBundle
    contenders: Sequence[str]
    ratio: float | None = None
    """Mix ratio of the stream; None for Spec-Bench prompts by category."""
    optional: bool = False
    """Whether the quick mode leaves it out."""
    count: int = 13
    """Prompts in the quick mode; a mixed stream takes half of them from each domain."""
    tokens: int = 48
    """New tokens per prompt in the quick mode."""
    categories: bool = False
    """Whether there are enough prompts for a table by category."""
    pictures: Sequence[Picture] = ()

    def run(self, folder: Path, full: bool) -> None:
        """Decode whatever `folder`/NAME does not hold yet."""
        contenders = ",".join(name.format(first=self.bundle.first) for name in self.contenders)
        options = ["--artifact", self.bundle.path, "--contenders", contenders, "--out", str(folder / self.name)]
        if self.ratio is None:
            options += ["--prompts", str(SPEC_BENCH)]
            options += ["--full"] if full else ["--count", str(self.count)]
            options += ["--max-new-tokens", str(max(self.tokens, 128) if full else self.tokens)]
        else:
            stream = folder / f"stream-{self.ratio:g}.jsonl"
            count = 40 if full else self.count // 2
            pools = {name: read_pool(path)[-count:] for name, path in POOLS.items()}
            write_stream(mixed_stream(pools, self.ratio, seed=1), stream)
            options += ["--prompts", str(stream), "--full", "--max-new-tokens", "64" if full else str(self.tokens)]
        if code := subprocess.run([sys.executable, "-m", "bench.compare", *options], check=False).returncode:
            sys.exit(code)

    def section(self, folder: Path) -> str | None:
        """Its section of the page; None if it has not been run."""
        path = folder / self.name / "summary.json"
        if not path.is_file():
            return None
        summary = json.loads(path.read_text(encoding="utf-8"))
        settings = summary["settings"]
        standings = summary["standings"]
        device = settings["device"]
        commit = summary.get("commit")
        parts = [
            f"## {self.title}\n",
            f"{device['device']}, {device['threads']} threads, torch {device['torch']}, {device['dtype']}; "
            f"{settings['prompts'][1]} prompts of {settings['prompts'][0]}, {settings['max_new_tokens']} new tokens. "
            f"Bundle {settings['bundle'][:8]}: {self.bundle.origin}."
            + (f" Commit {commit}." if commit else "")
            + (f" {said}" if (said := disturbance(summary.get("stolen"))) else "")
            + "\n",
            _table(standings),
        ]
        if self.categories:
            parts.append(_by_category(standings))
        return "\n".join(parts)


def _table(standings: dict[str, Any]) -> str:
    lines = [
        "| strategy | ÷ plain | M | α | c | v | E(Spd) | with v | skipped | drafted | planning | identical |",
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
        cells = [
            f"`{name}`",
            f"**{ratio['speedup']:.2f}**{interval(ratio)}",
            *drafting,
            f"{each.get('share_planning', 0.0):.1%}",
            sameness(each),
        ]
        lines.append("| " + " | ".join(cells) + " |")
    return "\n".join(lines) + "\n"


def _by_category(standings: dict[str, Any]) -> str:
    """Table of speed ÷ plain decoding with one column per category."""
    categories = list(next(iter(standings.values()))["categories"])
    lines = [f"| ÷ plain | {' | '.join(categories)} |", "|---" * (len(categories) + 1) + "|"]
    for name, figures in standings.items():
        ratios = [figures["categories"][category]["against"]["plain"]["speedup"] for category in categories]
        lines.append(f"| `{name}` | {' | '.join(f'{ratio:.2f}' for ratio in ratios)} |")
    return "\n".join(lines) + "\n"
