"""Options of a server, and its settings once the model is known."""

from __future__ import annotations

from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from ssd_runtime.engine.opening import LoadSettings

BODY_SECONDS = 30.0
MOST_ANSWERS = 64
"""Most answers that one request may ask for: prompts × `n`."""


@dataclass(frozen=True, slots=True, kw_only=True)
class ServiceOptions:
    """The options of a server, under the names of `ssd-serve`; plain data, so that every replica gets the same."""

    artifact: str | None = None
    model: str | None = None
    require_signature: Path | None = None
    load: LoadSettings = field(default_factory=LoadSettings)
    strategy: str = "auto"
    assignments: tuple[str, ...] = ()
    allow_strategies: tuple[str, ...] = ()
    """Strategies that requests may choose besides `strategy` and those that every server offers."""
    name: str | None = None
    api_keys: tuple[str, ...] = ()
    share_between_keys: bool = False
    max_concurrency: int = 8
    max_queue: int = 64
    max_prompt_tokens: int | None = None
    """Most tokens of a prompt; None for what the context holds."""
    max_new_tokens: int | None = None
    """Most new tokens that a request may ask for; None for what the context holds."""
    max_body_bytes: int = 4 << 20
    cache_bytes: int | None = None
    """Bytes for keys and values; None for half of the free memory."""
    chat_template: str | None = None
    """The text of a template in place of the model's own."""
    allowed_origins: tuple[str, ...] = ()
    """Origins, such as `https://chat.example`, whose web pages may use the server; `*` for all."""
    allowed_hosts: tuple[str, ...] | None = None
    """Names, beside those of this machine, that requests may reach the server under; `*` for all, None for no check."""
    temperature: float = 1.0
    page: bool = True
    """Whether the chat page is served at `/`."""


@dataclass(frozen=True, slots=True, kw_only=True)
class ServerSettings:
    """The options of a server, with what follows from its model."""

    options: ServiceOptions = field(default_factory=ServiceOptions)
    model_name: str
    max_context: int
    """Tokens of the model's context: a prompt with its answer."""
    vocabulary: int
    parameters: Any = None
    """The strategy's parameters (`RunSettings.parameters`)."""
    has_bundle: bool = False
    light: bool = True
    """Whether requests may draft on light copies of the weights: they are made before the first request, or never."""
    body_seconds: float = BODY_SECONDS
    """Seconds within which a request's body has to be complete."""
    created: int = 0
    """Unix time at which the model was loaded."""

    @property
    def longest_prompt(self) -> int:
        """Most tokens of a prompt, after which one new token has room."""
        most = self.max_context - 1
        return most if self.options.max_prompt_tokens is None else min(most, self.options.max_prompt_tokens)
