"""Builds the segments of forwards: the positions of their rows, their rotations, and the keys that they see."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace

import torch
from torch import Tensor
from torch.nn.functional import pad

from ssd_runtime.model.batch.batch import LayerView, Lineage, Segment, Variants
from ssd_runtime.model.batch.rotary import RotaryTable, Rotation
from ssd_runtime.model.cache.kv_cache import KVCache
from ssd_runtime.model.family.layer_kinds import LayerKind

MOST_BY_ROW = 32
"""Most rows of a verification whose attention runs row by row; chunks of a prompt have more."""
GROUPED_ROWS = 31
"""Most rows for which the query heads that share a key-value head run as rows of one head. Its keys are then read once,
which takes up to a third less time. With more rows, heads stay apart and share one bias, which takes less memory."""
_Sight = tuple[int | None, int]
"""A window, and a number of key-value heads."""
_Seen = tuple[int, int, Tensor | None, bool]
"""The first slot seen, the one after the last, the bias, and whether rows see the keys causally without one."""


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
        factors = self._query_factors(positions, end)
        made: dict[str, Rotation] = {}
        for rope in {kind.rope for kind in self.kinds if kind.rope is not None}:
            cos, sin = self.tables[rope].rows(positions, end, long)
            if factors is not None:  # a rotation may stretch, too
                cos, sin = (torch.cat([each * factors, each], 1) for each in (cos, sin))
            made[rope] = cos, sin
        return {kind: made[kind.rope] for kind in self.kinds if kind.rope is not None}

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


def bias_of(visible: Tensor, groups: int, dtype: torch.dtype) -> Tensor:
    """The bias of scores, 0 or -inf, that hides keys where `visible` [n, keys] is false.

    It is [n, keys], or [groups * n, keys] if `attend` runs the `groups` query heads of a key-value head as rows.
    """
    bias = torch.zeros(visible.shape, dtype=dtype, device=visible.device).masked_fill_(~visible, float("-inf"))
    return bias if visible.shape[0] > GROUPED_ROWS else bias.repeat(groups, 1)
