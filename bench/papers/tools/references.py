"""States of plain answers, which the studies of searches look at."""

from __future__ import annotations

import torch

from ssd_runtime.engine.loop import generate
from ssd_runtime.engine.output.output import Limits
from ssd_runtime.model.decoder import Decoder
from ssd_runtime.planning.plan import PlainPlanner
from ssd_runtime.search.replay import ReferenceStates, RowGroup
from ssd_runtime.sequence.session import Session


@torch.inference_mode()
def answered(decoder: Decoder, ids: list[int], count: int) -> ReferenceStates:
    """The states of a plain answer of at most `count` tokens."""
    answer = generate(Session(decoder), ids, PlainPlanner(), Limits(count)).token_ids
    session = Session(decoder)
    session.prefill(ids)
    states = session.forward_states(answer)
    targets = decoder.logits(states[-1]).argmax(-1)
    session.commit(answer)
    return ReferenceStates(states, targets, [RowGroup(cache=session.cache, start=len(ids), begin=0, end=len(answer))])


def rows_of(reference: ReferenceStates, first: int, last: int) -> ReferenceStates:
    """The rows [first, last) of a reference of one group, whose cache goes on behind them."""
    [group] = reference.groups
    some = RowGroup(
        cache=group.cache,
        start=group.start + first,
        begin=0,
        end=last - first,
        spare=group.start + len(group),
    )
    return ReferenceStates([x[first:last] for x in reference.states], reference.targets[first:last], [some])
