"""Prompts for `generate`, and what a user may give it that keeps what it sees."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor
from transformers import LogitsProcessor, PreTrainedTokenizerBase, StoppingCriteria

from tests.folders import TEXTS

NEW = 40
Both = Callable[..., list[Any]]
"""Answers so many prompts by stock decoding and by ours."""


class Blocks:
    """A streamer that keeps what is put."""

    def __init__(self) -> None:
        self.put_values: list[Tensor] = []
        self.ends = 0

    def put(self, value: Tensor) -> None:
        assert not value.is_inference(), "such a tensor cannot be changed later"
        self.put_values.append(value)

    def end(self) -> None:
        self.ends += 1


class Watched(LogitsProcessor):
    """A processor with a state, which changes scores in place and keeps the ids that it sees."""

    def __init__(self) -> None:
        self.seen: list[list[int]] = []

    def __call__(self, input_ids: Tensor, scores: Tensor) -> Tensor:
        assert not any(tensor.is_inference() for tensor in (input_ids, scores))
        self.seen.append(input_ids[0].tolist())
        scores[:, len(self.seen) % scores.shape[1]] += 8.0
        return scores


class Seen(LogitsProcessor):
    """A processor that changes nothing, and keeps the number of ids that it sees."""

    def __init__(self) -> None:
        self.seen: list[int] = []

    def __call__(self, input_ids: Tensor, scores: Tensor) -> Tensor:
        self.seen.append(input_ids.shape[1])
        return scores


class Lengthy(StoppingCriteria):
    """Stops at some lengths, and keeps the ids and the number of scores that it sees."""

    def __init__(self) -> None:
        self.seen: list[list[int]] = []
        self.scores: list[int] = []

    def __call__(self, input_ids: Tensor, scores: Any, **kwargs: Any) -> Tensor:
        self.seen.append(input_ids[0].tolist())
        self.scores.append(-1 if scores is None else len(scores))
        return torch.full((input_ids.shape[0],), input_ids.shape[1] % 16 == 0)


def prompts(tokenizer: PreTrainedTokenizerBase, rows: int) -> dict[str, Tensor]:
    texts = [TEXTS[0], "The baker", TEXTS[1][:40], "How many apples does the river"]
    return dict(tokenizer(texts[:rows], padding=True, return_tensors="pt"))
