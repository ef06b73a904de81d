"""Runs a mixer that is no attention on the rows of a batch, each after the state of the row before it."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import groupby, pairwise

import torch
from torch import Tensor

from ssd_runtime.model.batch.batch import Lineage, Segment, Variants
from ssd_runtime.model.cache.mixer_states import Kept, LayerStates
from ssd_runtime.model.mixers.mixer import Mixer, State


def mix(mixer: Mixer, layer: int, projected: Tensor, segments: Sequence[Segment | Variants]) -> Tensor:
    """The input [rows, …] of the output projection for projected rows; keeps the rows' inputs in their caches."""
    inputs = mixer.inputs(projected)
    parts = inputs.split([segment.rows for segment in segments])
    mixed = [_mixed(layer, own, segment) for own, segment in zip(parts, segments, strict=True)]
    return mixer.finished(mixed[0] if len(mixed) == 1 else torch.cat(mixed), projected)


def _mixed(layer: int, inputs: Tensor, segment: Segment | Variants) -> Tensor:
    """The mixed values [n, …] of one sequence's rows."""
    states = segment.cache.states.of(layer)
    lineage = segment.lineage
    slot = segment.slot if isinstance(segment, Segment) else None
    if lineage is None:
        assert isinstance(slot, int), "consecutive rows have slots that the host knows"
        mixed, state = states.mixer.scan(states.after(slot), inputs)
        if isinstance(segment, Segment) and segment.certain:
            states.skip(slot + segment.rows, state)
        else:
            states.write(slot, inputs, state)
        return mixed
    apart = not lineage.kept and max(lineage.parents) < 0
    mixed = _apart(states, inputs, lineage.starts) if apart else _branching(states, inputs, lineage)
    if lineage.kept:
        assert isinstance(slot, int), "rows that are kept have slots that the host knows"
        states.write(slot, inputs, None)
    return mixed


def _branching(states: LayerStates, inputs: Tensor, lineage: Lineage) -> Tensor:
    """The mixed values of rows that come after each other as `lineage` says: one scan per run of consecutive rows."""
    parents = lineage.parents
    rows = len(parents)
    branched = {parent for row, parent in enumerate(parents) if parent != row - 1 or parent < 0}
    bounds = [row for row in range(rows) if row == 0 or parents[row] != row - 1 or row - 1 in branched] + [rows]
    after = dict[int, State]()
    outputs = list[Tensor]()
    near: Kept | None = None
    for begin, end in pairwise(bounds):
        parent = parents[begin]
        if parent < 0:
            near = states.kept_after(lineage.starts[begin], near)
            before = near.state
        else:
            before = after[parent]
        mixed, state = states.mixer.scan(before, inputs[begin:end])
        outputs.append(mixed)
        if end - 1 in branched:
            after[end - 1] = state
    return torch.cat(outputs)


def _apart(states: LayerStates, inputs: Tensor, starts: Sequence[int]) -> Tensor:
    """The mixed values of a search's rows, each of which follows the first `starts[i]` tokens; those of one start join.

    Starts never fall.
    """
    outputs = list[Tensor]()
    near: Kept | None = None
    runs = [(start, len(list(same))) for start, same in groupby(starts)]
    for (start, _), part in zip(runs, inputs.split([count for _, count in runs]), strict=True):
        near = states.kept_after(start, near)
        outputs.append(states.mixer.apart(near.state, part))
    return torch.cat(outputs)
