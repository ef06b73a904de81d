"""Requests to an engine's thread, and the events that come back."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from time import perf_counter

from ssd_runtime.drafting.tree import Origin
from ssd_runtime.engine.output.result import Outcome
from ssd_runtime.engine.turn import RunSettings
from ssd_runtime.serving.http.logits import LogprobRecorder

FINISH_REASONS = {"stop": "stop", "length": "length", "context": "length"}
"""OpenAI's finish reason, which is vLLM's `finished_reason` too, by ours."""


@dataclass(frozen=True, slots=True, kw_only=True)
class GenerationRequest:
    """One answer that is wanted: a prompt's token ids and the settings of decoding."""

    ids: list[int]
    settings: RunSettings
    stream: str = ""
    """Name of the stream whose statistics and prefixes it shares."""
    in_blocks: bool = True
    """Whether blocks tell its text as it comes: delivering them takes time from every step."""
    answered: tuple[int, ...] = ()
    """The first tokens of its answer, which another server has chosen and sent."""
    logprobs: LogprobRecorder | None = None
    """Log-probabilities of its tokens, if they are wanted; one of its processors notes them."""


@dataclass(frozen=True, slots=True)
class Block:
    """New text of an answer, with the tokens that are complete with it."""

    text: str
    tokens: tuple[int, ...]
    origins: tuple[Origin, ...] = ()
    """The origin of each token."""


@dataclass(frozen=True, slots=True, kw_only=True)
class End:
    """The last event of a request: its outcome, its error, or its cancellation."""

    outcome: Outcome | None = None
    error: Exception | None = None
    cancelled: bool = False
    tokens: tuple[int, ...] = ()
    """Tokens that came in no block, because they have no text."""
    origins: tuple[Origin, ...] = ()
    """The origin of each of them."""


Listener = Callable[[int, Block | End], None]
"""Receives the place of a request among those submitted together, and an event."""


@dataclass(slots=True, eq=False)
class PendingRequest:
    """A request on its way; times are those of `perf_counter`."""

    request: GenerationRequest
    listener: Callable[[Block | End], None]
    submitted: float = field(default_factory=perf_counter)
    begun: float | None = None
    """The beginning of the first step that it took part in."""
    first: float | None = None
    """The time of its first token."""
    latest: float = 0.0
    """The time of its latest tokens."""
    tokens: list[int] = field(default_factory=list)
    """Tokens that no event has told yet, because their text is held back."""
    origins: list[Origin] = field(default_factory=list)
    """Their origins."""
    next_origins: Sequence[Origin] = ("plain",)
    """Origins of the next tokens; the very first one comes from the prefill."""
    plain_seconds: float | None = None
    """Seconds of a plain step, as `Observation` has them of its latest cycle."""
    ended: float | None = None
    cancelled: bool = False

    def write(self, text: str) -> None:
        """Tell new text with its tokens, unless it is held back."""
        if text:
            self.tell(Block(text, tuple(self.tokens), tuple(self.origins)))
            self.tokens.clear()
            self.origins.clear()

    def tell(self, event: Block | End) -> None:
        """Pass an event on; a request whose listener fails is cancelled."""
        try:
            self.listener(event)
        except Exception:  # whoever asked is gone, for instance with their event loop
            self.cancelled = True

    @property
    def seconds_to_first_token(self) -> float | None:
        """Seconds from the request to its first token, waiting included; None if it has none."""
        return None if self.first is None else self.first - self.submitted
