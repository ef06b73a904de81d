"""The command `ssd-run`."""

from __future__ import annotations

import json
import sys
import warnings
from itertools import groupby
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from ssd_artifacts.bundle import Bundle
from ssd_artifacts.reference_bundle import bundle_path
from ssd_profiles.errors import UserError
from ssd_profiles.prompts import Prompt, is_text, read_prompts
from ssd_runtime.command import (
    BAD_INPUT,
    DTYPE_HELP,
    WEIGHT_MEMORY_HELP,
    WEIGHTS_HELP,
    VersionOption,
    complain,
    one_line,
    read_size,
    run_command,
)
from ssd_runtime.planning.registry import NAMES, check_strategy, read_settings
from ssd_runtime.sampling.params import read_sampling

if TYPE_CHECKING:
    from ssd_runtime.engine.result import Outcome, Summary

app = typer.Typer(add_completion=False, rich_markup_mode=None, pretty_exceptions_enable=False)


@app.command()
def run(
    prompt: Annotated[str | None, typer.Argument(help="The prompt; or give --prompts.")] = None,
    artifact: Annotated[
        Path | None, typer.Option("--artifact", "--bundle", help="A bundle that ssd-compile wrote, or `demo`.")
    ] = None,
    model: Annotated[
        str | None, typer.Option(help="Hub id, folder, .gguf file or `demo`; the bundle's by default.")
    ] = None,
    prompts: Annotated[Path | None, typer.Option(help="JSON lines with `prompt`, `messages` or `turns`.")] = None,
    all_turns: Annotated[
        bool, typer.Option("--all-turns", help="Decode every turn of `turns`, not the first alone.")
    ] = False,
    max_new_tokens: Annotated[int, typer.Option(min=1, help="At most, for each answer.")] = 128,
    strategy: Annotated[str, typer.Option(help=", ".join(NAMES))] = "auto",
    assignments: Annotated[
        list[str] | None, typer.Option("--set", help="NAME=VALUE: a parameter of the strategy.")
    ] = None,
    device: Annotated[str | None, typer.Option(help="cpu, cuda, cuda:1, …")] = None,
    dtype: Annotated[str | None, typer.Option(help=DTYPE_HELP)] = None,
    weights: Annotated[str | None, typer.Option(help=WEIGHTS_HELP)] = None,
    weight_memory: Annotated[str | None, typer.Option(help=WEIGHT_MEMORY_HELP)] = None,
    threads: Annotated[int | None, typer.Option(min=1, max=1024, help="Processor threads.")] = None,
    stop: Annotated[list[str] | None, typer.Option(help="End the answer before this text; repeatable.")] = None,
    temperature: Annotated[
        float | None, typer.Option(min=0.0, max=100.0, help="Sample at this temperature; 0, the default, is greedy.")
    ] = None,
    top_k: Annotated[int, typer.Option(min=0, help="Sample from the k most probable tokens; 0 for all.")] = 0,
    top_p: Annotated[
        float, typer.Option(min=0.0, max=1.0, help="Sample from the fewest tokens that have this probability together.")
    ] = 1.0,
    min_p: Annotated[
        float, typer.Option(min=0.0, max=1.0, help="Exclude tokens below this share of the greatest probability.")
    ] = 0.0,
    repetition_penalty: Annotated[
        float | None, typer.Option(min=0.01, help="Above 1, against repetition; the model's own by default.")
    ] = None,
    seed: Annotated[
        int | None, typer.Option(min=0, max=1 << 62, help="Seed of sampling; a random one by default.")
    ] = None,
    rejection: Annotated[
        bool,
        typer.Option(
            "--rejection",
            help="Draw drafts by themselves and test them: more are accepted, but a seed's output depends on them.",
        ),
    ] = False,
    concurrency: Annotated[int, typer.Option(min=1, max=1024, help="Prompts of a file decoded at once, at most.")] = 1,
    raw: Annotated[bool, typer.Option("--raw", help="No chat template.")] = False,
    compare: Annotated[
        bool, typer.Option("--compare", help="Decode plainly too, in turn, and compare output and speed.")
    ] = False,
    explain: Annotated[bool, typer.Option("--explain", help="Say on standard error what was planned and why.")] = False,
    explain_steps: Annotated[bool, typer.Option("--explain-steps", help="The same for every step.")] = False,
    as_json: Annotated[bool, typer.Option("--json", help="One JSON object per prompt, the summary last.")] = False,
    version: VersionOption = False,
) -> None:
    """Decode prompts faster, with exactly the output of plain decoding."""
    requests = _requests(prompt, prompts, all_turns)
    if concurrency > 1 and prompts is None:
        raise UserError("--concurrency: one prompt is decoded by itself; give several with --prompts FILE.jsonl")
    memory = read_size(weight_memory)
    if "" in (stop or ()):
        raise UserError("--stop: must not be empty; omit it instead")
    sampling = read_sampling(temperature, top_k, top_p, min_p, repetition_penalty, seed, rejection)
    check_strategy(strategy, artifact is not None)
    settings = read_settings(strategy, assignments or [])
    bundle = Bundle.load(bundle_path(artifact)) if artifact is not None else None
    if model is None:
        if bundle is None:
            raise UserError("--artifact: none given; give a bundle, or a --model to decode without one")
        model = bundle.model.spec(str(artifact))

    # These imports take seconds and come last, so that bad input is answered at once.
    import torch

    from ssd_runtime.engine.engine import Engine, IgnoredSettingsWarning
    from ssd_runtime.engine.result import Summary
    from ssd_runtime.engine.runner import RunSettings
    from ssd_runtime.engine.together import Together
    from ssd_runtime.loading.models import load_model, weights_of

    if threads is not None:
        torch.set_num_threads(threads)
    loaded = load_model(model, device, dtype, weights or weights_of(bundle, model))
    for line in loaded.notes:
        print(f"note: {line}", file=sys.stderr)
    with warnings.catch_warnings(record=True, action="always", category=IgnoredSettingsWarning) as notes:
        engine = Engine(
            loaded=loaded, bundle=bundle, where=str(artifact), weight_memory=memory, before_measuring=_before_measuring
        )
    for note in notes:
        print(f"note: {note.message}", file=sys.stderr)
    if explain or explain_steps:
        print(engine.decoder.memory, file=sys.stderr)
    run_settings = RunSettings(
        strategy,
        parameters=settings,
        max_new_tokens=max_new_tokens,
        stops=tuple(stop or ()),
        raw=raw,
        compare=compare,
        sampling=sampling,
    )
    runner = engine.runner(run_settings, None if as_json else _write)
    summary = Summary(compare, concurrency=concurrency)

    def report(outcome: Outcome) -> None:
        summary.add(outcome)
        _report(outcome, as_json, compare)
        if explain or explain_steps:
            _explain(outcome, explain_steps)

    def report_failure(request: Prompt, error: UserError) -> None:
        summary.failed += 1
        _report_failure(request, str(error), as_json)

    if concurrency > 1:
        together = Together(runner, concurrency)
        for answered in together.run(requests):
            for outcome in answered.outcomes:
                if not as_json:
                    _write(outcome.text)
                report(outcome)
            if answered.error is not None:
                report_failure(answered.prompt, answered.error)
        summary.seconds = together.seconds
        summary.plain_seconds = together.plain_seconds
        _finish(summary, as_json, compare)
        return
    for request in requests:
        try:
            for outcome in runner.run(request):
                report(outcome)
        except UserError as error:
            if prompts is None:
                raise
            report_failure(request, error)
    _finish(summary, as_json, compare)


def main() -> None:
    """Run the command. A user's mistake ends it with one line and exit code 2."""
    run_command(app)


def _requests(prompt: str | None, path: Path | None, all_turns: bool) -> list[Prompt]:
    if (prompt is None) == (path is None):
        raise UserError("prompt: give either a prompt or --prompts FILE.jsonl")
    if path is not None:
        return read_prompts(path, all_turns)
    if not prompt or not prompt.strip():
        raise UserError("prompt: must not be empty; give some text")
    if not is_text(prompt):
        raise UserError("prompt: it is not text in this terminal's encoding; give it in a file with --prompts")
    return [Prompt("1", turns=(prompt,))]


def _before_measuring() -> None:
    print("measuring this device once (well under a minute)…", file=sys.stderr)


def _write(text: str) -> None:
    sys.stdout.write(text)
    sys.stdout.flush()


def _report(outcome: Outcome, as_json: bool, compare: bool) -> None:
    result = outcome.to_json()
    if as_json:
        print(json.dumps(result, ensure_ascii=False), flush=True)
    else:
        _write("\n")
    if compare and not as_json:
        print(
            f"[{result['id']}] {result['tokens_per_second']:.1f} tokens/s, plain "
            f"{result['plain_tokens_per_second']:.1f}: {result['speedup']:.2f}x, "
            f"identical: {'yes' if result['identical'] else result['divergence'] or 'not compared'}",
            file=sys.stderr,
        )


def _report_failure(prompt: Prompt, message: str, as_json: bool) -> None:
    if as_json:
        result = {"id": prompt.id, "category": prompt.category, "error": one_line(message)}
        print(json.dumps(result, ensure_ascii=False), flush=True)
    else:
        _write("\n")
        complain(message)


def _explain(outcome: Outcome, steps: bool) -> None:
    """Print each plan with where it began and what it brought; with `steps`, every step separately."""
    routed = f"nearest domain {outcome.generation.domain}" if outcome.generation.domain else "no domain"
    print(f"[{outcome.prompt.id}] {outcome.generation.prompt_tokens} prompt tokens, {routed}", file=sys.stderr)
    cycles = outcome.generation.cycles
    by_reason = groupby(cycles, key=lambda cycle: cycle.plan.reason)
    for group in ([cycle] for cycle in cycles) if steps else (list(group) for _, group in by_reason):
        drafted = sum(cycle.num_draft_tokens for cycle in group)
        tokens = sum(len(cycle.tokens) for cycle in group)
        plan = group[0].plan
        reason = f"{plan.reason}: {plan.detail}" if steps and plan.detail else plan.reason
        print(
            f"  at {group[0].context} tokens: {reason} → {len(group)} target forwards, {tokens} tokens, "
            f"{sum(cycle.num_accepted_tokens for cycle in group)} of {drafted} drafts accepted",
            file=sys.stderr,
        )


def _finish(summary: Summary, as_json: bool, compare: bool) -> None:
    """Print the summary and choose the exit code: a wrong output takes precedence over failed prompts."""
    total = summary.to_json()
    if as_json:
        print(json.dumps({"summary": total}), flush=True)
    elif compare and summary.total.prompts > 1:
        print(f"all: {total['speedup']:.2f}x of plain decoding, identical: {total['identical']}", file=sys.stderr)
    if compare and total["divergence"] == "error":
        print("error: an output differs from plain decoding by more than rounding; please report it", file=sys.stderr)
        raise typer.Exit(1)
    if summary.failed:
        raise typer.Exit(BAD_INPUT)
