"""Options of `ssd-run` alone, in groups."""

from __future__ import annotations

import secrets
import sys
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, ClassVar

import typer

from ssd_profiles.errors import UserError
from ssd_profiles.prompts import Prompt, is_text, read_prompts, sample_prompts
from ssd_runtime.commands.options import OUTPUT_PANEL, text_of
from ssd_runtime.sampling.params import SamplingParams
from ssd_runtime.structure.structure import Structure

MAX_NEW_TOKENS = 128
CHAT_TOKENS = 2048
SAMPLE_TOKENS = 48
"""New tokens per sample prompt: enough to see a speed, and soon decoded."""


@dataclass(frozen=True, slots=True)
class Prompts:
    """The prompts of a run."""

    prompts: list[Prompt]
    from_file: bool
    """Whether a prompt may fail without ending the run."""
    samples: bool
    """Whether they are the package's."""

    @property
    def chat(self) -> bool:
        """Whether the prompts are typed as the answers come."""
        return not self.prompts and not self.from_file


@dataclass(frozen=True, slots=True, kw_only=True)
class PromptOptions:
    """The prompts that are answered."""

    PANEL: ClassVar[str] = "Prompts"

    prompt: Annotated[
        str | None,
        typer.Argument(metavar="PROMPT", help="The prompt; without one, standard input, or a chat on a terminal."),
    ] = None
    prompts: Annotated[Path | None, typer.Option(help="JSON lines with `prompt`, `messages` or `turns`.")] = None
    all_turns: Annotated[
        bool, typer.Option("--all-turns", help="Decode every turn of `turns`, not only the first.")
    ] = False
    concurrency: Annotated[int, typer.Option(min=1, max=1024, help="Prompts of a file decoded at once, at most.")] = 1
    raw: Annotated[bool, typer.Option("--raw", help="Apply no chat template.")] = False

    def read(self, compare: bool) -> Prompts:
        """The prompts, of standard input if none is given there. Raises UserError for prompts that cannot be read."""
        prompt = self.prompt
        if prompt is None and self.prompts is None and not sys.stdin.isatty():
            piped = _standard_input()
            prompt = None if compare and not piped.strip() else piped
        if prompt is not None or self.prompts is not None:
            prompts = _requests(prompt, self.prompts, self.all_turns)
        else:
            prompts = sample_prompts() if compare else []
        if self.concurrency > 1 and len(prompts) < 2 and self.prompts is None:
            raise UserError("--concurrency: needs several prompts; give them with --prompts FILE.jsonl")
        if self.all_turns and self.prompts is None:
            raise UserError("--all-turns: needs prompts with `turns`; give them with --prompts FILE.jsonl")
        return Prompts(
            prompts, from_file=self.prompts is not None, samples=compare and prompt is None and self.prompts is None
        )


@dataclass(frozen=True, slots=True, kw_only=True)
class SamplingOptions:
    """Options of sampling, and of the end of an answer."""

    PANEL: ClassVar[str] = "Answers and sampling"

    max_new_tokens: Annotated[
        int | None,
        typer.Option(
            "--max-new-tokens",
            "-n",
            min=1,
            help=f"Most tokens per answer: {MAX_NEW_TOKENS} by default, {CHAT_TOKENS} in a chat, {SAMPLE_TOKENS} for "
            "sample prompts.",
        ),
    ] = None
    stop: Annotated[list[str] | None, typer.Option(help="End the answer before this text; repeatable.")] = None
    temperature: Annotated[
        float | None,
        typer.Option(
            min=0.0,
            max=100.0,
            help="Temperature; 0 is greedy. Default: 1 with --top-k, --top-p, --min-p or --rejection, else 0.",
        ),
    ] = None
    top_k: Annotated[int, typer.Option(min=0, help="Sample from the k most probable tokens; 0 for all.")] = 0
    top_p: Annotated[
        float, typer.Option(min=0.0, max=1.0, help="Sample from the smallest set of tokens that has this probability.")
    ] = 1.0
    min_p: Annotated[
        float,
        typer.Option(min=0.0, max=1.0, help="Exclude tokens less probable than this share of the most probable one."),
    ] = 0.0
    repetition_penalty: Annotated[
        float | None, typer.Option(min=0.01, help="Above 1, against repetition; by default the model's own.")
    ] = None
    seed: Annotated[int | None, typer.Option(min=0, max=(1 << 63) - 1, help="Seed of sampling; random by default.")] = (
        None
    )
    rejection: Annotated[
        bool,
        typer.Option(
            "--rejection",
            help="Use rejection sampling: accepts more at high temperatures; a seed's output then depends on drafts.",
        ),
    ] = False

    @property
    def params(self) -> SamplingParams:
        """The parameters of sampling. Raises UserError for settings that contradict each other.

        Options that shape a distribution imply sampling, at temperature 1 unless another is given. Without a seed a
        random one is drawn.
        """
        temperature, seed = self.temperature, self.seed
        if temperature is None:
            temperature = 1.0 if self.top_k or self.top_p < 1.0 or self.min_p or self.rejection else 0.0
        if seed is None:
            seed = secrets.randbelow(1 << 31) if temperature > 0.0 else 0
        return SamplingParams(
            temperature=temperature,
            top_k=self.top_k,
            top_p=self.top_p,
            min_p=self.min_p,
            repetition_penalty=self.repetition_penalty,
            seed=seed,
            rejection=self.rejection,
        )

    @property
    def stops(self) -> tuple[str, ...]:
        """Texts before which the answer ends. Raises UserError for one that is empty or no text."""
        texts = tuple(self.stop or ())
        if "" in texts:
            raise UserError("--stop: must not be empty; omit it instead")
        if not is_text("".join(texts)):
            raise UserError("--stop: is not valid text in this terminal's encoding")
        return texts


@dataclass(frozen=True, slots=True, kw_only=True)
class StructureOptions:
    """Options of the shape that answers are held to."""

    PANEL: ClassVar[str] = "Structured answers"

    json_schema: Annotated[Path | None, typer.Option(help="A file with the JSON schema of every answer.")] = None
    regex: Annotated[str | None, typer.Option(help="A regular expression that whole answers match.")] = None
    grammar: Annotated[
        Path | None, typer.Option(help="A file with a grammar of answers, in Lark's notation or llama.cpp's.")
    ] = None

    @property
    def structure(self) -> Structure | None:
        """The shape of answers; None for free text. Raises UserError for several, and files that cannot be read."""
        given = [each for each in (self.json_schema, self.regex, self.grammar) if each is not None]
        if len(given) > 1:
            raise UserError("--json-schema, --regex, --grammar: give one of them")
        if self.regex is not None:
            return Structure.regex(self.regex)
        if self.json_schema is not None:
            return Structure.json_schema(text_of("--json-schema", self.json_schema, "check the path"))
        return None if self.grammar is None else Structure.grammar(text_of("--grammar", self.grammar, "check the path"))


@dataclass(frozen=True, slots=True, kw_only=True)
class OutputOptions:
    """Options of the output."""

    PANEL: ClassVar[str] = OUTPUT_PANEL

    compare: Annotated[
        bool,
        typer.Option(
            "--compare",
            help="Decode every prompt plainly as well, in turn; report the speed-up, and whether outputs are equal. "
            "Without a prompt, sample prompts that come with the package are decoded.",
        ),
    ] = False
    explain: Annotated[bool, typer.Option("--explain", help="Print what was planned and why, on standard error.")] = (
        False
    )
    as_json: Annotated[bool, typer.Option("--json", help="Print one JSON object per prompt, the summary last.")] = False
    quiet: Annotated[bool, typer.Option("--quiet", help="Print no progress and no closing line of figures.")] = False


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
