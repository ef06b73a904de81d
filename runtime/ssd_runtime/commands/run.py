"""The command `ssd-run`."""

from __future__ import annotations

import sys
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from ssd_profiles.errors import UserError
from ssd_profiles.prompts import Prompt, is_text, read_prompts, sample_prompts
from ssd_runtime.commands.command import closing, command_app, run_command
from ssd_runtime.commands.options import (
    DRAFT_PANEL,
    OUTPUT_PANEL,
    AllowSpecialOption,
    ArtifactOption,
    AssignmentsOption,
    DeviceOption,
    DraftBitsOption,
    DtypeOption,
    ModelOption,
    SignatureOption,
    StrategyOption,
    ThreadsOption,
    VersionOption,
    WeightMemoryOption,
    WeightsOption,
    read_size,
)
from ssd_runtime.commands.report import compared_table, finish, report, report_failure, write
from ssd_runtime.commands.report import explain as print_plans
from ssd_runtime.engine.opening import LoadSettings, open_engine
from ssd_runtime.loading.source import read_source
from ssd_runtime.planning.registry import check_strategy, read_settings
from ssd_runtime.sampling.params import read_sampling
from ssd_runtime.serving.record import Recorder, RecordOption, RedactOption, ShareOption, read_recorder
from ssd_runtime.weights.draft_bits import read_draft_bits
from ssd_runtime.weights.dtype_names import read_dtype

if TYPE_CHECKING:
    from ssd_runtime.engine.offline.result import Outcome

PROMPT_PANEL = "Prompts"
SAMPLING_PANEL = "Answers and sampling"
MAX_NEW_TOKENS = 128
SAMPLE_TOKENS = 48
"""New tokens per sample prompt: enough to see a speed, and soon decoded."""
CLOSING = closing(
    'One prompt:   ssd-run -m ./my-model -n 64 "Why is the sky blue?"',
    "Speed-up:     ssd-run -m ./my-model --compare",
    "              ssd-run -m ./my-model --prompts prompts.jsonl --compare",
    'Bundle:       ssd-run --bundle demo --explain "Why is the sky blue?"',
    "Drafting:     ssd-run -m ./my-model --strategy swift --set window=16 --prompts prompts.jsonl",
    'Sampling:     ssd-run -m ./my-model --temperature 0.8 --top-p 0.95 --seed 7 "Write a haiku."',
    "For programs: ssd-run -m ./my-model --prompts prompts.jsonl --concurrency 8 --json",
    codes="Exit codes: 0 success; 1 an output differs from plain decoding by more than rounding (--compare); "
    "2 bad input, or a prompt of a file failed; 130 interrupted.",
)
app = command_app()


@app.command(epilog=CLOSING)
def run(
    text: Annotated[
        str | None,
        typer.Argument(metavar="PROMPT", help="The prompt; without one, standard input, or a chat on a terminal."),
    ] = None,
    prompt: Annotated[
        str | None, typer.Option("--prompt", "-p", help="The same as PROMPT.", rich_help_panel=PROMPT_PANEL)
    ] = None,
    prompts: Annotated[
        Path | None,
        typer.Option(help="JSON lines with `prompt`, `messages` or `turns`.", rich_help_panel=PROMPT_PANEL),
    ] = None,
    all_turns: Annotated[
        bool,
        typer.Option(
            "--all-turns", help="Decode every turn of `turns`, not only the first.", rich_help_panel=PROMPT_PANEL
        ),
    ] = False,
    concurrency: Annotated[
        int,
        typer.Option(min=1, max=1024, help="Prompts of a file decoded at once, at most.", rich_help_panel=PROMPT_PANEL),
    ] = 1,
    raw: Annotated[bool, typer.Option("--raw", help="Apply no chat template.", rich_help_panel=PROMPT_PANEL)] = False,
    model: ModelOption = None,
    artifact: ArtifactOption = None,
    require_signature: SignatureOption = None,
    device: DeviceOption = None,
    dtype: DtypeOption = None,
    weights: WeightsOption = None,
    weight_memory: WeightMemoryOption = None,
    threads: ThreadsOption = None,
    allow_special: AllowSpecialOption = False,
    strategy: StrategyOption = "auto",
    assignments: AssignmentsOption = None,
    draft_bits: DraftBitsOption = "auto",
    bitwise: Annotated[
        bool,
        typer.Option(
            "--bitwise",
            help="Make logits bitwise independent of drafts; slower, one prompt at a time.",
            rich_help_panel=DRAFT_PANEL,
        ),
    ] = False,
    max_new_tokens: Annotated[
        int | None,
        typer.Option(
            "--max-new-tokens",
            "-n",
            min=1,
            help=f"Most tokens per answer; {MAX_NEW_TOKENS} by default, {SAMPLE_TOKENS} for sample prompts.",
            rich_help_panel=SAMPLING_PANEL,
        ),
    ] = None,
    stop: Annotated[
        list[str] | None,
        typer.Option(help="End the answer before this text; repeatable.", rich_help_panel=SAMPLING_PANEL),
    ] = None,
    temperature: Annotated[
        float | None,
        typer.Option(
            min=0.0,
            max=100.0,
            help="Temperature; 0 is greedy. Default: 1 with --top-k, --top-p, --min-p or --rejection, else 0.",
            rich_help_panel=SAMPLING_PANEL,
        ),
    ] = None,
    top_k: Annotated[
        int,
        typer.Option(min=0, help="Sample from the k most probable tokens; 0 for all.", rich_help_panel=SAMPLING_PANEL),
    ] = 0,
    top_p: Annotated[
        float,
        typer.Option(
            min=0.0,
            max=1.0,
            help="Sample from the smallest set of tokens that has this probability.",
            rich_help_panel=SAMPLING_PANEL,
        ),
    ] = 1.0,
    min_p: Annotated[
        float,
        typer.Option(
            min=0.0,
            max=1.0,
            help="Exclude tokens less probable than this share of the most probable one.",
            rich_help_panel=SAMPLING_PANEL,
        ),
    ] = 0.0,
    repetition_penalty: Annotated[
        float | None,
        typer.Option(
            min=0.01, help="Above 1, against repetition; by default the model's own.", rich_help_panel=SAMPLING_PANEL
        ),
    ] = None,
    seed: Annotated[
        int | None,
        typer.Option(
            min=0, max=(1 << 63) - 1, help="Seed of sampling; random by default.", rich_help_panel=SAMPLING_PANEL
        ),
    ] = None,
    rejection: Annotated[
        bool,
        typer.Option(
            "--rejection",
            help="Use rejection sampling: accepts more at high temperatures; a seed's output then depends on drafts.",
            rich_help_panel=SAMPLING_PANEL,
        ),
    ] = False,
    compare: Annotated[
        bool,
        typer.Option(
            "--compare",
            help="Decode every prompt plainly as well, in turn; report the speed-up, and whether outputs are equal. "
            "Without a prompt, sample prompts that come with the package are decoded.",
            rich_help_panel=OUTPUT_PANEL,
        ),
    ] = False,
    explain: Annotated[
        bool,
        typer.Option(
            "--explain", help="Print what was planned and why, on standard error.", rich_help_panel=OUTPUT_PANEL
        ),
    ] = False,
    explain_steps: Annotated[
        bool,
        typer.Option(
            "--explain-steps",
            help="Print every step's plan and outcome, on standard error.",
            rich_help_panel=OUTPUT_PANEL,
        ),
    ] = False,
    as_json: Annotated[
        bool,
        typer.Option(
            "--json", help="Print one JSON object per prompt, the summary last.", rich_help_panel=OUTPUT_PANEL
        ),
    ] = False,
    quiet: Annotated[
        bool,
        typer.Option("--quiet", help="Print no progress and no closing line of figures.", rich_help_panel=OUTPUT_PANEL),
    ] = False,
    record: RecordOption = None,
    record_share: ShareOption = None,
    record_redact: RedactOption = None,
    version: VersionOption = False,
) -> None:
    """Decode prompts faster, with the output of plain decoding up to rounding."""
    if prompt is not None and text is not None:
        raise UserError("--prompt: a prompt is given already; omit one of the two")
    prompt = prompt if prompt is not None else text
    if prompt is None and prompts is None and not sys.stdin.isatty():
        piped = _standard_input()
        prompt = None if compare and not piped.strip() else piped
    sampled = compare and prompt is None and prompts is None
    chatting = prompt is None and prompts is None and not sampled
    if chatting and as_json:
        raise UserError("prompt: --json needs one; give a prompt or --prompts FILE.jsonl")
    requests = sample_prompts() if sampled else [] if chatting else _requests(prompt, prompts, all_turns)
    if max_new_tokens is None:
        max_new_tokens = SAMPLE_TOKENS if sampled else MAX_NEW_TOKENS
    if concurrency > 1 and len(requests) < 2 and prompts is None:
        raise UserError("--concurrency: needs several prompts; give them with --prompts FILE.jsonl")
    if concurrency > 1 and bitwise:
        raise UserError("--bitwise: decodes one prompt at a time; omit --bitwise or --concurrency")
    bits = read_draft_bits(draft_bits)
    load_settings = LoadSettings(
        device=device,
        dtype=read_dtype(dtype),
        weights=weights,
        weight_memory=read_size(weight_memory),
        threads=threads,
        draft_bits=bits,
        bitwise=bitwise,
        allow_special=allow_special,
    )
    if "" in (stop or ()):
        raise UserError("--stop: must not be empty; omit it instead")
    sampling = read_sampling(temperature, top_k, top_p, min_p, repetition_penalty, seed, rejection)
    check_strategy(strategy, artifact is not None)
    settings = read_settings(strategy, assignments or [])
    source = read_source(artifact, model, require_signature)
    recorder = read_recorder(record, record_share, record_redact)

    from ssd_runtime.commands.waiting import counting, waiting

    with waiting(f"getting {source.model} ready", shown=not quiet):
        # These imports take seconds and come last, so that bad input is answered at once.
        from ssd_runtime.engine.offline.result import Summary, Tally
        from ssd_runtime.engine.offline.runner import RunSettings
        from ssd_runtime.engine.offline.together import Together

        run_settings = RunSettings(
            strategy,
            parameters=settings,
            max_new_tokens=max_new_tokens,
            stops=tuple(stop or ()),
            raw=raw,
            compare=compare,
            sampling=sampling,
        )
        engine = open_engine(source, load_settings, _note)
        # The first runner measures the device and copies weights, for which the user waits too.
        runner = engine.runner(run_settings, None if as_json or sampled else write)
    if explain or explain_steps:
        print(engine.decoder.memory, file=sys.stderr)
    summary = Summary(compare, concurrency=concurrency, strategy=strategy)
    samples: list[Outcome] = []

    def answered(outcome: Outcome) -> None:
        summary.add(outcome)
        if sampled and not as_json:
            samples.append(outcome)
        else:
            report(outcome, as_json, compare and len(requests) > 1)
        if explain or explain_steps:
            print_plans(outcome, explain_steps)

    if chatting:
        from ssd_runtime.commands.chat import Chat, run_chat

        chat = Chat(runner)

        def answered_turn(outcome: Outcome) -> None:
            answered(outcome)
            _record(recorder, [outcome])
            if not quiet:
                print(Tally.of(outcome).closing_line, file=sys.stderr)

        run_chat(chat, answered_turn)
        return
    # On a terminal, the answers themselves show how far the run has come.
    counted = len(requests) > 1 and not quiet and (sampled or not sys.stdout.isatty())
    with counting("prompts", len(requests), counted) as tick:
        if concurrency > 1:
            together = Together(runner, concurrency)
            for one in together.run(requests):
                for outcome in one.outcomes:
                    if not as_json and not sampled:
                        write(outcome.text)
                    answered(outcome)
                _record(recorder, one.outcomes)
                if one.error is not None:
                    summary.failed += 1
                    report_failure(one.prompt, str(one.error), as_json)
                tick()
            summary.seconds = together.seconds
            summary.plain_seconds = together.plain_seconds
        else:
            for request in requests:
                outcomes: list[Outcome] = []
                try:
                    for outcome in runner.run(request):
                        answered(outcome)
                        outcomes.append(outcome)
                except UserError as error:
                    if prompts is None:
                        raise
                    summary.failed += 1
                    report_failure(request, str(error), as_json)
                _record(recorder, outcomes)
                tick()
    if samples:
        compared_table(samples)
    finish(summary, as_json, quiet)


def main() -> None:
    """Run the command. A user's mistake ends it with one line and exit code 2."""
    run_command(app)


def _requests(prompt: str | None, path: Path | None, all_turns: bool) -> list[Prompt]:
    if prompt is not None and path is not None:
        raise UserError("prompt: give either a prompt or --prompts FILE.jsonl")
    if path is not None:
        return read_prompts(path, all_turns)
    if prompt is None or not prompt.strip():
        raise UserError("prompt: must not be empty; give some text")
    if not is_text(prompt):
        raise UserError("prompt: is not valid text in this terminal's encoding; put it in a file and use --prompts")
    return [Prompt("1", turns=(prompt,))]


def _standard_input() -> str:
    """The text of standard input, without the line break at its end."""
    try:
        return sys.stdin.buffer.read().decode().rstrip("\r\n")
    except UnicodeDecodeError:
        raise UserError("prompt: standard input is not UTF-8; convert it to UTF-8") from None


def _record(recorder: Recorder | None, outcomes: Sequence[Outcome]) -> None:
    """Record the turns of one prompt that have been answered."""
    if recorder is None or not outcomes:
        return
    from ssd_runtime.engine.offline.runner import next_messages
    from ssd_runtime.loading.models import conversation

    prompt = outcomes[0].prompt
    messages = conversation(prompt)
    for outcome in outcomes:
        recorder.add(messages, prompt.domain)
        messages += next_messages(prompt, outcome.turn, outcome)


def _note(line: str) -> None:
    print(f"note: {line}", file=sys.stderr)
