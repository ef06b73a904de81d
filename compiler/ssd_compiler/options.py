"""Options of `ssd-compile` alone, in groups."""

from __future__ import annotations

import re
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, ClassVar

import typer

from ssd_artifacts.domain_config import MAX_CONCURRENCY
from ssd_compiler.settings import SEARCH_METHODS, SearchMethod
from ssd_profiles.errors import UserError
from ssd_runtime.commands.options import OUTPUT_PANEL, SignatureOption, values

MOST_FOUND = 64


@dataclass(frozen=True, slots=True, kw_only=True)
class DomainOptions:
    """The domains whose masks are searched, and their anchors."""

    PANEL: ClassVar[str] = "Domains"

    domains: Annotated[
        list[str] | None,
        typer.Option(
            help="Packaged domains, e.g. cnn,gsm8k; or auto[:N] to find N domains in one --domain-file; repeatable."
        ),
    ] = None
    domain_file: Annotated[
        list[str] | None, typer.Option(help="NAME=prompts.jsonl: a domain of your own prompts; repeatable.")
    ] = None
    anchors: Annotated[int, typer.Option(min=1, max=32, help="Anchors per domain; KNN-SSD has 10.")] = 16

    @property
    def found(self) -> int | None:
        """Number of domains to find, 0 to choose it; None when domains are named. Raises UserError if unreadable."""
        text = ",".join(self.domains or [])
        if all(part.partition(":")[0] != "auto" for part in text.split(",")):
            return None
        match = re.fullmatch(r"auto(?::([1-9][0-9]?))?", text)
        if match is None or int(match[1] or 0) > MOST_FOUND:
            raise UserError(f"--domains {text}: expected auto or auto:N alone, with N from 1 to {MOST_FOUND}")
        return int(match[1] or 0)

    @property
    def named(self) -> tuple[str, ...]:
        """Names of packaged domains."""
        texts = [] if self.found is not None else self.domains or []
        return tuple(name for text in texts for name in text.split(",") if name)

    @property
    def files(self) -> tuple[tuple[str, str], ...]:
        """Pairs (name, path) of the user's domains. Raises UserError for what is no such pair."""
        return tuple(_named_file(text) for text in self.domain_file or [])


@dataclass(frozen=True, slots=True, kw_only=True)
class SearchOptions:
    """Options of the search for masks, and of their timing."""

    PANEL: ClassVar[str] = "Search"

    search: Annotated[
        str,
        typer.Option(
            help=f"How masks are searched: {', '.join(SEARCH_METHODS)}; self-sd times every mask, "
            "a minute each, for an hour at most unless --budget says otherwise.",
            autocompletion=values(*SEARCH_METHODS),
        ),
    ] = "both"
    evaluations: Annotated[
        int | None,
        typer.Option(
            min=8, max=100_000, help="Most masks evaluated per domain; 128 by default, if there is no --budget."
        ),
    ] = None
    budget: Annotated[str | None, typer.Option(help="Time for all searches together, e.g. 90s, 10m, 1h.")] = None
    max_wait: Annotated[
        str,
        typer.Option(
            help="Longest wait for other processes where they keep this device too busy to be measured, e.g. 90s, 1h."
        ),
    ] = "5m"
    coarse: Annotated[
        bool,
        typer.Option(
            "--coarse",
            help="Search with coarse latencies where the device stays too busy; they stay out of the bundle.",
        ),
    ] = False
    concurrency: Annotated[
        str, typer.Option(help="Numbers of sequences at once with which chosen masks are timed, e.g. 1,4,8.")
    ] = "1"
    seed: Annotated[int, typer.Option(min=0, max=2**32 - 1, help="Fixes splits and random choices.")] = 0
    exits: Annotated[
        int,
        typer.Option(
            min=0, max=256, help="Number of layers that get an exit head, e.g. 8, for `ssd-run --strategy exit`."
        ),
    ] = 0

    @property
    def method(self) -> SearchMethod:
        """The way to search. Raises UserError for an unknown one."""
        for method in SEARCH_METHODS:
            if method == self.search:
                return method
        raise UserError(f"--search {self.search}: expected one of {', '.join(SEARCH_METHODS)}")

    @property
    def budget_seconds(self) -> float | None:
        """Time for all searches together; None without a bound. Raises UserError if it is no time."""
        return _seconds("--budget", self.budget) if self.budget is not None else None

    @property
    def max_wait_seconds(self) -> float:
        """Longest wait for other processes. Raises UserError if it is no time."""
        return _seconds("--max-wait", self.max_wait)

    @property
    def loads(self) -> tuple[int, ...]:
        """The numbers of `--concurrency`, ascending. Raises UserError for what are no such numbers."""
        parts = self.concurrency.split(",")
        if not all(re.fullmatch(r"[0-9]{1,3}", part) and 1 <= int(part) <= MAX_CONCURRENCY for part in parts):
            raise UserError(
                f"--concurrency: expected numbers from 1 to {MAX_CONCURRENCY} such as 1,4,8, got {self.concurrency!r}"
            )
        return tuple(sorted({int(part) for part in parts}))


@dataclass(frozen=True, slots=True, kw_only=True)
class WriteOptions:
    """The bundle that is written, and the one that it extends."""

    PANEL: ClassVar[str] = "Bundle"

    out: Annotated[Path, typer.Option("--out", "-o", help="Folder that the bundle is written to.")] = Path("bundle")
    base: Annotated[
        str | None,
        typer.Option(
            "--from",
            help="A bundle that gets the new domains; its domains, mixture and latency table stay as they are.",
        ),
    ] = None
    require_signature: SignatureOption = None
    resume: Annotated[
        bool,
        typer.Option("--resume", help="Continue an interrupted compile into the same folder with the same options."),
    ] = False
    as_json: Annotated[
        bool, typer.Option("--json", help="Print the summary as one JSON object.", rich_help_panel=OUTPUT_PANEL)
    ] = False


@dataclass(frozen=True, slots=True, kw_only=True)
class ClusterOptions:
    """The cluster that domains are spread over."""

    PANEL: ClassVar[str] = "Cluster"

    ray: Annotated[
        str | None,
        typer.Option(help="Spread the domains over the Ray cluster at this address; `local` starts one here."),
    ] = None
    workers: Annotated[
        int | None, typer.Option(min=1, max=4096, help="Workers on the cluster, with --ray; by default one per host.")
    ] = None


def _named_file(text: str) -> tuple[str, str]:
    name, separator, path = text.partition("=")
    if not separator or not name or not path:
        raise UserError(f"--domain-file: expected NAME=prompts.jsonl, got {text!r}")
    return name, path


def _seconds(option: str, text: str) -> float:
    match = re.fullmatch(r"([0-9]+(?:\.[0-9]+)?)([smh]?)", text)
    seconds = float(match[1]) * {"": 1, "s": 1, "m": 60, "h": 3600}[match[2]] if match else 0.0
    if not 0 < seconds < float("inf"):
        raise UserError(f"{option}: expected a time such as 90s, 10m or 1h, got {text!r}")
    return seconds
