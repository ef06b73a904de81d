"""Options that several commands share."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Annotated

import typer

from ssd_artifacts.manifest import tool_version
from ssd_profiles.errors import UserError
from ssd_runtime.planning.registry import NAMES


def _show_version(asked: bool) -> None:
    if asked:
        print(f"ssd-decoding {tool_version()}")
        raise typer.Exit


ArtifactOption = Annotated[
    str | None,
    typer.Option(
        "--artifact",
        "--bundle",
        help="A bundle: a folder, an archive, hf://org/name@revision, oci://host/name:tag or `demo`.",
    ),
]
SignatureOption = Annotated[
    Path | None,
    typer.Option(
        "--require-signature", help="A public key (PEM): the bundle must be signed by it, and is trusted then."
    ),
]
ModelOption = Annotated[
    str | None, typer.Option("--model", help="Hub id, folder, .gguf file or `demo`; the bundle's by default.")
]
StrategyOption = Annotated[str, typer.Option("--strategy", help=", ".join(NAMES))]
AssignmentsOption = Annotated[list[str] | None, typer.Option("--set", help="NAME=VALUE: a parameter of the strategy.")]
DeviceOption = Annotated[str | None, typer.Option("--device", help="cpu, cuda, cuda:1, …")]
DtypeOption = Annotated[
    str | None,
    typer.Option("--dtype", help="fp32, bf16, fp16, or auto: of fp32 and bf16 the one that decodes faster here."),
]
WeightsOption = Annotated[
    str | None,
    typer.Option(
        "--weights", help="packed keeps a .gguf file's weights quantised; dense, the default, makes them fp32."
    ),
]
WeightMemoryOption = Annotated[
    str | None,
    typer.Option(
        "--weight-memory",
        help="Memory for weights packed for the processor, e.g. 2G or 0; by default half of what is free.",
    ),
]
DraftBitsOption = Annotated[
    str,
    typer.Option("--draft-bits", help="Bits of lighter copies of the weights, for drafts alone: auto, 8, 4 or none."),
]
ThreadsOption = Annotated[int | None, typer.Option("--threads", min=1, max=1024, help="Processor threads.")]
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
