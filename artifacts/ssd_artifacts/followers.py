"""What a model held for probable in its own continuations: guesses for a stream that has shown nothing yet."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray
from safetensors import SafetensorError
from safetensors.numpy import load_file, save

from ssd_profiles.errors import UserError


@dataclass(frozen=True, slots=True)
class FollowerSet:
    """The target's most probable tokens behind pairs of tokens, the pairs seen last at the end.

    `pairs` [n, 2]: a token and the one before it, that one first. `candidates` [n, ranks], best first.
    """

    pairs: NDArray[np.int32]
    candidates: NDArray[np.int32]

    @classmethod
    def of(cls, rows: Sequence[Sequence[int]]) -> FollowerSet:
        """From rows of a pair and its candidates; as many are kept as every row has."""
        least = min(len(row) for row in rows)
        table = np.asarray([row[:least] for row in rows], np.int32)
        return cls(table[:, :2], table[:, 2:])

    def to_bytes(self) -> bytes:
        """The set as a safetensors file."""
        return save({"pairs": np.ascontiguousarray(self.pairs), "candidates": np.ascontiguousarray(self.candidates)})

    @classmethod
    def from_file(cls, path: str) -> FollowerSet:
        """Inverse of `to_bytes`. Raises UserError when the file is damaged."""
        try:
            tensors = load_file(path)
            followers = cls(tensors["pairs"], tensors["candidates"])
        except (OSError, SafetensorError, KeyError, TypeError, ValueError) as error:
            raise UserError(f"{path}: damaged followers ({error}); compile the bundle again") from None
        followers._check(path)
        return followers

    def _check(self, path: str) -> None:
        count = len(self.pairs) if self.pairs.ndim else 0
        sound = (
            self.pairs.shape == (count, 2)
            and self.candidates.ndim == 2
            and len(self.candidates) == count
            and all(part.dtype == np.int32 and bool(np.all(part >= 0)) for part in (self.pairs, self.candidates))
        )
        if not sound:
            raise UserError(f"{path}: damaged followers (shapes or values); compile the bundle again")
