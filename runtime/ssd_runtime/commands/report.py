"""Prints answers and their figures: answers on standard output, all else on standard error."""

from __future__ import annotations

import json
import sys
from collections.abc import Sequence
from itertools import groupby
from typing import TYPE_CHECKING

import typer

from ssd_profiles.printable import printable
from ssd_profiles.prompts import Prompt
from ssd_runtime.commands.command import BAD_INPUT, complain

if TYPE_CHECKING:
    from ssd_runtime.commands.llama_cpp import LlamaCpp
    from ssd_runtime.engine.output.result import Outcome, Summary


def write(text: str) -> None:
    """Write a part of an answer at once."""
    sys.stdout.write(text)
    sys.stdout.flush()


def print_json(value: object) -> None:
    """Print a line of JSON: characters as they are where the output is UTF-8, else as JSON's own escapes."""
    readable = (sys.stdout.encoding or "utf-8").lower().replace("-", "") == "utf8"
    print(json.dumps(value, ensure_ascii=not readable), flush=True)


def report(outcome: Outcome, as_json: bool, compare: bool) -> None:
    """Print the end of an answer, and its comparison with plain decoding."""
    result = outcome.to_json()
    if as_json:
        print_json(result)
        return
    write("\n")
    if compare:
        speed = "no second token, so no speed"
        if result["speedup"] is not None:
            speed = (
                f"{result['tokens_per_second']:.1f} tokens/s, plain {result['plain_tokens_per_second']:.1f}: "
                f"{result['speedup']:.2f}x"
            )
        same = "yes" if result["identical"] else result["divergence"] or "not compared"
        print(f"[{printable(outcome.prompt.id)}] {speed}, identical: {same}", file=sys.stderr)


def compared_table(outcomes: Sequence[Outcome], llama: LlamaCpp | None) -> None:
    """Print a table of speeds by prompt on standard output, with totals, and llama.cpp's if it was timed."""
    from rich.console import Console
    from rich.table import Table

    from ssd_runtime.engine.output.result import Tally

    table = Table(title="Tokens per second", title_justify="left")
    strategy = outcomes[0].strategy
    for name in ("prompt", "tokens", "plain", strategy, f"{strategy} ÷ plain"):
        table.add_column(name, justify="left" if name == "prompt" else "right")

    def add(name: str, tally: Tally) -> None:
        figures = tally.figures(compare=True)
        rates = (figures["plain_tokens_per_second"], figures["tokens_per_second"])
        shown = [f"{rate:.1f}" if rate else "–" for rate in rates]
        speedup = figures["speedup"]
        table.add_row(name, str(tally.tokens), *shown, f"{speedup:.2f}" if speedup else "–")

    tallies = [Tally.of(outcome) for outcome in outcomes]
    for outcome, tally in zip(outcomes, tallies, strict=True):
        add(outcome.prompt.id, tally)
    table.add_section()
    add("all", sum(tallies, Tally()))
    if llama is not None and (rate := llama.tokens_per_second) is not None:
        table.add_row("llama.cpp", str(llama.new), f"{rate:.1f}", "", "")
    Console(highlight=False).print(table)


def report_failure(prompt: Prompt, message: str, as_json: bool) -> None:
    """Print why a prompt has no answer."""
    if as_json:
        print_json({"id": prompt.id, "category": prompt.category, "error": printable(message)})
    else:
        write("\n")
        complain(message)


def explain(outcome: Outcome) -> None:
    """Print each plan with where it began and what it brought."""
    routed = f"nearest domain {outcome.generation.domain}" if outcome.generation.domain else "no domain"
    print(
        f"[{printable(outcome.prompt.id)}] {outcome.generation.prompt_tokens} prompt tokens, {routed}", file=sys.stderr
    )
    for reason, group in groupby(outcome.generation.cycles, key=lambda cycle: cycle.plan.reason):
        cycles = list(group)
        drafted = sum(cycle.num_draft_tokens for cycle in cycles)
        print(
            f"  at {cycles[0].context} tokens: {reason} → {len(cycles)} target forwards, "
            f"{sum(len(cycle.tokens) for cycle in cycles)} tokens, "
            f"{sum(cycle.num_accepted_tokens for cycle in cycles)} of {drafted} drafts accepted",
            file=sys.stderr,
        )


def finish(summary: Summary, as_json: bool, quiet: bool, llama: LlamaCpp | None = None) -> None:
    """Print the summary and choose the exit code: a wrong output takes precedence over failed prompts."""
    total = summary.to_json()
    if llama is not None:
        total["llama_cpp_tokens_per_second"] = llama.tokens_per_second
    if as_json:
        print_json({"summary": total})
    elif summary.compare and summary.total.prompts:
        print(summary.comparison, file=sys.stderr)
        rates = total["tokens_per_second"], total["plain_tokens_per_second"]
        if llama is not None and all(rates) and (line := llama.comparison(summary.strategy, *rates)) is not None:
            print(line, file=sys.stderr)
    if summary.compare and summary.disturbance:
        print(f"warning: {summary.disturbance}", file=sys.stderr)
    if not quiet and summary.total.prompts:
        print(summary.closing_line, file=sys.stderr)
    if summary.compare and total["divergence"] == "error":
        print("error: an output differs from plain decoding by more than rounding; please report it", file=sys.stderr)
        raise typer.Exit(1)
    if summary.failed:
        raise typer.Exit(BAD_INPUT)
