"""The sizes of what one sequence keeps, layer by layer: keys and values, or states."""

from __future__ import annotations

from collections.abc import Mapping, Sequence, Set
from dataclasses import dataclass, field

import torch

from ssd_runtime.model.mixers.mixer import Mixer

USUAL_STATES = 5
"""States of a mixer that a sequence usually has: of the committed tokens, the latest rows, and three to return to."""
USUAL_ROWS = 32
"""Rows whose inputs it usually keeps."""


@dataclass(frozen=True, slots=True)
class KVLayout:
    """The sizes and devices of the keys and values of one sequence, layer by layer."""

    devices: Sequence[torch.device]
    windows: Sequence[int | None]
    """Number of tokens that a layer's rows see, their own included; None for all."""
    heads: Sequence[tuple[int, int]]
    """The number of a layer's key-value heads, and their size."""
    dtype: torch.dtype
    """Dtype of the rows that are written and read."""
    max_slots: int
    """Most slots of one sequence."""
    key_multiple: int = 1
    """Attention reads keys in multiples of so many. Slots that hold none yet are then zero."""
    quantised: bool = False
    """Whether a head's key or value is held as numbers of 8 bits, and after them their scale (`quantised_slots`)."""
    mixers: Mapping[int, Mixer] = field(default_factory=dict)
    """The mixers, by layer, that have a state, and no keys unless they are parallel."""
    parallel: bool = False
    """Whether layers with a mixer have attention, too."""
    sharing: Set[int] = frozenset()
    """The layers that read another layer's keys and have none."""

    @property
    def held_dtype(self) -> torch.dtype:
        """The dtype of the memory."""
        return torch.int8 if self.quantised else self.dtype

    @property
    def keyed(self) -> list[int]:
        """The layers that have keys."""
        without = self.sharing if self.parallel else self.sharing | self.mixers.keys()
        return [layer for layer in range(len(self.devices)) if layer not in without]

    def slot_shape(self, layer: int) -> tuple[int, int]:
        """The number of a layer's keys of one slot, and their length in numbers of `held_dtype`."""
        count, size = self.heads[layer]
        return count, size + (torch.float32.itemsize if self.quantised else 0)

    def layer_bytes(self, layer: int) -> int:
        """Bytes that one slot takes in a layer with keys."""
        count, width = self.slot_shape(layer)
        return 2 * count * width * self.held_dtype.itemsize

    @property
    def bytes_per_slot(self) -> int:
        """Bytes that one slot takes over all layers."""
        return sum(map(self.layer_bytes, self.keyed))

    @property
    def state_bytes(self) -> int:
        """Bytes of a sequence's states and inputs as they are reckoned: a longer draft takes more."""
        return sum(USUAL_STATES * mixer.state_bytes + USUAL_ROWS * mixer.row_bytes for mixer in self.mixers.values())
