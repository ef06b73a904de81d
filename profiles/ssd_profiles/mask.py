"""Skip masks: the sub-layers that a draft leaves out."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from itertools import groupby

import numpy as np


@dataclass(frozen=True, slots=True)
class SkipMask:
    """The sub-layers that are skipped while drafting.

    `bits` has 2L booleans for a model of L layers. Index 2i is the attention block of layer i, index 2i + 1 its MLP
    block; true means skipped.
    """

    bits: tuple[bool, ...]

    def __post_init__(self) -> None:
        if not self.bits or len(self.bits) % 2:
            raise ValueError(f"a mask has two entries a layer: expected an even, positive length, got {len(self)}")

    @classmethod
    def of(cls, num_layers: int, skipped: Iterable[int] = ()) -> SkipMask:
        """Build the mask for `num_layers` layers that skips the given sub-layers. Raises ValueError for other
        indices."""
        chosen = set(skipped)
        if not chosen <= set(range(2 * num_layers)):
            raise ValueError(f"sub-layer indices must lie in 0..{2 * num_layers - 1}, got {sorted(chosen)}")
        return cls(tuple(i in chosen for i in range(2 * num_layers)))

    @classmethod
    def uniform(cls, num_layers: int, count: int, protect: int = 1) -> SkipMask:
        """Skip `count` whole layers evenly, keeping `protect` layers at either end (SWIFT's uniform skipping).

        A larger `count` than there are unprotected layers skips all of these.
        """
        count = min(count, max(0, num_layers - 2 * protect))
        layers = np.linspace(protect, num_layers - 1 - protect, count).round()
        return cls.of(num_layers, {2 * int(layer) + part for layer in layers for part in (0, 1)})

    @classmethod
    def from_hex(cls, text: str, num_layers: int) -> SkipMask:
        """Parse what `hex` returns. Raises ValueError when `text` is not a mask of `num_layers` layers."""
        value = int(text, 16)
        if not 0 <= value < 1 << (2 * num_layers):
            raise ValueError(f"mask {text!r} does not fit {num_layers} layers")
        return cls(tuple(bool(value >> i & 1) for i in range(2 * num_layers)))

    def hex(self) -> str:
        """The mask as a hexadecimal number with sub-layer i in bit i."""
        width = -(-len(self.bits) // 4)
        return f"{sum(1 << i for i in self):0{width}x}"

    def __len__(self) -> int:
        return len(self.bits)

    def __iter__(self) -> Iterator[int]:
        """Iterate over the skipped sub-layers in ascending order."""
        return (i for i, skip in enumerate(self.bits) if skip)

    @property
    def num_layers(self) -> int:
        """L, the number of layers of the model."""
        return len(self.bits) // 2

    @property
    def attention_skipped(self) -> int:
        """Number of skipped attention blocks."""
        return sum(self.bits[0::2])

    @property
    def mlp_skipped(self) -> int:
        """Number of skipped MLP blocks."""
        return sum(self.bits[1::2])

    @property
    def first_skipped(self) -> int:
        """Index of the first skipped sub-layer, or 2L if there is none. States before it are exact."""
        return next(iter(self), len(self.bits))

    def jaccard(self, other: SkipMask) -> float:
        """|A ∩ B| / |A ∪ B| of the skipped sets; 1 when both are empty."""
        mine = set(self)
        theirs = set(other)
        return len(mine & theirs) / len(mine | theirs) if mine | theirs else 1.0

    def __str__(self) -> str:
        """List the layers whose attention and MLP are skipped, e.g. `attention 3-5,9 · mlp 4`."""
        parts = [
            f"{name} {_runs([i for i in range(self.num_layers) if self.bits[2 * i + offset]])}"
            for offset, name in enumerate(("attention", "mlp"))
        ]
        return " · ".join(parts)


def _runs(numbers: list[int]) -> str:
    if not numbers:
        return "none"
    spans = []
    for _, pairs in groupby(enumerate(numbers), lambda pair: pair[1] - pair[0]):
        run = [number for _, number in pairs]
        spans.append(f"{run[0]}-{run[-1]}" if len(run) > 1 else f"{run[0]}")
    return ",".join(spans)
