"""Options that several commands share, grouped in the panels of their help."""

from __future__ import annotations

import re
from collections.abc import Callable
from pathlib import Path
from typing import Annotated, get_args

import typer

from ssd_artifacts.manifest import tool_version
from ssd_profiles.errors import UserError
from ssd_runtime.planning.registry import FIXED, NAMES
from ssd_runtime.weights.draft_bits import DraftBits
from ssd_runtime.weights.dtype_names import AUTO, DTYPE_NAMES

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


ArtifactOption = Annotated[
    str | None,
    typer.Option(
        "--bundle",
        "--artifact",
        help="A bundle: a folder, an archive, hf://org/name@revision, oci://host/name:tag or `demo`.",
        rich_help_panel=MODEL_PANEL,
    ),
]
SignatureOption = Annotated[
    Path | None,
    typer.Option(
        "--require-signature",
        help="Public key (PEM) that must have signed the bundle; a signed bundle may choose the model.",
        rich_help_panel=MODEL_PANEL,
    ),
]
ModelOption = Annotated[
    str | None,
    typer.Option(
        "--model",
        "-m",
        help="Hub id, folder, .gguf file, `demo` or `demo@wheel`; by default the bundle's model.",
        rich_help_panel=MODEL_PANEL,
    ),
]
SINGLE_METHODS = tuple(name for name in NAMES if name not in ("auto", "plain"))
StrategyOption = Annotated[
    str,
    typer.Option(
        "--strategy",
        help="auto (default) picks before every cycle what is expected to decode fastest; plain drafts nothing; "
        f"the others are single methods for study: {', '.join(SINGLE_METHODS)}.",
        rich_help_panel=DRAFT_PANEL,
        autocompletion=values(*(name for name in NAMES if not name.startswith(FIXED))),
    ),
]
AssignmentsOption = Annotated[
    list[str] | None,
    typer.Option("--set", help="NAME=VALUE: a parameter of the strategy; repeatable.", rich_help_panel=DRAFT_PANEL),
]
DeviceOption = Annotated[
    str | None,
    typer.Option("--device", help="cpu, cuda, cuda:1, …; by default CUDA if available.", rich_help_panel=MODEL_PANEL),
]
DtypeOption = Annotated[
    str | None,
    typer.Option(
        "--dtype",
        help="fp32, bf16, fp16 (or float32, …); by default fp32 on a CPU, the checkpoint's type on CUDA. "
        "auto: on a CPU times both once, and takes bf16 only if it decodes faster than fp32.",
        rich_help_panel=MODEL_PANEL,
        autocompletion=values(*DTYPE_NAMES.values(), *DTYPE_NAMES, AUTO),
    ),
]
WeightsOption = Annotated[
    str | None,
    typer.Option(
        "--weights",
        help="dense: dequantise a .gguf file to fp32; packed: keep it quantised. Default: as your own or a signed "
        "bundle was compiled, else dense.",
        rich_help_panel=MODEL_PANEL,
        autocompletion=values("dense", "packed"),
    ),
]
WeightMemoryOption = Annotated[
    str | None,
    typer.Option(
        "--weight-memory",
        help="Memory for all copies of weights, for kernels and for light drafts, e.g. 2G or 0; by default half of "
        "what is free.",
        rich_help_panel=MODEL_PANEL,
    ),
]
DraftBitsOption = Annotated[
    str,
    typer.Option(
        "--draft-bits",
        help="Bits of the quantised weight copies that only drafts use: auto, 8, 4 or none.",
        rich_help_panel=DRAFT_PANEL,
        autocompletion=values(*get_args(DraftBits)),
    ),
]
AllowSpecialOption = Annotated[
    bool,
    typer.Option(
        "--allow-special",
        help="Let control tokens that messages spell, such as <|im_end|>, take effect; by default they are text.",
        rich_help_panel=MODEL_PANEL,
    ),
]
ThreadsOption = Annotated[
    int | None,
    typer.Option("--threads", "-t", min=1, max=1024, help="Number of CPU threads.", rich_help_panel=MODEL_PANEL),
]
VersionOption = Annotated[
    bool, typer.Option("--version", callback=_show_version, is_eager=True, help="Print the version and exit.")
]
"""The option `--version`, as the type of a parameter that the command itself does not use."""


def read_size(text: str | None, option: str = "--weight-memory") -> int | None:
    """Parse the size that an option gives into bytes; None stays None. Raises UserError when it is not a size."""
    if text is None:
        return None
    match = re.fullmatch(r"(\d+(?:\.\d+)?)([KMGT]?)(?:i?B)?", text, re.IGNORECASE)
    if not match:
        raise UserError(f"{option}: expected a size such as 2G, 500M or 0, got {text!r}")
    return int(float(match[1]) * 1024 ** " KMGT".index(match[2].upper() or " "))
