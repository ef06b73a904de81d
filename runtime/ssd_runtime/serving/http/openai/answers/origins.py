"""Tells how the tokens of a streamed answer were drafted: our extension `include_drafts`."""

from __future__ import annotations

from collections.abc import Sequence
from time import perf_counter

from ssd_runtime.drafting.tree import Origin
from ssd_runtime.engine.output.text_stream import Decode, TextStream
from ssd_runtime.serving.http.openai.answers.events import Json
from ssd_runtime.serving.http.pending import PendingRequest


class OriginReader:
    """Splits an answer's text into its tokens, with the origin of each."""

    def __init__(self, decode: Decode, pending: PendingRequest) -> None:
        self._pending = pending
        self._text = TextStream(decode, pending.request.settings.stops, lambda _: None)
        self._untold: list[Json] = []
        """Tokens that no chunk has told yet."""
        self._tokens = 0
        self._last: Origin = "plain"

    def read(self, text: str, tokens: Sequence[int], origins: Sequence[Origin]) -> None:
        """Note new text, and the tokens that are complete with it.

        The text of a character that several tokens spell is the last one's. Text that was held back, because a stop
        might have begun with it, comes with a later token, or at the end with none.
        """
        told = [
            {"text": self._text.skip([token]), "origin": origin} for token, origin in zip(tokens, origins, strict=True)
        ]
        if told:
            self._last = origins[-1]
            told[-1]["text"] = text[sum(len(each["text"]) for each in told[:-1]) :]
        elif text:
            told = [{"text": text, "origin": self._last}]
        self._untold += told
        self._tokens += len(tokens)

    def tell(self) -> Json:
        """The tokens since the last call, with the answer's speed so far and that of plain decoding."""
        told, self._untold = self._untold, []
        first, plain = self._pending.first, self._pending.plain_seconds
        seconds = 0.0 if first is None else perf_counter() - first
        return {
            "tokens": told,
            "tokens_per_second": round((self._tokens - 1) / seconds, 2) if self._tokens > 1 else None,
            "plain_tokens_per_second": None if plain is None else round(1.0 / plain, 2),
        }
