"""The answer to one request: its new tokens, with their cycles and seconds."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Literal

from ssd_runtime.planning.plan import Cycle

FinishReason = Literal["stop", "length", "context"]
"""`stop`: an end-of-sequence token or a stop condition. `length`: `max_new_tokens`. `context`: the context is full."""


@dataclass(slots=True)
class Generation:
    """The new tokens of one request, with their cycles and seconds."""

    prompt_tokens: int
    domain: str | None = None
    token_ids: list[int] = field(default_factory=list)
    cycles: list[Cycle] = field(default_factory=list)
    prefill_seconds: float = 0.0
    decode_seconds: float = 0.0
    first_token_seconds: float = 0.0
    """Seconds from the start to the first new token; the prefill is most of them."""
    finish_reason: FinishReason = "length"
    """The reason is `stop` even if the stop is the last token that is allowed."""
    num_cached_tokens: int = 0
    """Prompt tokens that were not run, because the prompt began like an earlier sequence."""
    answered: int = 0
    """Number of the first new tokens that were given, because an earlier run of the request chose them."""

    @property
    def decoded(self) -> int:
        """Number of new tokens that this run chose."""
        return len(self.token_ids) - self.answered

    @property
    def later_tokens(self) -> int:
        """Number of those tokens after the first one, which the prefill yields."""
        return max(0, self.decoded - 1)

    @property
    def target_forwards(self) -> int:
        """Number of full-model forwards after the prefill."""
        return len(self.cycles)

    @property
    def num_draft_tokens(self) -> int:
        """Tokens drafted, except those after the end of generation."""
        return sum(cycle.num_draft_tokens for cycle in self.cycles)

    @property
    def num_accepted_tokens(self) -> int:
        """Accepted tokens that are part of the output."""
        return sum(cycle.num_accepted_tokens for cycle in self.cycles)

    @property
    def tokens_per_second(self) -> float:
        """Tokens after the first per second of decoding, prefill excluded."""
        return self.later_tokens / self.decode_seconds if self.decode_seconds else 0.0
