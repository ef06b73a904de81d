"""The command `ssd-run`."""

from __future__ import annotations

import sys
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Annotated

import typer

from ssd_profiles.errors import UserError
from ssd_profiles.printable import printable
from ssd_profiles.prompts import Prompt
from ssd_runtime.commands.command import closing, command_app, run_command, uncollected
from ssd_runtime.commands.groups import with_groups
from ssd_runtime.commands.options import (
    DRAFT_PANEL,
    BundleOptions,
    KvBitsOption,
    ModelOptions,
    RecordOptions,
    StrategyOptions,
    VersionOption,
)
from ssd_runtime.commands.report import compared_table, explain, finish, report, report_failure, write
from ssd_runtime.commands.run_options import (
    CHAT_TOKENS,
    MAX_NEW_TOKENS,
    SAMPLE_TOKENS,
    OutputOptions,
    PromptOptions,
    Prompts,
    SamplingOptions,
    StructureOptions,
)
from ssd_runtime.engine.opening import open_engine
from ssd_runtime.loading.source import read_source
from ssd_runtime.serving.record import Recorder

if TYPE_CHECKING:
    from ssd_runtime.engine.engine import Engine
    from ssd_runtime.engine.offline.runner import Runner
    from ssd_runtime.engine.output.result import Outcome, Summary

CLOSING = closing(
    'One prompt:   ssd-run -m ./my-model -n 64 "Why is the sky blue?"',
    "Speed-up:     ssd-run -m ./my-model --compare",
    "              ssd-run -m ./my-model --prompts prompts.jsonl --compare",
    'Bundle:       ssd-run --bundle demo --explain "Why is the sky blue?"',
    "Drafting:     ssd-run -m ./my-model --strategy swift --set window=16 --prompts prompts.jsonl",
    'JSON:         ssd-run -m ./my-model --json-schema person.json "Who is Ada Lovelace?"',
    'Sampling:     ssd-run -m ./my-model --temperature 0.8 --top-p 0.95 --seed 7 "Write a haiku."',
    "For programs: ssd-run -m ./my-model --prompts prompts.jsonl --concurrency 8 --json",
    codes="Exit codes: 0 success; 1 an output differs from plain decoding by more than rounding (--compare); "
    "2 bad input, or a prompt of a file failed; 130 interrupted.",
)
app = command_app()


@app.command(epilog=CLOSING)
@with_groups
def run(
    prompts: PromptOptions,
    model: ModelOptions,
    bundle: BundleOptions,
    strategy: StrategyOptions,
    sampling: SamplingOptions,
    structured: StructureOptions,
    output: OutputOptions,
    record: RecordOptions,
    bitwise: Annotated[
        bool,
        typer.Option(
            "--bitwise",
            help="Make logits bitwise independent of drafts; slower, one prompt at a time.",
            rich_help_panel=DRAFT_PANEL,
        ),
    ] = False,
    kv_bits: KvBitsOption = None,
    version: VersionOption = False,
) -> None:
    """Decode prompts faster, with the output of plain decoding up to rounding."""
    given = prompts.read(output.compare)
    if given.chat and output.as_json:
        raise UserError("prompt: --json needs one; give a prompt or --prompts FILE.jsonl")
    if prompts.concurrency > 1 and bitwise:
        raise UserError("--bitwise: decodes one prompt at a time; omit --bitwise or --concurrency")
    load_settings = model.load_settings(bitwise, kv_bits)
    stops = sampling.stops
    params = sampling.params
    structure = structured.structure
    parameters = strategy.parameters(bundle.artifact is not None)
    source = read_source(bundle.artifact, model.model, bundle.require_signature)
    recorder = record.recorder()

    from ssd_runtime.commands.waiting import waiting

    with waiting(f"getting {source.model} ready", shown=not output.quiet), uncollected():
        # These imports take seconds and come last, so that bad input is answered at once.
        source.read_ahead()
        from ssd_runtime.engine.output.result import Summary
        from ssd_runtime.engine.turn import RunSettings

        settings = RunSettings(
            strategy.strategy,
            parameters=parameters,
            max_new_tokens=sampling.max_new_tokens or _usual_tokens(given),
            stops=stops,
            raw=prompts.raw,
            compare=output.compare,
            sampling=params,
            structure=structure,
        )
        # A comparison is of what later runs do, so it waits for the device's measurement. Others answer first.
        engine = open_engine(source, load_settings, _note, measure_later=not output.compare)
        # The first runner takes a look at the device, or copies weights, for which the user waits too.
        runner = engine.runner(settings, None if output.as_json or given.samples else write)
    if not (prompts.raw or engine.loaded.tokenizer.chat_template):
        _note("the model has no chat template: messages are joined without their roles, as with --raw")
    if output.explain:
        print(engine.decoder.memory, file=sys.stderr)
    answers = _Answers(
        output=output,
        prompts=given,
        recorder=recorder,
        summary=Summary(output.compare, concurrency=prompts.concurrency, strategy=strategy.strategy),
    )
    if given.chat:
        if not _chat(runner, answers, engine):
            return
    else:
        _decode(runner, answers, prompts.concurrency, engine)
    _measure(engine, not output.quiet)


def _usual_tokens(given: Prompts) -> int:
    """Most tokens of an answer where the user does not say."""
    if given.chat:
        return CHAT_TOKENS
    return SAMPLE_TOKENS if given.samples else MAX_NEW_TOKENS


def main() -> None:
    """Run the command. A user's mistake ends it with one line and exit code 2."""
    run_command(app)


@dataclass(slots=True, kw_only=True)
class _Answers:
    """Reports answers as they come, and sums their figures."""

    output: OutputOptions
    prompts: Prompts
    recorder: Recorder | None
    summary: Summary
    samples: list[Outcome] = field(default_factory=list)
    """Answers to sample prompts, whose table is printed at the end."""

    def begin(self, prompt: Prompt) -> None:
        """Name the prompt of the answer that comes next, where a person reads several."""
        read = sys.stdout.isatty() and not (self.output.as_json or self.output.quiet or self.prompts.samples)
        if read and len(self.prompts.prompts) > 1:
            print(f"[{printable(prompt.id)}]", file=sys.stderr)

    def add(self, outcome: Outcome) -> None:
        """Report an answered turn."""
        self.summary.add(outcome)
        if self.prompts.samples and not self.output.as_json:
            self.samples.append(outcome)
        else:
            report(outcome, self.output.as_json, self.output.compare and len(self.prompts.prompts) > 1)
        if self.output.explain:
            explain(outcome)

    def fail(self, prompt: Prompt, error: UserError) -> None:
        """Report a prompt without an answer, or raise its error if it is the only one."""
        if not self.prompts.from_file:
            raise error
        self.summary.failed += 1
        report_failure(prompt, str(error), self.output.as_json)

    def record(self, outcomes: Sequence[Outcome]) -> None:
        """Record the turns of one prompt that have been answered."""
        if self.recorder is None or not outcomes:
            return
        from ssd_runtime.engine.offline.runner import next_messages
        from ssd_runtime.loading.loaded_model import conversation

        prompt = outcomes[0].prompt
        messages = conversation(prompt)
        for outcome in outcomes:
            self.recorder.add(messages, prompt.domain)
            messages += next_messages(prompt, outcome.turn, outcome)


def _measure(engine: Engine, shown: bool) -> bool:
    """Measure the device if the answers so far did not wait for that; returns whether nobody interrupted it."""
    from ssd_runtime.commands.waiting import waiting

    if engine.must_be_measured:
        try:
            with waiting("measuring this device; Ctrl-C leaves it to a later run", shown=shown):
                engine.measure()
        except KeyboardInterrupt:
            _note("this device will be measured in a later run")
            return False
    return True


def _chat(runner: Runner, answers: _Answers, engine: Engine) -> bool:
    """Answer the messages that a user types; returns whether the device may be measured after them."""
    from ssd_runtime.commands.chat import Chat, run_chat
    from ssd_runtime.engine.output.result import Tally

    may_measure = True

    def answered(outcome: Outcome) -> None:
        nonlocal may_measure
        answers.add(outcome)
        answers.record([outcome])
        if not answers.output.quiet:
            print(Tally.of(outcome).closing_line, file=sys.stderr)
        if outcome.generation.finish_reason == "length":
            _note(f"the answer was cut at {runner.settings.max_new_tokens} tokens; --max-new-tokens allows more")
        may_measure = may_measure and _measure(engine, not answers.output.quiet)

    run_chat(Chat(runner), answered)
    return may_measure


def _decode(runner: Runner, answers: _Answers, concurrency: int, engine: Engine) -> None:
    """Answer all prompts, and measure the device between them if it must be; then print the summary."""
    from ssd_runtime.commands.llama_cpp import LlamaCpp
    from ssd_runtime.commands.waiting import counting
    from ssd_runtime.engine.offline.together import Together

    given, output, summary = answers.prompts, answers.output, answers.summary
    alone = output.compare and concurrency == 1
    llama = LlamaCpp.find(engine, runner.settings.max_new_tokens, _note) if alone else None
    # On a terminal, the answers themselves show how far the run has come.
    counted = len(given.prompts) > 1 and not output.quiet and (given.samples or not sys.stdout.isatty())
    with counting("prompts", len(given.prompts), counted) as tick:
        if concurrency > 1:
            together = Together(runner, concurrency)
            for number, one in enumerate(together.run(given.prompts)):
                answers.begin(one.prompt)
                for outcome in one.outcomes:
                    if not output.as_json and not given.samples:
                        write(outcome.text)
                    answers.add(outcome)
                answers.record(one.outcomes)
                if one.error is not None:
                    answers.fail(one.prompt, one.error)
                tick()
                if number + 1 < len(given.prompts) and engine.must_be_measured:
                    engine.measure()
            summary.seconds = together.seconds
            summary.plain_seconds = together.plain_seconds
        else:
            for number, prompt in enumerate(given.prompts):
                if number and engine.must_be_measured:
                    engine.measure()
                if llama is not None:
                    llama.before(number, len(given.prompts))
                outcomes: list[Outcome] = []
                answers.begin(prompt)
                try:
                    for outcome in runner.run(prompt):
                        answers.add(outcome)
                        outcomes.append(outcome)
                except UserError as error:
                    answers.fail(prompt, error)
                answers.record(outcomes)
                tick()
            if llama is not None:
                llama.before(len(given.prompts), len(given.prompts))
    if answers.samples:
        compared_table(answers.samples, llama)
    finish(summary, output.as_json, output.quiet, llama)


def _note(line: str) -> None:
    print(f"note: {printable(line)}", file=sys.stderr)
