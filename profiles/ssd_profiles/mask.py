"""Skip masks: the sub-layers that a draft leaves out, and the precision of those that it runs."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import groupby

import numpy as np

FULL = 0
"""Precision of sub-layers that run on the model's own weights."""
WIDTHS = (8, 4)
"""Bits of lighter copies of weights, the nearer to the model first."""


@dataclass(frozen=True, slots=True)
class SkipMask:
    """The sub-layers that are skipped while drafting, and those that run on lighter copies of their weights.

    `bits` has 2L booleans for a model of L layers. Index 2i is the attention block of layer i, index 2i + 1 its MLP
    block; true means skipped.
    """

    bits: tuple[bool, ...]
    light: tuple[int, ...] = ()
    """Width of each sub-layer's weights and, last, of the head's: 8 or 4 bits, or `FULL`, as for all that is skipped.
    Empty if everything that runs does so in full."""

    def __post_init__(self) -> None:
        if not self.bits or len(self.bits) % 2:
            raise ValueError(f"a mask has two entries per layer: expected an even, positive length, got {len(self)}")
        if not self.light:
            return
        if len(self.light) != len(self.bits) + 1 or not set(self.light) <= {FULL, *WIDTHS}:
            raise ValueError(f"a mask's widths are {FULL}, 8 or 4: expected {len(self) + 1}, got {self.light}")
        # Equal drafts are equal masks.
        kept = tuple(FULL if skipped else width for skipped, width in zip((*self.bits, False), self.light, strict=True))
        object.__setattr__(self, "light", kept if any(kept) else ())

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
        skipped, *of_width = text.split(".")
        bits = _from_hex(skipped, 2 * num_layers)
        if not of_width:
            return cls(bits)
        if len(of_width) != len(WIDTHS):
            raise ValueError(f"mask {text!r} has not one number for each of {len(WIDTHS)} widths")
        sets = [_from_hex(part, 2 * num_layers + 1) for part in of_width]
        if any(sum(each) > 1 for each in zip((*bits, False), *sets, strict=True)):
            raise ValueError(f"mask {text!r} has two precisions for one sub-layer")
        eights, fours = sets
        return cls(bits, tuple(8 if eight else 4 if four else FULL for eight, four in zip(eights, fours, strict=True)))

    def hex(self) -> str:
        """The mask as a hexadecimal number with sub-layer i in bit i.

        A mask with lighter sub-layers has two more, after full stops: of those in 8 bits, and of those in 4. The head
        is bit 2L in them.
        """
        parts = [_to_hex(self.bits)]
        if self.light:
            parts += [_to_hex([each == width for each in self.light]) for width in WIDTHS]
        return ".".join(parts)

    def lightened(self, widths: int | Mapping[int, int]) -> SkipMask:
        """The mask with other widths, by index of the sub-layer, 2L for the head; or with one width for everything."""
        if isinstance(widths, int):
            return SkipMask(self.bits, (widths,) * (len(self) + 1))
        known = self.light or (FULL,) * (len(self) + 1)
        return SkipMask(self.bits, tuple(widths.get(i, width) for i, width in enumerate(known)))

    def width(self, index: int) -> int:
        """Width of a sub-layer's weights, or of the head's (2L): 8 or 4, or `FULL`."""
        return self.light[index] if self.light else FULL

    @property
    def head_width(self) -> int:
        """Width of the head's weights."""
        return self.width(len(self.bits))

    @property
    def unlit(self) -> SkipMask:
        """The mask with everything that it runs in full."""
        return SkipMask(self.bits)

    @property
    def is_plain(self) -> bool:
        """Whether it drafts with the model itself: nothing is skipped and nothing is lighter."""
        return not (any(self.bits) or self.light)

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
    def first_changed(self) -> int:
        """Index of the first sub-layer that is skipped or lighter, 2L without any. States before it are exact."""
        return next((i for i, skip in enumerate(self.bits) if skip or self.width(i)), len(self.bits))

    def jaccard(self, other: SkipMask) -> float:
        """|A ∩ B| / |A ∪ B| of the sub-layers that do not run in full, with how they do not; 1 if both are empty."""
        mine = self._changes
        theirs = other._changes
        return len(mine & theirs) / len(mine | theirs) if mine | theirs else 1.0

    @property
    def _changes(self) -> set[tuple[int, int]]:
        """Pairs of a sub-layer that does not run in full and its width, `FULL` if it is skipped."""
        return {(i, FULL) for i in self} | {(i, width) for i, width in enumerate(self.light) if width}

    def __str__(self) -> str:
        """Layers whose attention and MLP are skipped, e.g. `attention 3-5,9 · mlp 4`; then the lighter ones."""
        text = " · ".join(self._listed(set(self), always=True)) if set(self) else "nothing"
        for width in WIDTHS:
            chosen = {i for i, each in enumerate(self.light) if each == width}
            if chosen:
                head = ["head"] * (self.head_width == width)
                text += f"; in {width} bits: {' · '.join([*self._listed(chosen), *head])}"
        return text

    def _listed(self, chosen: set[int], always: bool = False) -> list[str]:
        """The layers whose attention is chosen, and those whose MLP is; where there are none, only if `always`."""
        layers = [[i for i in range(self.num_layers) if 2 * i + part in chosen] for part in (0, 1)]
        return [f"{name} {_runs(of)}" for name, of in zip(("attention", "mlp"), layers, strict=True) if of or always]


def _to_hex(chosen: Sequence[bool]) -> str:
    """A hexadecimal number with entry i in bit i."""
    width = -(-len(chosen) // 4)
    return f"{sum(1 << i for i, each in enumerate(chosen) if each):0{width}x}"


def _from_hex(text: str, count: int) -> tuple[bool, ...]:
    """Inverse of `_to_hex` for `count` entries. Raises ValueError for a number of more bits."""
    value = int(text, 16)
    if not 0 <= value < 1 << count:
        raise ValueError(f"mask {text!r} does not fit {count // 2} layers")
    return tuple(bool(value >> i & 1) for i in range(count))


def _runs(numbers: list[int]) -> str:
    if not numbers:
        return "none"
    spans = []
    for _, pairs in groupby(enumerate(numbers), lambda pair: pair[1] - pair[0]):
        run = [number for _, number in pairs]
        spans.append(f"{run[0]}-{run[-1]}" if len(run) > 1 else f"{run[0]}")
    return ",".join(spans)
