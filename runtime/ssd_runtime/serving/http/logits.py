"""Logits processors of a server's requests: penalties on counts, biases, and a record of log-probabilities."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from threading import Lock

from torch import Tensor
from transformers import LogitsProcessor


class CountPenalties(LogitsProcessor):
    """Lowers the logits of tokens by how often the answer has them: OpenAI's presence and frequency penalties."""

    repeatable = True

    def __init__(self, prompt_tokens: int, presence: float, frequency: float) -> None:
        self._prompt_tokens = prompt_tokens
        self._presence = presence
        self._frequency = frequency

    def __call__(self, input_ids: Tensor, scores: Tensor) -> Tensor:
        """Penalise `scores` [1, vocabulary] after the ids [1, n], the prompt's first."""
        new, counts = input_ids[0, self._prompt_tokens :].unique(return_counts=True)
        scores[0, new] -= self._presence + self._frequency * counts.to(scores.dtype)
        return scores


@dataclass(slots=True)
class TokenLogprobs:
    """Log-probabilities of one position, before penalties, temperature and filters."""

    top: list[tuple[int, float]]
    """The most probable tokens, the best first."""
    values: Tensor | None = None
    """All log-probabilities [vocabulary], until the token is known."""
    token: int = 0
    logprob: float = 0.0

    def choose(self, token: int) -> None:
        """Keep the token's log-probability, and drop the others."""
        if self.values is not None:
            self.token, self.logprob, self.values = token, float(self.values[token]), None


class LogprobRecorder(LogitsProcessor):
    """Notes the log-probabilities of every choice, once per token and in order, and changes nothing.

    The engine's thread calls it; other threads may read.
    """

    def __init__(self, top: int) -> None:
        """`top` is the number of most probable tokens to note."""
        self._top = top
        self._rows: list[TokenLogprobs] = []
        self._begin = 0
        """Number of the answer's token that the first row is about."""
        self._lock = Lock()

    def skip(self, tokens: int) -> None:
        """Begin after the answer's first `tokens` tokens, which are known already."""
        self._begin = tokens

    def __call__(self, input_ids: Tensor, scores: Tensor) -> Tensor:
        """Note the log-probabilities of `scores` [1, vocabulary], and return these."""
        values = scores[0].log_softmax(-1)
        best = values.topk(min(self._top, values.shape[0]))
        with self._lock:
            if self._rows:
                self._rows[-1].choose(int(input_ids[0, -1]))
            # A grammar leaves some tokens no probability, which JSON has no number for.
            kept = int(best.values.isfinite().sum())
            top = zip(best.indices[:kept].tolist(), best.values[:kept].tolist(), strict=True)
            self._rows.append(TokenLogprobs(list(top), values))
        return scores

    def read(self, begin: int, tokens: Sequence[int]) -> list[TokenLogprobs]:
        """The notes of the answer's `tokens`, the first of which is number `begin`."""
        with self._lock:
            first = begin - self._begin
            rows = self._rows[first : first + len(tokens)]
            for row, token in zip(rows, tokens, strict=True):
                row.choose(token)
            return rows
