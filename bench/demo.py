"""Shows in a few minutes what self-speculation gains: `python -m bench.demo`, or `make demo`.

First the real demo model without any preparation, on prompts on which drafting pays and on one on which it cannot.
Then a model with known spare layers, made of the same one, which is compiled and decoded with its bundle. Every figure
is measured in this run, against plain decoding of the same engine, interleaved.
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from time import perf_counter

from rich.console import Console
from rich.table import Table

from bench.fixtures.planted import write_planted
from ssd_compiler.build import compile_bundle
from ssd_compiler.progress import Reporter
from ssd_compiler.settings import CompileSettings
from ssd_profiles.prompts import Prompt, sample_prompts
from ssd_runtime import Engine, RunSettings
from ssd_runtime.commands.command import run_guarded
from ssd_runtime.engine.output.result import Outcome, Tally, disturbance
from ssd_runtime.planning.settings import AutoSettings

MODEL = "demo@wheel"
EPSILON = 0.05
DOMAIN = "gsm8k"
EVALUATIONS = 12
MAX_NEW_TOKENS = 48
PLANTED = "mathematics"
"""The sample prompts whose names begin so are of the domain that the planted model is compiled for."""
SAMPLES = {prompt.id: prompt.turns[0] for prompt in sample_prompts()}
PROMPTS = {title: text for title, text in SAMPLES.items() if not title.startswith(PLANTED)}
QUESTIONS = {title: text for title, text in SAMPLES.items() if title.startswith(PLANTED)}


@dataclass(frozen=True)
class Contender:
    """A way to draft, with the name of its column."""

    title: str
    engine: Engine
    parameters: AutoSettings


def main() -> None:
    """Measure, and print both tables at the end."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument(
        "--out", type=Path, default=Path("build/demo"), help="folder for the planted model and its bundle"
    )
    arguments = parser.parse_args()
    console = Console(highlight=False)
    began = perf_counter()

    console.print("[bold]1. A real model, nothing prepared[/]")
    engine = Engine.open(model=MODEL, device="cpu")
    contenders = [
        Contender("guesses alone", engine, AutoSettings(light=0)),
        Contender("auto", engine, AutoSettings()),
    ]
    real = measure(contenders, PROMPTS)
    del engine, contenders

    console.print("[bold]2. A model with layers to spare[/] (the same one, 30 layers planted that do next to nothing)")
    planted, bundle = arguments.out / "planted", arguments.out / "bundle"
    write_planted(MODEL, planted, EPSILON, seed=0)
    # A short compile: prompts of one domain, half as many as `ssd-compile` takes, and few masks.
    settings = CompileSettings(
        model=str(planted),
        domains=(DOMAIN,),
        evaluations=EVALUATIONS,
        search_prompts=4,
        validation_prompts=4,
        anchor_prompts=16,
        device="cpu",
    )
    compile_bundle(settings, bundle.resolve(), resume=False, reporter=Reporter())
    skipping = Engine.open(bundle, str(planted), device="cpu")
    contenders = [
        Contender("guesses alone", Engine(skipping.loaded), AutoSettings(light=0)),
        Contender("guesses and skipped layers", skipping, AutoSettings(light=0)),
        Contender("auto", skipping, AutoSettings()),
    ]
    spare = measure(contenders, QUESTIONS)

    console.print(table("A real model: SmolLM2-135M-Instruct, fp32, no bundle", real))
    console.print(table("A model with layers to spare: the same with 30 planted layers, fp32, its own bundle", spare))
    for each in (real, spare):
        tallies = [Tally.of(outcome) for row in each.values() for outcome in row.values()]
        if warning := disturbance(tallies):
            console.print(f"[bold]Warning[/]: {warning}.", soft_wrap=True)
    outcomes = [outcome for each in (real, spare) for row in each.values() for outcome in row.values()]
    different = sum(outcome.to_json()["identical"] is False for outcome in outcomes)
    console.print(
        f"Speeds ÷ that of plain decoding, which every contender takes turns with on the same prompt. Outputs that "
        f"differ from plain decoding's: {different} of {len(outcomes)}.\n"
        "Guesses copy earlier text. An answer of three tokens leaves nothing to draft, and its one or two steps carry "
        "the planning alone. "
        "`auto` also drafts with the whole model on light copies of its weights; "
        "the demo's weights are of 4 bits, so that such copies agree with it better than other models' would.\n"
        f"Report of the compile: {bundle / 'report.html'}; {perf_counter() - began:.0f} s in all.",
        soft_wrap=True,
    )


def measure(contenders: Sequence[Contender], prompts: Mapping[str, str]) -> dict[str, dict[str, Outcome]]:
    """Outcomes by prompt and contender, each with plain decoding of the same prompt in turn with it."""
    runners = {
        each.title: each.engine.runner(
            RunSettings(parameters=each.parameters, max_new_tokens=MAX_NEW_TOKENS, compare=True)
        )
        for each in contenders
    }
    found = dict[str, dict[str, Outcome]]()
    for title, text in prompts.items():
        row = found[title] = {}
        for name, runner in runners.items():
            row[name] = next(runner.run(Prompt(title, turns=(text,))))
        told = ", ".join(f"{name} {speedup(Tally.of(outcome))}" for name, outcome in row.items())
        print(f"  {title}: {told}", file=sys.stderr)
    return found


def table(title: str, found: Mapping[str, Mapping[str, Outcome]]) -> Table:
    """Plain decoding's tokens per second and the contenders' speed-ups by prompt, with totals in the last row."""
    names = list(next(iter(found.values())))
    shown = Table(title=title, title_justify="left")
    for name in ("prompt", "tokens", "plain, tokens/s", *names):
        shown.add_column(name, justify="left" if name == "prompt" else "right")
    rows = {**found, "all": {}}
    sums = {name: sum((Tally.of(row[name]) for row in found.values()), Tally()) for name in names}
    for prompt, row in rows.items():
        tallies = {name: Tally.of(outcome) for name, outcome in row.items()} or sums
        plain = sum(tallies.values(), Tally())
        figures = [speedup(each) for each in tallies.values()]
        if prompt == "all":
            shown.add_section()
        tokens = str(tallies[names[0]].tokens)
        shown.add_row(prompt, tokens, rate(plain.plain_tokens, plain.plain_seconds), *figures)
    return shown


def rate(tokens: int, seconds: float) -> str:
    """Tokens per second."""
    return f"{tokens / seconds:.1f}" if seconds else "–"


def speedup(tally: Tally) -> str:
    """Tokens per second ÷ those of plain decoding."""
    found = tally.figures(compare=True)["speedup"]
    return f"{found:.2f}x" if found else "–"


if __name__ == "__main__":
    run_guarded(main)
