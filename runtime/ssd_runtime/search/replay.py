"""Hidden states of the full model on known tokens, and what a masked model makes of the same tokens."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from ssd_profiles.acceptance import Trace
from ssd_profiles.mask import SkipMask
from ssd_runtime.model.batch import BatchBuilder, Segment
from ssd_runtime.model.decoder import Decoder
from ssd_runtime.model.kv_cache import KVCache
from ssd_runtime.model.runner import Forward, Head, ModelRunner, Work


@dataclass(frozen=True, slots=True)
class RowGroup:
    """Consecutive tokens of one sequence, with the full model's keys and values of it and all before in `cache`.

    Rows `begin`, …, `end` - 1 of the states are positions `start`, `start` + 1, … of the sequence.
    """

    cache: KVCache
    start: int
    begin: int
    end: int
    spare: int | None = None
    """The first slot whose content may be overwritten; the one behind the group's own by default."""

    @property
    def rows(self) -> slice:
        """The group's rows among the states."""
        return slice(self.begin, self.end)

    def __len__(self) -> int:
        return self.end - self.begin


@dataclass(frozen=True, slots=True)
class ReferenceStates:
    """What the full model computed on R tokens of some sequences.

    `states` are 2L + 1 tensors [R, hidden]: X(0) the embeddings, X(i) behind sub-layer i - 1. `targets` [R] are the
    tokens it predicts next.
    """

    states: Sequence[Tensor]
    targets: Tensor
    groups: Sequence[RowGroup]

    def __len__(self) -> int:
        return int(self.targets.shape[0])

    def head(self, groups: int) -> ReferenceStates:
        """The first `groups` groups alone."""
        kept = self.groups[:groups]
        rows = slice(0, kept[-1].end)
        return ReferenceStates([x[rows] for x in self.states], self.targets[rows], kept)

    def every(self, step: int) -> ReferenceStates:
        """Every `step`-th row, each as a group of its own: fewer tokens, from all sequences."""
        picked = [(group, row) for group in self.groups for row in range(group.begin + step // 2, group.end, step)]
        rows = torch.tensor([row for _, row in picked], device=self.targets.device)
        groups = [
            RowGroup(group.cache, group.start + row - group.begin, i, i + 1) for i, (group, row) in enumerate(picked)
        ]
        return ReferenceStates([x[rows] for x in self.states], self.targets[rows], groups)


def replay_mask(decoder: Decoder, reference: ReferenceStates, mask: SkipMask, block: int) -> list[Trace]:
    """`replaying`, run at once."""
    return ModelRunner(decoder).finish(replaying(decoder.batches, reference, mask, block))


def replaying(batches: BatchBuilder, reference: ReferenceStates, mask: SkipMask, block: int) -> Work[list[Trace]]:
    """How the masked model predicts each row's next token, for every group: right or wrong, and how sure.

    One parallel pass, with the keys that real drafting would see: every `block` tokens a draft is taken to begin;
    a row sees the full model's keys before that, and the masked model's from there to itself. Everything before
    the first skipped sub-layer is taken from the reference.
    """
    first = mask.first_skipped
    segments = [_block_segment(batches, group, block) for group in reference.groups]
    x = yield Forward(segments, reference.states[first], mask, first)
    tokens, probabilities = yield Head(x, best=True)
    matches, confidence = (tokens == reference.targets).cpu(), probabilities.double().cpu()
    return [Trace(matches[g.rows].numpy(), confidence[g.rows].numpy()) for g in reference.groups]


def _block_segment(batches: BatchBuilder, group: RowGroup, block: int) -> Segment:
    """Rows written to spare slots, seeing keys as a draft that began at their block would."""
    n, device = len(group), batches.device
    slot = group.start + n if group.spare is None else group.spare
    group.cache.reserve(slot + n)
    row = torch.arange(n, device=device)[:, None]
    block_start = row // block * block
    full = torch.arange(slot, device=device)[None] < group.start + block_start
    own = torch.arange(n, device=device)[None]
    drafted = (own >= block_start) & (own <= row)
    key_positions = torch.cat([torch.arange(slot, device=device), group.start + own[0]])
    visible = torch.cat([full, drafted], 1)
    return batches.tree(group.cache, group.start + row[:, 0], slot, visible, key_positions)
