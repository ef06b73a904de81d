"""Plans of a draft: the sub-layers that it skips, and the precision of those that it runs."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import groupby

import numpy as np

FULL = 0
"""Precision of sub-layers that run on the model's own weights."""
BITS = (8, 4)
"""Bits of light copies of weights, the nearer to the model first."""
Mask = tuple[bool, ...]
"""2L booleans for a model of L layers, true = skipped: 2i is layer i's mixer (mostly attention), 2i + 1 its MLP."""


@dataclass(frozen=True, slots=True)
class SubLayerPlan:
    """A skip or a precision of its weights for each sub-layer, and a precision for the head, while drafting."""

    skipped: Mask
    light: tuple[int, ...] = ()
    """Bits of each sub-layer's weights and, last, of the head's: 8 or 4, or `FULL`, as for all that is skipped.
    Empty if everything that runs does so in full."""

    def __post_init__(self) -> None:
        if not self.skipped or len(self.skipped) % 2:
            raise ValueError(f"a mask has two entries per layer: expected an even, positive length, got {len(self)}")
        if not self.light:
            return
        if len(self.light) != len(self.skipped) + 1 or not set(self.light) <= {FULL, *BITS}:
            raise ValueError(f"a mask's bits are {FULL}, 8 or 4: expected {len(self) + 1} numbers, got {self.light}")
        # Equal drafts are equal plans.
        kept = tuple(
            FULL if skipped else bits for skipped, bits in zip((*self.skipped, False), self.light, strict=True)
        )
        object.__setattr__(self, "light", kept if any(kept) else ())

    @classmethod
    def of(cls, num_layers: int, skipped: Iterable[int] = ()) -> SubLayerPlan:
        """The plan for `num_layers` layers that skips these sub-layers. Raises ValueError for other indices."""
        chosen = set(skipped)
        if not chosen <= set(range(2 * num_layers)):
            raise ValueError(f"sub-layer indices must lie in 0..{2 * num_layers - 1}, got {sorted(chosen)}")
        return cls(tuple(i in chosen for i in range(2 * num_layers)))

    @classmethod
    def uniform(cls, num_layers: int, count: int, protect: int = 1) -> SubLayerPlan:
        """Skip `count` whole layers evenly, keeping `protect` layers at either end (SWIFT's uniform skipping).

        A larger `count` than there are unprotected layers skips all of these.
        """
        count = min(count, max(0, num_layers - 2 * protect))
        layers = np.linspace(protect, num_layers - 1 - protect, count).round()
        return cls.of(num_layers, {2 * int(layer) + part for layer in layers for part in (0, 1)})

    @classmethod
    def from_hex(cls, text: str, num_layers: int) -> SubLayerPlan:
        """Parse what `hex` returns. Raises ValueError when `text` is not a mask of `num_layers` layers."""
        first, *light = text.split(".")
        skipped = _from_hex(first, 2 * num_layers)
        if not light:
            return cls(skipped)
        if len(light) != len(BITS):
            raise ValueError(
                f"mask {text!r}: expected {len(BITS)} numbers after the first (8 and 4 bits), got {len(light)}"
            )
        sets = [_from_hex(part, 2 * num_layers + 1) for part in light]
        if any(sum(each) > 1 for each in zip((*skipped, False), *sets, strict=True)):
            raise ValueError(f"mask {text!r} has two precisions for one sub-layer")
        eights, fours = sets
        return cls(
            skipped, tuple(8 if eight else 4 if four else FULL for eight, four in zip(eights, fours, strict=True))
        )

    def hex(self) -> str:
        """The mask as a hexadecimal number with sub-layer i in bit i.

        A plan with light sub-layers has two more, after full stops: of those in 8 bits, and of those in 4. The head is
        bit 2L in them.
        """
        parts = [_to_hex(self.skipped)]
        if self.light:
            parts += [_to_hex([each == bits for each in self.light]) for bits in BITS]
        return ".".join(parts)

    def lightened(self, bits: int | Mapping[int, int]) -> SubLayerPlan:
        """Return the plan with other bits: one number for everything, or bits by sub-layer index, 2L for the head."""
        if isinstance(bits, int):
            return SubLayerPlan(self.skipped, (bits,) * (len(self) + 1))
        known = self.light or (FULL,) * (len(self) + 1)
        return SubLayerPlan(self.skipped, tuple(bits.get(i, before) for i, before in enumerate(known)))

    def bits_of(self, index: int) -> int:
        """Bits of a sub-layer's weights, or of the head's (2L): 8 or 4, or `FULL`."""
        return self.light[index] if self.light else FULL

    @property
    def head_bits(self) -> int:
        """Bits of the head's weights."""
        return self.bits_of(len(self.skipped))

    @property
    def is_plain(self) -> bool:
        """Whether it drafts with the model itself: nothing is skipped and nothing is light."""
        return not (any(self.skipped) or self.light)

    def __len__(self) -> int:
        return len(self.skipped)

    def __iter__(self) -> Iterator[int]:
        """Iterate over the skipped sub-layers in ascending order."""
        return (i for i, skip in enumerate(self.skipped) if skip)

    @property
    def num_layers(self) -> int:
        """L, the number of layers of the model."""
        return len(self.skipped) // 2

    @property
    def mixers_skipped(self) -> int:
        """Number of skipped mixers."""
        return sum(self.skipped[0::2])

    @property
    def mlps_skipped(self) -> int:
        """Number of skipped MLPs."""
        return sum(self.skipped[1::2])

    @property
    def first_changed(self) -> int:
        """Index of the first sub-layer that is skipped or light, 2L without any. States before it are exact."""
        return next((i for i, skip in enumerate(self.skipped) if skip or self.bits_of(i)), len(self.skipped))

    def jaccard(self, other: SubLayerPlan) -> float:
        """Jaccard similarity of two plans' skips and sub-layers in fewer bits; 1 if neither plan has any."""
        mine = self._changes
        theirs = other._changes
        return len(mine & theirs) / len(mine | theirs) if mine | theirs else 1.0

    @property
    def _changes(self) -> set[tuple[int, int]]:
        """Pairs of a sub-layer that does not run in full and its bits, `FULL` if it is skipped."""
        return {(i, FULL) for i in self} | {(i, bits) for i, bits in enumerate(self.light) if bits}

    def __str__(self) -> str:
        """Layers whose mixer and MLP are skipped, e.g. `mixer 3-5,9 · mlp 4`; then the light ones."""
        text = " · ".join(self._listed(set(self), always=True)) if set(self) else "nothing"
        for bits in BITS:
            chosen = {i for i, each in enumerate(self.light) if each == bits}
            if chosen:
                head = ["head"] * (self.head_bits == bits)
                text += f"; in {bits} bits: {' · '.join([*self._listed(chosen), *head])}"
        return text

    def _listed(self, chosen: set[int], always: bool = False) -> list[str]:
        """Texts such as `mixer 3-5` and `mlp 4` of the chosen blocks; a kind without any only if `always`."""
        layers = [[i for i in range(self.num_layers) if 2 * i + part in chosen] for part in (0, 1)]
        return [f"{name} {_runs(of)}" for name, of in zip(("mixer", "mlp"), layers, strict=True) if of or always]


def _to_hex(chosen: Sequence[bool]) -> str:
    """The hexadecimal number with entry i in bit i."""
    digits = -(-len(chosen) // 4)
    return f"{sum(1 << i for i, each in enumerate(chosen) if each):0{digits}x}"


def _from_hex(text: str, count: int) -> Mask:
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
