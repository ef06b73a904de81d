"""Token-recycling candidates from the model's own continuations, for streams that have no history yet."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray
from safetensors.numpy import save

from ssd_artifacts.tensors import ANY, MAX_HEADER, damaged, is_tensor, opened

MOST_PAIRS = 1 << 16
MOST_RANKS = 16
MOST_BYTES = 4 * MOST_PAIRS * (2 + MOST_RANKS) + MAX_HEADER


@dataclass(frozen=True, slots=True)
class SuccessorSet:
    """The target's most probable successors of token pairs, pairs seen last at the end.

    `pairs` [n, 2] hold a token and its predecessor, the predecessor first. `candidates` [n, ranks] are ordered best
    first and padded with -1.
    """

    pairs: NDArray[np.int32]
    candidates: NDArray[np.int32]

    @classmethod
    def of(cls, rows: Sequence[Sequence[int]]) -> SuccessorSet:
        """Build the set from rows that hold a pair and then at least one candidate."""
        table = np.full((len(rows), max((len(row) for row in rows), default=3)), -1, np.int32)
        for place, row in enumerate(rows):
            table[place, : len(row)] = row
        return cls(table[:, :2], table[:, 2:])

    def rows(self) -> list[list[int]]:
        """Convert the set back to the rows that `of` takes."""
        every = zip(self.pairs.tolist(), self.candidates.tolist(), strict=True)
        return [[*pair, *(candidate for candidate in best if candidate >= 0)] for pair, best in every]

    @property
    def vocabulary(self) -> int:
        """Smallest vocabulary size that covers every token of the set."""
        return 1 + int(max(part.max(initial=-1) for part in (self.pairs, self.candidates)))

    def to_bytes(self) -> bytes:
        """Serialise the set as a safetensors file."""
        return save({"pairs": np.ascontiguousarray(self.pairs), "candidates": np.ascontiguousarray(self.candidates)})

    @classmethod
    def from_file(cls, path: str) -> SuccessorSet:
        """Read what `to_bytes` wrote. Raises UserError when the file is damaged."""
        with opened(path, "successors", MOST_BYTES) as file:
            successors = cls(file.get_tensor("pairs"), file.get_tensor("candidates"))
        successors._check(path)
        return successors

    def _check(self, path: str) -> None:
        sound = (
            is_tensor(self.pairs, np.int32, ANY, 2)
            and len(self.pairs) <= MOST_PAIRS
            and is_tensor(self.candidates, np.int32, len(self.pairs), ANY)
            and 0 < self.candidates.shape[1] <= MOST_RANKS
            and bool(np.all(self.pairs >= 0) and np.all(self.candidates[:, 0] >= 0) and np.all(self.candidates >= -1))
        )
        if not sound:
            raise damaged(path, "successors", "expected int32 pairs [n, 2] and candidates [n, ranks], token ids or -1")
