"""Replays a masked model on tokens whose hidden states in the full model are known."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace

import torch
from torch import Tensor

from ssd_profiles.acceptance import Trace
from ssd_profiles.mask import SubLayerPlan
from ssd_runtime.devices.transfer import to_device
from ssd_runtime.model.batch.batch import Lineage, Segment
from ssd_runtime.model.batch.builder import BatchBuilder
from ssd_runtime.model.cache.kv_cache import KVCache
from ssd_runtime.model.decoder import Decoder
from ssd_runtime.model.runner import Forward, Head, ModelRunner, Work


@dataclass(frozen=True, slots=True)
class RowGroup:
    """Consecutive tokens of one sequence; `cache` has the full model's keys and values of these and all before.

    Rows `begin`, …, `end` - 1 of the states are positions `start`, `start` + 1, … of the sequence.
    """

    cache: KVCache
    start: int
    begin: int
    end: int
    spare: int | None = None
    """The first slot whose content may be overwritten; by default the one after the group's own."""

    @property
    def rows(self) -> slice:
        """The group's rows among the states."""
        return slice(self.begin, self.end)

    def __len__(self) -> int:
        return self.end - self.begin


@dataclass(frozen=True, slots=True)
class ReferenceStates:
    """The full model's states on R tokens of some sequences.

    `states` are 2L + 1 tensors [R, hidden]: the embeddings X(0), and X(i) after sub-layer i - 1. `targets` [R] are the
    next tokens that it predicts.
    """

    states: Sequence[Tensor]
    targets: Tensor
    groups: Sequence[RowGroup]

    def __len__(self) -> int:
        return int(self.targets.shape[0])

    def split(self, groups: int) -> tuple[ReferenceStates, ReferenceStates]:
        """The states of the first `groups` groups, and of the others."""
        end = self.groups[groups - 1].end
        later = [replace(group, begin=group.begin - end, end=group.end - end) for group in self.groups[groups:]]
        return (
            ReferenceStates([x[:end] for x in self.states], self.targets[:end], self.groups[:groups]),
            ReferenceStates([x[end:] for x in self.states], self.targets[end:], later),
        )

    def every(self, step: int) -> ReferenceStates:
        """The states of every `step`-th row, at least one of each group, and each as a group of its own."""
        picked = [
            (group, row)
            for group in self.groups
            for row in range(group.begin + min(step, group.end - group.begin) // 2, group.end, step)
        ]
        rows = to_device([row for _, row in picked], self.targets.device)
        groups = [
            RowGroup(cache=group.cache, start=group.start + row - group.begin, begin=place, end=place + 1)
            for place, (group, row) in enumerate(picked)
        ]
        return ReferenceStates([x[rows] for x in self.states], self.targets[rows], groups)


def replay_mask(decoder: Decoder, reference: ReferenceStates, mask: SubLayerPlan, block: int) -> list[Trace]:
    """Run `replaying` at once."""
    work = replaying(batches=decoder.batches, reference=reference, mask=mask, block=block)
    return ModelRunner(decoder).finish(work)


def replaying(batches: BatchBuilder, reference: ReferenceStates, mask: SubLayerPlan, block: int) -> Work[list[Trace]]:
    """Predict each row's next token with the masked model; returns a trace of matches and confidences per group.

    It is one parallel pass with the keys that real drafting would see. A draft is assumed to begin every `block`
    tokens: a row sees the full model's keys before that, and the masked model's from there to itself. States before the
    first sub-layer that is skipped or light come from the reference.
    """
    first = mask.first_changed
    segments = [_block_segment(batches, group, block) for group in reference.groups]
    x = yield Forward(segments, rows=reference.states[first], mask=mask, first=first)
    tokens, probabilities = yield Head(x, best=True, bits=mask.head_bits)
    both = torch.stack([(tokens == reference.targets).float(), probabilities]).cpu()  # one wait for a device
    matches = both[0].bool()
    confidence = both[1].double()
    return [Trace(matches[group.rows].numpy(), confidence[group.rows].numpy()) for group in reference.groups]


def _block_segment(batches: BatchBuilder, group: RowGroup, block: int) -> Segment:
    """The group's rows, written to spare slots, each of which sees the keys of a draft that began at its block."""
    n = len(group)
    device = batches.device
    slot = group.start + n if group.spare is None else group.spare
    group.cache.reserve(slot + n)
    row = torch.arange(n, device=device)[:, None]
    block_start = row // block * block
    full = torch.arange(slot, device=device)[None] < group.start + block_start
    own = torch.arange(n, device=device)[None]
    drafted = (own >= block_start) & (own <= row)
    key_positions = torch.cat([torch.arange(slot, device=device), group.start + own[0]])
    return batches.tree(
        cache=group.cache,
        positions=group.start + row[:, 0],
        span=range(group.start, group.start + n),
        slot=slot,
        visible=torch.cat([full, drafted], 1),
        key_positions=key_positions,
        lineage=Lineage.of_blocks(group.start, n, block),
    )
