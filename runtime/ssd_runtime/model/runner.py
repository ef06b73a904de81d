"""Runs the forwards that sequences request, in as few and as large ones as possible."""

from __future__ import annotations

from collections.abc import Generator, Hashable, Sequence
from dataclasses import dataclass
from itertools import islice
from typing import Any, TypeVar

import torch
from torch import Tensor

from ssd_profiles.mask import FULL, SubLayerPlan
from ssd_runtime.model.batch.batch import Batch, Segment, Variants
from ssd_runtime.model.decoder import Decoder
from ssd_runtime.sampling.argmax import argmax_with_logit

T = TypeVar("T")
HEAD_ROWS = 128
"""Most rows whose logits are in memory at once if only the best tokens are requested."""


@dataclass(frozen=True, slots=True)
class Forward:
    """A request to run rows of one sequence through sub-layers `first`, …, `last` - 1 as `mask` says.

    The answer is the states [rows, hidden] after the last of these. With `keep_states` it is a list: the states before
    the first sub-layer, and those after each, skipped or not. A search may have several `segments`, of one cache or of
    several.
    """

    segments: Sequence[Segment | Variants]
    rows: Sequence[int] | Tensor
    """Tokens to embed, on the host or on the device [rows], or states [rows, hidden] before sub-layer `first`."""
    mask: SubLayerPlan | None = None
    first: int = 0
    last: int | None = None
    keep_states: bool = False

    @property
    def is_full(self) -> bool:
        """Whether it runs the full model to its end, as a prompt's chunk, a plain step and a verification do."""
        return self.mask is None and self.last is None

    @property
    def size(self) -> int:
        """Number of rows."""
        return len(self.rows)

    @property
    def key(self) -> Hashable:
        """Requests of equal keys run as one forward."""
        return Forward, self.embeds, self.mask, self.first, self.last, self.keep_states

    @property
    def embeds(self) -> bool:
        """Whether the rows are tokens."""
        return not isinstance(self.rows, Tensor) or self.rows.ndim == 1


@dataclass(frozen=True, slots=True)
class _OfRows:
    """A request about the rows of a tensor."""

    x: Tensor
    is_full = False

    @property
    def size(self) -> int:
        """Number of rows."""
        return self.x.shape[0]


@dataclass(frozen=True, slots=True)
class Head(_OfRows):
    """A request for the logits [rows, vocabulary] of states `x` [rows, hidden], `normed` or not.

    With `best` the answer is a pair: the most probable tokens [rows] and their probabilities [rows]. Searches have more
    rows than the memory has room for logits. `bits` are those of the head's weights (`SubLayerPlan.head_bits`). For
    `drafting`, logits of rare tokens may be minus infinity (`DraftVocabulary`).
    """

    normed: bool = False
    best: bool = False
    bits: int = FULL
    drafting: bool = False

    @property
    def key(self) -> Hashable:
        """Requests of equal keys run as one."""
        return Head, self.normed, self.best, self.bits, self.drafting


@dataclass(frozen=True, slots=True)
class FinalNorm(_OfRows):
    """A request for the final norm of states `x` [rows, hidden]."""

    @property
    def key(self) -> Hashable:
        """Requests of equal keys run as one."""
        return FinalNorm


@dataclass(frozen=True, slots=True)
class Read(_OfRows):
    """A request for the numbers of `x` [n] as a list; all requests together make the host wait for a device once."""

    @property
    def key(self) -> Hashable:
        """Requests of equal keys run as one."""
        return Read, self.x.dtype


@dataclass(frozen=True, slots=True)
class Ahead:
    """A request to run the MTP layer on `tokens` [rows], on the host or on the device, of one sequence.

    `states` [rows, hidden] are normed final states: each row's is that of the token before it. The answer is the
    layer's normed states [rows, hidden], from which a `Head` predicts the tokens after the rows'. With `keys_alone` it
    means nothing: the rows' keys are written, and that is all.
    """

    segment: Segment
    tokens: Sequence[int] | Tensor
    states: Tensor
    keys_alone: bool = False
    is_full = False

    @property
    def size(self) -> int:
        """Number of rows."""
        return len(self.tokens)

    @property
    def key(self) -> Hashable:
        """Requests of equal keys run as one."""
        return Ahead, self.keys_alone


ModelRequest = Forward | Head | FinalNorm | Read | Ahead
Work = Generator[ModelRequest, Any, T]
"""The work of one sequence, which yields requests, receives their answers and returns its result."""


class ModelRunner:
    """Answers requests with the model of a decoder. Requests of equal keys share one forward."""

    def __init__(self, decoder: Decoder) -> None:
        self.decoder = decoder

    @torch.inference_mode()
    def answer(self, requests: Sequence[ModelRequest]) -> list[Any]:
        """Run the requests; returns their answers in order."""
        groups: dict[Hashable, list[int]] = {}
        for place, request in enumerate(requests):
            groups.setdefault(request.key, []).append(place)
        answers: list[Any] = [None] * len(requests)
        for places in groups.values():
            group = [requests[place] for place in places]
            for place, answer in zip(places, self._together(group), strict=True):
                answers[place] = answer
        return answers

    @torch.inference_mode()
    def finish(self, work: Work[T]) -> T:
        """Run the work of a lone sequence; returns its result."""
        answer: Any = None
        while True:
            try:
                request = work.send(answer)
            except StopIteration as stop:
                return stop.value
            [answer] = self.answer([request])

    def _together(self, requests: Sequence[Any]) -> Sequence[Any]:
        if isinstance(requests[0], Head):
            return self._heads(requests)
        if isinstance(requests[0], FinalNorm):
            normed = self.decoder.head.norm(concatenated([request.x for request in requests]))
            return _split(normed, [request.size for request in requests])
        if isinstance(requests[0], Read):
            numbers = iter(concatenated([request.x for request in requests]).tolist())
            return [list(islice(numbers, request.size)) for request in requests]
        if isinstance(requests[0], Ahead):
            return self._ahead(requests)
        return self._forward(requests)

    def _ahead(self, requests: Sequence[Ahead]) -> Sequence[Tensor]:
        embedded = self.decoder.embed(*_tokens([request.tokens for request in requests]))
        states = concatenated([request.states for request in requests])
        batch = Batch.of([request.segment for request in requests])
        x = self.decoder.run_ahead(embedded, states, batch, requests[0].keys_alone)
        return _split(x, [request.size for request in requests])

    def _heads(self, requests: Sequence[Head]) -> Sequence[Any]:
        one = requests[0]
        x = concatenated([request.x for request in requests])
        sizes = [request.size for request in requests]
        logits = self.decoder.head if one.normed else self.decoder.logits
        if not one.best:
            return _split(logits(x, one.bits, one.drafting), sizes)
        parts = [_best(logits(rows, one.bits, one.drafting)) for rows in x.split(HEAD_ROWS)]
        tokens, probabilities = (_split(torch.cat(each), sizes) for each in zip(*parts, strict=True))
        return list(zip(tokens, probabilities, strict=True))

    def _forward(self, requests: Sequence[Forward]) -> Sequence[Any]:
        one = requests[0]
        decoder = self.decoder
        if one.embeds:
            x = decoder.embed(*_tokens([request.rows for request in requests]))
        else:
            x = concatenated([request.rows for request in requests if isinstance(request.rows, Tensor)])
        batch = Batch.of([segment for request in requests for segment in request.segments])
        sizes = [request.size for request in requests]
        if not one.keep_states:
            ended = decoder.run(x, batch, mask=one.mask, first=one.first, last=one.last)
            return _split(ended, sizes)
        states = [x]
        decoder.run(x, batch, mask=one.mask, first=one.first, last=one.last, states=states)
        return [list(parts) for parts in zip(*(_split(x, sizes) for x in states), strict=True)]


def _best(logits: Tensor) -> tuple[Tensor, Tensor]:
    """The most probable token of each row of `logits` [rows, vocabulary], and its probability."""
    wide = logits.float()
    tokens, top = argmax_with_logit(wide)
    return tokens, (top - wide.logsumexp(-1)).exp()


def _tokens(rows: Sequence[Sequence[int] | Tensor]) -> list[list[int] | Tensor]:
    """The tokens of all requests in order, with those on the host joined where they are next to each other."""
    joined = list[list[int] | Tensor]()
    for each in rows:
        last = joined[-1] if joined else None
        if isinstance(each, Tensor):
            joined.append(each)
        elif isinstance(last, list):
            last += each
        else:
            joined.append(list(each))
    return joined


def concatenated(rows: Sequence[Tensor]) -> Tensor:
    """The rows of several tensors in one; a lone tensor is not copied."""
    return rows[0] if len(rows) == 1 else torch.cat(list(rows))


def _split(rows: Tensor, sizes: Sequence[int]) -> Sequence[Tensor]:
    return [rows] if len(sizes) == 1 else rows.split(list(sizes))
