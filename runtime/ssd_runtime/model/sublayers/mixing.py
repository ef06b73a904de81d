"""Runs a mixer that is no attention on the rows of a batch, each after the state of the row before it."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from itertools import groupby, pairwise
from typing import NamedTuple

import torch
from torch import Tensor

from ssd_runtime.model.batch.batch import Segment, Variants
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
    if lineage is not None and lineage.is_apart:
        return _apart(states, inputs, lineage.starts)
    after = dict[int, State]()
    outputs = list[Tensor]()
    for run, before in runs_of(states, segment, after):
        mixed, state = states.mixer.scan(before, inputs[run.begin : run.end])
        outputs.append(mixed)
        if run.is_followed:
            after[run.end - 1] = state
    if isinstance(segment, Segment):
        keep(segment, states, inputs, state)
    return outputs[0] if len(outputs) == 1 else torch.cat(outputs)


class Run(NamedTuple):
    """Rows of a segment that follow each other."""

    begin: int
    end: int
    is_followed: bool
    """Whether a later run comes after its last row, or the next forward if no row of it is rejected."""


def runs_of(
    states: LayerStates, segment: Segment | Variants, after: Mapping[int, State]
) -> Iterator[tuple[Run, State]]:
    """The runs of a segment's rows in order, each with the state that it continues.

    Before the next one is asked for, `after` has the state after the last row of a run that is followed.
    """
    lineage = segment.lineage
    if lineage is None:
        slot = None if isinstance(segment, Variants) else segment.slot
        assert isinstance(slot, int), "consecutive rows have slots that the host knows"
        yield Run(0, segment.rows, True), states.after(slot)
        return
    parents = lineage.parents
    branched = {parent for row, parent in enumerate(parents) if parent != row - 1 or parent < 0}
    starts = (row for row, parent in enumerate(parents) if row == 0 or parent != row - 1 or row - 1 in branched)
    near: Kept | None = None
    for begin, end in pairwise((*starts, len(parents))):
        if (parent := parents[begin]) < 0:
            near = states.kept_after(lineage.starts[begin], near)
        yield Run(begin, end, end - 1 in branched), after[parent] if parent >= 0 or near is None else near.state


def keep(segment: Segment, states: LayerStates, inputs: Tensor, after: State) -> None:
    """Keep the inputs [n, width] of a segment's rows, and the state after the last of consecutive ones."""
    if segment.lineage is not None and not segment.lineage.kept:
        return
    assert isinstance(segment.slot, int), "the host knows the slots of rows that are kept"
    if segment.certain and segment.lineage is None:
        states.skip(segment.slot + segment.rows, after)
    else:
        states.write(segment.slot, inputs, after if segment.lineage is None else None)


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
