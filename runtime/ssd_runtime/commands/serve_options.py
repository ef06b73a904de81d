"""Options of `ssd-serve` alone, in groups."""

from __future__ import annotations

import re
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, ClassVar

import typer

from ssd_artifacts.sharing.reachable import is_local
from ssd_profiles.errors import UserError
from ssd_runtime.commands.options import DRAFT_PANEL, text_of
from ssd_runtime.planning.registry import check_strategy
from ssd_runtime.serving.http.keys import KEY_VARIABLE
from ssd_runtime.serving.ray_app.ray_cluster import LOCAL

GRACE = 25.0
"""Seconds of grace, so that the server is gone 30 s after SIGTERM, when others would kill it."""


@dataclass(frozen=True, slots=True, kw_only=True)
class ServerOptions:
    """The server's address, its clients' rights, and what it tells them."""

    PANEL: ClassVar[str] = "Server"

    host: Annotated[str, typer.Option(help="Address to listen on; 0.0.0.0 for all.")] = "127.0.0.1"
    port: Annotated[int, typer.Option(min=0, max=65535, help="Port to listen on; 0 for a free one.")] = 8000
    name: Annotated[str | None, typer.Option(help="The model's name for clients; by default its own.")] = None
    api_key: Annotated[
        list[str] | None,
        typer.Option("--api-key", help=f"A key that clients must send; repeatable, or {KEY_VARIABLE}=A,B."),
    ] = None
    share_between_keys: Annotated[
        bool,
        typer.Option("--share-between-keys", help="Let all keys share cached prefixes and what decoding has learned."),
    ] = False
    reload: Annotated[
        bool,
        typer.Option(
            "--reload", help="Load the bundle again when its folder changes; without --replicas, SIGHUP does so too."
        ),
    ] = False
    grace: Annotated[
        float,
        typer.Option(
            min=0.0,
            max=3600.0,
            help="Seconds that open requests have to finish in at shutdown, which takes no more than 5 s more.",
        ),
    ] = GRACE
    chat_template: Annotated[
        Path | None, typer.Option(help="A file with the chat template (Jinja) to use in place of the model's own.")
    ] = None
    allow_origin: Annotated[
        list[str] | None,
        typer.Option(help="An origin, such as https://chat.example, whose web pages may use the server; repeatable."),
    ] = None
    allow_host: Annotated[
        list[str] | None,
        typer.Option(
            help="A name that requests may reach the server under, besides those of this machine; repeatable, * for "
            "all. By default names are checked only if the server listens on this machine alone."
        ),
    ] = None
    temperature: Annotated[
        float, typer.Option(min=0.0, max=2.0, help="Temperature of requests that name none; 0 is greedy.")
    ] = 1.0
    no_page: Annotated[bool, typer.Option("--no-page", help="Serve no chat page at /.")] = False

    @property
    def allowed_hosts(self) -> tuple[str, ...] | None:
        """Names that requests may reach the server under, besides those of this machine; None for all."""
        return tuple(self.allow_host or ()) if self.allow_host or is_local(self.host) else None

    @property
    def allowed_origins(self) -> tuple[str, ...]:
        """Origins as browsers send them. Raises UserError for what can be none."""
        origins = [origin.lower().rstrip("/") for origin in self.allow_origin or ()]
        for origin in origins:
            if origin != "*" and not re.fullmatch(r"[a-z][a-z0-9+.-]*://[^/?#@\s]+", origin):
                raise UserError(f"--allow-origin: {origin!r} is no origin; give one such as https://chat.example, or *")
        return tuple(origins)

    @property
    def template(self) -> str | None:
        """The text of `--chat-template`. Raises UserError if the file cannot be read, or is empty."""
        path = self.chat_template
        if path is None:
            return None
        text = text_of("--chat-template", path, "give a file with a template")
        if not text.strip():
            raise UserError(f"--chat-template: {path} is empty; give a file with a template")
        return text


@dataclass(frozen=True, slots=True, kw_only=True)
class LimitOptions:
    """Limits of requests."""

    PANEL: ClassVar[str] = "Limits"

    allow_strategies: Annotated[
        list[str] | None,
        typer.Option(
            help="Strategies, as A,B, that requests may choose besides --strategy, auto, plain and lookup; repeatable.",
            rich_help_panel=DRAFT_PANEL,
        ),
    ] = None
    max_concurrency: Annotated[int, typer.Option(min=1, max=1024, help="Answers decoded at once, at most.")] = 8
    max_queue: Annotated[int, typer.Option(min=0, max=65536, help="Answers that may wait for a place.")] = 64
    kv_memory: Annotated[
        str | None,
        typer.Option(
            help="Memory for keys and values, prefixes included, e.g. 4G; by default half of the free memory, "
            "but at most twice what --max-concurrency full contexts need."
        ),
    ] = None
    max_prompt_tokens: Annotated[
        int | None, typer.Option(min=1, help="Longest prompt; by default what the context holds.")
    ] = None
    max_new_tokens: Annotated[
        int | None,
        typer.Option(min=1, help="Longest answer that a request may ask for; by default what the context holds."),
    ] = None
    max_body_bytes: Annotated[int, typer.Option(min=1024, help="Largest body of a request, in bytes.")] = 4 << 20

    def allowed(self, has_bundle: bool) -> tuple[str, ...]:
        """The names of `--allow-strategies`. Raises UserError for an unknown one, or if one needs a bundle."""
        names = tuple(name for each in self.allow_strategies or () for name in each.split(","))
        for name in names:
            check_strategy(name, has_bundle, "--allow-strategies")
        return names


@dataclass(frozen=True, slots=True, kw_only=True)
class ReplicaOptions:
    """The cluster that replicas of the server run on."""

    PANEL: ClassVar[str] = "Cluster"

    replicas: Annotated[
        str | None,
        typer.Option(help="Serve from N processes on Ray, or MIN:MAX by the load; by default one, without Ray."),
    ] = None
    ray: Annotated[
        str, typer.Option(help="Address of the cluster for --replicas, such as auto; `local` starts one here.")
    ] = LOCAL
