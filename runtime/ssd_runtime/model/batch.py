"""The rows of a forward: their sequences, their positions, the slots that they write and the keys that they see."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace

import torch
from torch import Tensor
from torch.nn.functional import pad

from ssd_runtime.model.attention import bias_of
from ssd_runtime.model.cache.kv_cache import KVCache
from ssd_runtime.model.families import LayerKind
from ssd_runtime.model.rotary import RotaryTable, Rotation, joined, repeated

MOST_BY_ROW = 32
"""Most rows of a verification whose attention runs row by row; chunks of a prompt have more."""
_Sight = tuple[int | None, int]
"""A window, and a number of key-value heads."""
_Seen = tuple[int, int, Tensor | None, bool]
"""The first slot seen, the one after the last, the bias, and whether rows see the keys causally without one."""


@dataclass(frozen=True, slots=True)
class LayerView:
    """The view of one sequence's rows in the layers of one kind: the keys in slots `begin`, …, `end` - 1.

    `bias` hides the keys among these that a row does not see (`attention.bias_of`); None if every row sees them all.
    It is [rows, 1, 1, keys] if attention runs row by row.
    `rotation` has a row per head of queries, keys and values. For value heads it is the identity, so that one operation
    rotates queries, keys and values. It is None in layers without a rotation.
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

    def on(self, device: torch.device) -> Segment:
        """A copy of the segment for layers on `device`."""
        return replace(self, views=tuple(view.on(device) for view in self.views))


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

    def on(self, device: torch.device) -> Variants:
        """A copy of the variants for layers on `device`."""
        return replace(self, views=tuple(view.on(device) for view in self.views))


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

    def on(self, device: torch.device) -> Batch:
        """A copy of the batch for layers on `device`, made once."""
        if device not in self._copies:
            self._copies[device] = Batch.of([segment.on(device) for segment in self.segments])
        return self._copies[device]


@dataclass(frozen=True, slots=True)
class BatchBuilder:
    """Builds the segments of one model's forwards."""

    kinds: Sequence[LayerKind]
    tables: Mapping[str, RotaryTable]
    heads: int
    """Number of heads of queries."""
    dtype: torch.dtype
    device: torch.device
    key_multiple: int = 1
    """Segments see keys in multiples of so many; those after the last row's are hidden. If it is not 1, attention runs
    a lone row as two equal ones, unless it runs `by_row`."""
    causal: bool = False
    """Whether attention of consecutive rows without a window needs no bias; only with a `key_multiple` of 1."""
    by_row: bool = False
    """Whether the attention of up to `MOST_BY_ROW` rows runs row by row (`attention.attend_by_row`)."""
    query_scaling: tuple[float, int] | None = None
    """`families.query_scaling`."""

    def consecutive(self, cache: KVCache, start: int, n: int, certain: bool = False) -> Segment:
        """Rows at positions `start`, …, `start` + n - 1; each sees itself and the rows before it in its window.

        They are `certain` if all of them will be committed.
        """
        end = start + n
        seen: dict[_Sight, _Seen] = {}
        for window, kv_heads in self._sights():
            begin = max(0, start - window + 1) if window else 0
            last = self._last_key(begin, end)
            bias: Tensor | None = None
            causal = self.causal and window is None and n > 1
            if not causal and (n > 1 or self.key_multiple > 1):
                visible = self._causal(start=start, end=end, begin=begin, window=window)
                visible = pad(visible, (0, last - end))
                if self.by_row and n <= MOST_BY_ROW:
                    bias = bias_of(visible.to(self.device), 1, self.dtype)[:, None, None]
                else:
                    bias = self._bias(self._paired(visible), kv_heads)
            seen[window, kv_heads] = begin, last, bias, causal
        views = self._views(self._rotations(slice(start, end), end, cache.long), seen)
        return Segment(cache=cache, slot=start, rows=n, views=views, certain=certain)

    def unseeing(self, cache: KVCache, start: int, n: int) -> Segment:
        """Rows at positions `start`, …, `start` + n - 1 that write their keys and see none."""
        seen: dict[_Sight, _Seen] = dict.fromkeys(self._sights(), (start, start, None, False))
        return Segment(
            cache, start, n, self._views(self._rotations(slice(start, start + n), start + n, cache.long), seen)
        )

    def timed(self, cache: KVCache, start: int, n: int) -> Segment:
        """`consecutive` rows for measurements of time, wherever they start: mixers begin at their empty states."""
        return replace(self.consecutive(cache, start, n), lineage=Lineage.of_blocks(0, n, n))

    def tree(
        self,
        cache: KVCache,
        positions: Tensor,
        span: range,
        slot: int | Tensor,
        visible: Tensor,
        key_positions: Tensor,
        lineage: Lineage | None = None,
    ) -> Segment:
        """Rows at any `positions` [n] within `span`, written to `slot`, `slot` + 1, … or to every row's own slot [n].

        They see the slots where `visible` [n, slots] is true; in sliding layers only those whose `key_positions`
        [slots] lie in the window. `span` spares the host a read of the positions. Models with mixers that are no
        attention need the rows' `lineage`.
        """
        seen: dict[_Sight, _Seen] = {}
        for window, kv_heads in self._sights():
            inside = visible & (key_positions > positions[:, None] - window) if window else visible
            # Up to `slot`, slot i holds position i, so slots before the window's first can be left out.
            begin = max(0, span.start - window + 1) if window else 0
            if isinstance(slot, int):
                begin = min(slot, begin)
            last = self._last_key(begin, visible.shape[1])
            bias = self._bias(self._paired(pad(inside[:, begin:], (0, last - visible.shape[1]))), kv_heads)
            seen[window, kv_heads] = begin, last, bias, False
        rotations = self._rotations(positions, span.stop, cache.long)
        views = self._views(rotations, seen)
        return Segment(cache=cache, slot=slot, rows=len(positions), views=views, lineage=lineage)

    def variants(self, cache: KVCache, start: int, n: int) -> Variants:
        """One variant of each of the rows at positions `start`, …, `start` + n - 1."""
        end = start + n
        seen: dict[_Sight, _Seen] = {}
        for window, kv_heads in self._sights():
            begin = max(0, start - window + 1) if window else 0
            visible = self._causal(start=start, end=end, begin=begin, window=window)
            before = visible[:, :-1].tril(start - begin - 1)
            seen[window, kv_heads] = begin, end - 1, bias_of(before, 1, self.dtype) if n > 1 else None, False
        views = self._views(self._rotations(slice(start, end), end, cache.long), seen)
        return Variants(cache, n, views, Lineage.apart(range(start, end)))

    def _last_key(self, begin: int, end: int) -> int:
        """The end of the slots that rows see from `begin` on: `end`, rounded up to `key_multiple` slots."""
        return begin - (begin - end) // self.key_multiple * self.key_multiple  # ceiling to a multiple

    def _sights(self) -> set[_Sight]:
        """The windows and key-value heads of all layer kinds: kinds that differ in rotation alone see the same keys."""
        return {(kind.window, kind.kv_heads) for kind in self.kinds}

    def _views(self, rotations: Mapping[LayerKind, Rotation], seen: Mapping[_Sight, _Seen]) -> tuple[LayerView, ...]:
        return tuple(LayerView(rotations.get(kind), *seen[kind.window, kind.kv_heads]) for kind in self.kinds)

    def _rotations(self, positions: Tensor | slice, end: int, long: bool) -> dict[LayerKind, Rotation]:
        """The rotations of rows at `positions`, all below `end`, of the layer kinds that have one."""
        # One rotation of queries, keys and values takes two operations per layer fewer than one without the values.
        factors = self._query_factors(positions, end)
        made: dict[tuple[str, int], Rotation] = {}
        found: dict[LayerKind, Rotation] = {}
        for kind in self.kinds:
            if kind.rope is None:
                continue
            kept = 0 if kind.shares else kind.kv_heads
            if (kind.rope, kept) not in made:
                cos, sin = self.tables[kind.rope].rows(positions, end, long)
                unit, zero = torch.ones_like(cos), torch.zeros_like(sin)
                turned = self.heads + kept
                turning = torch.cat([cos.expand(-1, turned, -1), unit.expand(-1, kept, -1)], 1)
                crossing = torch.cat([sin.expand(-1, turned, -1), zero.expand(-1, kept, -1)], 1)
                if factors is not None:  # a rotation may stretch, too
                    for each in (turning, crossing):
                        each[:, : self.heads] *= factors
                made[kind.rope, kept] = turning, crossing
            found[kind] = made[kind.rope, kept]
        return found

    def _query_factors(self, positions: Tensor | slice, end: int) -> Tensor | None:
        """The factors [n, 1, 1] of queries at `positions`, all below `end`; None if all are 1."""
        if self.query_scaling is None or end <= self.query_scaling[1]:
            return None
        beta, original = self.query_scaling
        if isinstance(positions, slice):
            positions = torch.arange(positions.start, positions.stop, device=self.device)
        return (1 + beta * torch.log1p(positions // original)).to(self.dtype)[:, None, None]

    def _causal(self, start: int, end: int, begin: int, window: int | None) -> Tensor:
        """Whether rows at positions `start`, …, `end` - 1 see keys at `begin`, …, `end` - 1 [rows, keys]."""
        keys = torch.arange(begin, end, device=self.device)
        rows = torch.arange(start, end, device=self.device)[:, None]
        visible = keys <= rows
        return visible & (keys > rows - window) if window else visible

    def _paired(self, visible: Tensor) -> Tensor:
        """Repeat what a lone row sees [1, keys] if attention runs it as two equal rows; return all else as it is."""
        return visible.expand(2, -1) if len(visible) == 1 and self.key_multiple > 1 else visible

    def _bias(self, visible: Tensor, kv_heads: int) -> Tensor:
        return bias_of(visible.to(self.device), self.heads // kv_heads, self.dtype)
