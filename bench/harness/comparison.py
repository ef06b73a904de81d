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
from bench.fixtures.prompts.long_prompts import long_prompts
from bench.fixtures.prompts.prompt_files import POOLS, SPEC_BENCH, read_pool
from bench.fixtures.prompts.streams import mixed_stream, write_stream
from bench.harness.drawing.picture import Picture
from bench.harness.drawing.tables import interval, sameness, with_interval
from bench.harness.ledger import NAME, read_rows, write_rows
from bench.harness.outcomes import Outcome
from bench.harness.pricing.latencies import QUIET
from ssd_profiles.prompts import Prompt

FULL = "-full"
"""End of the name of a part's outcome in the full mode."""


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
    priced: bool = False
    """Whether time is priced by the latency table `QUIET` (`bench.priced`) in place of the clock."""
    temperature: float = 0.0
    """Temperature at which a priced comparison samples."""
    stream: str | None = None
    """A file of prompts to decode in its order, in place of Spec-Bench's or a mixed stream."""
    context: int | None = None
    """Tokens of each prompt, which is then made of several of Spec-Bench's."""
    paired: Sequence[tuple[str, str]] = ()
    """Pairs of contenders whose speeds are compared prompt by prompt."""
    without_bundle: bool = False
    """Whether the contenders get the bundle's model alone."""
    pictures: Sequence[Picture] = ()
    derived = False

    def measure(self, folder: Path, full: bool, packages: str) -> Outcome:
        """Decode whatever `folder`/NAME does not hold yet. Exits where the comparison fails."""
        own = folder / self.outcome_name(full)
        contenders = ",".join(self._names())
        given = ["--model", self.bundle.model] if self.without_bundle else ["--artifact", self.bundle.path]
        options = [*given, "--contenders", contenders, "--out", str(own)]
        if self.context is not None:
            path = folder / f"context-{self.context}.jsonl"
            write_stream(self._long_prompts(self.context, 4 if full else self.count), path)
            options += ["--prompts", str(path), "--max-new-tokens", str(self.tokens)]
        elif self.ratio is None:
            options += ["--prompts", self.stream or str(SPEC_BENCH)]
            whole = full or self.stream is not None
            options += ([] if self.priced else ["--full"]) if whole else ["--count", str(self.count)]
            options += ["--max-new-tokens", str(max(self.tokens, 128) if full else self.tokens)]
        else:
            stream = folder / f"stream-{self.ratio:g}.jsonl"
            count = 40 if full else self.count // 2
            pools = {name: read_pool(path)[-count:] for name, path in POOLS.items()}
            write_stream(mixed_stream(pools, self.ratio, seed=1), stream)
            options += ["--prompts", str(stream)] + ([] if self.priced else ["--full"])
            options += ["--max-new-tokens", "64" if full else str(self.tokens)]
        options += ["--latency", str(QUIET)] if self.priced else []
        options += ["--temperature", str(self.temperature)] if self.temperature else []
        tool = "bench.priced" if self.priced else "bench.compare"
        if code := subprocess.run([sys.executable, "-m", tool, *options], check=False).returncode:
            sys.exit(code)
        return self.outcome(own, full, packages)

    def outcome(self, folder: Path, full: bool, packages: str) -> Outcome:
        """The outcome of a comparison that `folder` holds."""
        summary = json.loads((folder / "summary.json").read_text(encoding="utf-8"))
        settings = summary["settings"]
        device = settings["device"]
        return Outcome(
            part=self.outcome_name(full),
            processor=device["device"],
            origin=f"{device['device']}, {device['threads']} threads, torch {device['torch']}, {device['dtype']}; "
            f"{settings['prompts'][1]} prompts of {settings['prompts'][0]}, {settings['max_new_tokens']} new tokens"
            + (f", temperature {self.temperature:g}" if self.temperature else "")
            + (f", priced by the latency table of {settings['latency']}" if self.priced else "")
            + (
                f". Model {self.bundle.model}."
                if self.without_bundle
                else f". Bundle {settings['bundle'][:8]}: {self.bundle.origin}."
            ),
            packages=packages,
            commit=summary.get("commit"),
            settings=settings,
            rows=tuple(read_rows(folder / NAME)),
        )

    def restore(self, outcome: Outcome, folder: Path) -> None:
        """Write the rows where other tools read them, unless they are there."""
        path = folder / outcome.part / NAME
        if outcome.rows and outcome.settings is not None and not path.is_file():
            write_rows(path, outcome.settings, outcome.rows)

    def is_current(self, outcome: Outcome) -> bool:
        """Whether an outcome is of these contenders and this bundle."""
        settings = outcome.settings or {}
        named = [name for name in settings.get("contenders", []) if not name.startswith("plain")]
        bundle = None if self.without_bundle else self.bundle.digest()
        return named == self._names() and settings.get("bundle") == bundle

    def section(self, outcome: Outcome) -> str:
        """The body of its section of the page."""
        if not outcome.rows:
            return outcome.printed
        parts = [_table(outcome.standings)]
        ratios = [(f"`{first}` ÷ `{second}`", outcome.against(second, first)) for first, second in self._pairs()]
        if told := [f"{name}: {with_interval(ratio)}" for name, ratio in ratios if ratio]:
            parts.append(f"Paired by prompt: {'; '.join(told)}.\n")
        if self.categories:
            parts.append(_by_category(outcome.standings))
        return "\n".join(parts)

    def _long_prompts(self, tokens: int, count: int) -> list[Prompt]:
        """Prompts of at most `tokens` tokens of the bundle's model."""
        from transformers import AutoTokenizer

        tokenizer = AutoTokenizer.from_pretrained(self.bundle.model, trust_remote_code=False)
        return long_prompts(read_pool(SPEC_BENCH), tokens, count, lambda text: _length(tokenizer, text))

    def outcome_name(self, full: bool) -> str:
        """The name of its outcome: the full mode has one of its own."""
        return self.name + FULL * full

    def _pairs(self) -> list[tuple[str, str]]:
        first = self.bundle.first
        return [(one.format(first=first), other.format(first=first)) for one, other in self.paired]

    def _names(self) -> list[str]:
        return [name.format(first=self.bundle.first) for name in self.contenders]


def _length(tokenizer: Any, text: str) -> int:
    """Tokens of a text as a prompt, with its chat template."""
    asked = [{"role": "user", "content": text}]
    return len(tokenizer.apply_chat_template(asked, add_generation_prompt=True, return_dict=True)["input_ids"])


def _table(standings: dict[str, Any]) -> str:
    lines = [
        "| strategy | ÷ plain | slowest prompt | below 1 | M | α | c | v | E(Spd) | with v | skipped | drafted "
        "| planning | identical |",
        "|---|---|---|---|---|---|---|---|---|---|---|---|---|---|",
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
            f"{ratio['minimum']:.2f}",
            f"{ratio['share_below_1']:.0%}",
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
