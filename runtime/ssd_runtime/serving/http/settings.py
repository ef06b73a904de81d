"""Settings of a server."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

BODY_SECONDS = 30.0
MOST_ANSWERS = 64
"""Most answers that one request may ask for: prompts × `n`."""


@dataclass(frozen=True, slots=True, kw_only=True)
class ServerSettings:
    """Limits of a server, and its defaults for what a request leaves open."""

    model_name: str
    max_context: int
    """Tokens of the model's context: a prompt with its answer."""
    vocabulary: int
    strategy: str = "auto"
    parameters: Any = None
    """The strategy's parameters (`RunSettings.parameters`)."""
    has_bundle: bool = False
    allowed_strategies: tuple[str, ...] = ()
    """Strategies that requests may choose besides `strategy` and those that every server offers."""
    light: bool = True
    """Whether requests may draft on light copies of the weights: they are made before the first request, or never."""
    temperature: float = 1.0
    max_prompt_tokens: int | None = None
    """Most tokens of a prompt; None for what the context holds."""
    max_new_tokens: int | None = None
    """Most new tokens that a request may ask for; None for what the context holds."""
    max_body_bytes: int = 4 << 20
    body_seconds: float = BODY_SECONDS
    """Seconds within which a request's body has to be complete."""
    allowed_origins: tuple[str, ...] = ()
    """Origins, such as `https://chat.example`, whose web pages may use the server; `*` for all."""
    allowed_hosts: tuple[str, ...] | None = None
    """Names, beside those of this machine, that requests may reach the server under; `*` for all, None for no check."""
    page: bool = True
    """Whether the chat page is served at `/`."""
    created: int = 0
    """Unix time at which the model was loaded."""

    @property
    def longest_prompt(self) -> int:
        """Most tokens of a prompt, after which one new token has room."""
        most = self.max_context - 1
        return most if self.max_prompt_tokens is None else min(most, self.max_prompt_tokens)
