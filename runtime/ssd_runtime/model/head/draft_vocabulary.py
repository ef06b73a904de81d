"""The part of the vocabulary that drafts score."""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Iterable, Sequence

import torch

from ssd_runtime.weights.kernels.formats import TILE
from ssd_runtime.weights.kernels.native import Native

FREQUENT = 24_576
"""Tokens that are always scored. A BPE tokenizer numbers its tokens as it found them, the frequent ones first."""
SEEN = 16_384
"""Most others, which are scored because they, or neighbours, have occurred; the latest stay."""
LEAST_COVERAGE = 0.95
"""Least share of the text that these tokens must cover; below it, drafts use the whole head. A miss costs about a
plain step."""
FADING = 1 / 256
"""Weight of the latest token in the coverage."""


class DraftVocabulary:
    """Frequent tokens and those seen lately, in tiles of 16 neighbours, as our own kernels hold their outputs.

    A draft that scores these alone reads a part of the head (FR-Spec, arXiv 2502.14856). Verification scores all, so
    the output is the same.
    """

    def __init__(self, vocabulary: int, frequent: int = FREQUENT, seen: int = SEEN) -> None:
        """`frequent` and `seen` are multiples of 16; of a vocabulary that is not much larger, drafts score all."""
        self.is_useful = vocabulary >= 2 * frequent
        self._tiles = -(-vocabulary // TILE)
        self._frequent = frequent // TILE
        self._most_seen = seen // TILE
        self._seen = OrderedDict[int, None]()
        """Tiles beside those of frequent tokens, the latest last."""
        self._coverage = 1.0
        self._version = 0
        self._made: tuple[int, Native, Native] | None = None
        """Version of the tiles, the whole head's kernel, and the kernel of these tiles; None before the first draft."""

    def update(self, tokens: Iterable[int], answered: bool) -> None:
        """Add tokens of a prompt, or of an answer, which drafts should have scored."""
        for token in tokens:
            tile = token // TILE
            known = tile < self._frequent or tile in self._seen
            if answered:
                self._coverage += FADING * (known - self._coverage)
            if self._frequent <= tile < self._tiles:
                self._seen[tile] = None
                self._seen.move_to_end(tile)
                self._version += not known
        while len(self._seen) > self._most_seen:
            self._seen.popitem(last=False)

    def serves(self, kernels: Sequence[Native]) -> bool:
        """Whether the head of these `kernels` is one of our own, and the tokens cover enough of the text."""
        return self.is_useful and self._coverage >= LEAST_COVERAGE and len(kernels) == 1

    def head(self, kernels: Sequence[Native]) -> Native | None:
        """The head of these `kernels` with these tokens alone, whose other logits are minus infinity.

        None if it does not serve.
        """
        if not self.serves(kernels):
            return None
        [kernel] = kernels
        if self._made is None or self._made[0] != self._version or self._made[1] is not kernel:
            frequent = torch.arange(self._frequent, dtype=torch.int32)
            tiles = torch.cat([frequent, torch.tensor(sorted(self._seen), dtype=torch.int32)])
            self._made = self._version, kernel, kernel.among(tiles)
        return self._made[2]
