"""The rows of a forward: their sequences, the slots that they write and the keys that they see."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field, replace

import torch
from torch import Tensor

from ssd_runtime.model.batch.rotary import Rotation, by_heads, joined, repeated
from ssd_runtime.model.cache.kv_cache import KVCache


@dataclass(frozen=True, slots=True)
class LayerView:
    """The view of one sequence's rows in the layers of one kind: the keys in slots `begin`, …, `end` - 1.

    `bias` hides the keys among these that a row does not see (`builder.bias_of`); None if every row sees them all.
    It is [rows, 1, 1, keys] if attention runs row by row.
    `rotation` is None in layers without one.
    """

    rotation: Rotation | None
    begin: int
    end: int
    bias: Tensor | None
    causal: bool = False
    """Whether the rows are the last of these keys' positions and see no later ones; attention then needs no bias."""

    def on(self, device: torch.device) -> LayerView:
        """A copy of the view on `device`."""
        rotation = None if self.rotation is None else (self.rotation[0].to(device), self.rotation[1].to(device))
        return replace(self, rotation=rotation, bias=None if self.bias is None else self.bias.to(device))


@dataclass(frozen=True, slots=True)
class Lineage:
    """The row, or the committed tokens, that each row of a forward comes after: where its mixers' states begin.

    Rows that simply follow each other after their first slot have none.
    """

    parents: tuple[int, ...]
    """Each row's earlier row in the forward; -1 for none."""
    starts: tuple[int, ...]
    """Number of the cache's tokens before a row without a parent."""
    kept: bool
    """Whether rows may be committed, so that their inputs are kept."""

    @property
    def is_apart(self) -> bool:
        """Whether each of several rows follows committed tokens itself, as in a search."""
        return not self.kept and len(self.parents) > 1 and max(self.parents) < 0

    @classmethod
    def of_tree(cls, visible: Tensor, start: int) -> Lineage:
        """The lineage of a tree after `start` tokens, whose rows see their ancestors: `visible` [n, n] on the host."""
        before: list[list[bool]] = visible.tolist()
        parents = [max((row for row in range(place) if seen[row]), default=-1) for place, seen in enumerate(before)]
        return cls(parents=tuple(parents), starts=(start,) * len(before), kept=True)

    @classmethod
    def of_blocks(cls, start: int, rows: int, block: int) -> Lineage:
        """The lineage of a search's rows at `start`, …: every `block` of them follow the full model's tokens before."""
        parents = tuple(row - 1 if row % block else -1 for row in range(rows))
        return cls(parents=parents, starts=tuple(start + row // block * block for row in range(rows)), kept=False)

    @classmethod
    def apart(cls, starts: Sequence[int]) -> Lineage:
        """The lineage of a search's rows, each of which follows the full model's first `starts[i]` tokens."""
        return cls(parents=(-1,) * len(starts), starts=tuple(starts), kept=False)


@dataclass(frozen=True, slots=True)
class Segment:
    """Rows of one sequence, whose keys and values are written to slots `slot`, `slot` + 1, … of its cache."""

    cache: KVCache
    slot: int | Tensor
    """The first slot, or on the device the slot of every row [rows]."""
    rows: int
    """Number of rows."""
    views: tuple[LayerView, ...]
    """One view per layer kind."""
    lineage: Lineage | None = None
    """None for consecutive rows."""
    certain: bool = False
    """Whether all rows will be committed, as those of a prompt are: then mixers keep no inputs of them."""


@dataclass(frozen=True, slots=True)
class Variants:
    """Variants of consecutive rows of a sequence, the same number of each row, next to each other.

    A variant sees the cache's keys before its position, and its own key. Nothing is written to the cache.
    """

    cache: KVCache
    rows: int
    """Number of all variants together."""
    views: tuple[LayerView, ...]
    """One view per layer kind; a `bias` has one row for all variants of a row."""
    lineage: Lineage

    def times(self, count: int) -> Variants:
        """Variants that have each of these `count` times."""
        views = tuple(replace(view, rotation=repeated(view.rotation, count)) for view in self.views)
        starts = [start for start in self.lineage.starts for _ in range(count)]
        return Variants(self.cache, self.rows * count, views, Lineage.apart(starts))


@dataclass(frozen=True, slots=True)
class Batch:
    """Packed rows of any number of sequences, in segments.

    Norms, projections and MLPs take all rows at once, whatever their sequence. Only attention runs per segment.
    """

    segments: tuple[Segment | Variants, ...]
    rotations: tuple[Rotation | None, ...]
    """One rotation of all rows per layer kind."""
    sequences: tuple[Segment, ...] | None
    """The segments, if all are rows of sequences in slots that the host knows; None otherwise."""
    _copies: dict[torch.device, Batch] = field(default_factory=dict, repr=False, compare=False)
    _turns: dict[tuple[int, int], Rotation] = field(default_factory=dict, repr=False, compare=False)

    @classmethod
    def of(cls, segments: Sequence[Segment | Variants]) -> Batch:
        """The batch of the segments' rows, one segment after the other."""
        kinds = zip(*(segment.views for segment in segments), strict=True)
        sequences = tuple(each for each in segments if isinstance(each, Segment) and isinstance(each.slot, int))
        return cls(
            segments=tuple(segments),
            rotations=tuple(joined([view.rotation for view in views]) for views in kinds),
            sequences=sequences if len(sequences) == len(segments) else None,
        )

    @property
    def rows(self) -> int:
        """Number of rows of all segments."""
        return sum(segment.rows for segment in self.segments)

    def turns(self, kind: int, heads: int, kept: int) -> Rotation | None:
        """The rotation of a layer kind by heads of queries, and of `kept` keys and values (`by_heads`), made once."""
        if (rotation := self.rotations[kind]) is None:
            return None
        if (kind, kept) not in self._turns:
            self._turns[kind, kept] = by_heads(rotation, heads, kept)
        return self._turns[kind, kept]

    def on(self, device: torch.device) -> Batch:
        """A copy of the batch for layers on `device`, made once."""
        if device not in self._copies:
            self._copies[device] = Batch.of(
                [replace(each, views=tuple(view.on(device) for view in each.views)) for each in self.segments]
            )
        return self._copies[device]
