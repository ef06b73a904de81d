"""Runs the work of several sequences together, each layer once for all of them, whatever their masks.

It is for measurements that do not depend on time: prices, acceptance, equality. A step of sixteen sequences takes
about as long as two steps of one, because the weights are read once.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, TypeVar

import torch
from torch import Tensor

from ssd_runtime.model.batch import Batch
from ssd_runtime.model.decoder import Decoder
from ssd_runtime.model.runner import Forward, ModelRequest, ModelRunner, Work

T = TypeVar("T")


@torch.inference_mode()
def run_together(decoder: Decoder, works: Sequence[Work[T]]) -> list[T]:
    """Run all works to their ends, one request of each at a time; returns their results in order."""
    runner = ModelRunner(decoder)
    results: list[Any] = [None] * len(works)
    answers: dict[int, Any] = dict.fromkeys(range(len(works)))
    while answers:
        requests: dict[int, ModelRequest] = {}
        for place, answer in answers.items():
            try:
                requests[place] = works[place].send(answer)
            except StopIteration as stop:
                results[place] = stop.value
        whole = {place: request for place, request in requests.items() if _is_whole(request)}
        others = {place: request for place, request in requests.items() if place not in whole}
        answers = dict(zip(whole, _layer_by_layer(decoder, list(whole.values())), strict=True))
        answers |= zip(others, runner.answer(list(others.values())), strict=True)
    return results


def _is_whole(request: ModelRequest) -> bool:
    """Whether a request runs tokens from the first sub-layer to the last, with a mask or without."""
    if not isinstance(request, Forward) or isinstance(request.rows, Tensor):
        return False
    return request.first == 0 and request.last is None


def _layer_by_layer(decoder: Decoder, requests: Sequence[Any]) -> list[Any]:
    """Run each sub-layer once, on the rows of all requests whose mask keeps it."""
    if not requests:
        return []
    x = decoder.embed([token for request in requests for token in request.rows])
    ends = torch.tensor([request.size for request in requests]).cumsum(0).tolist()
    spans = [slice(end - request.size, end) for end, request in zip(ends, requests, strict=True)]
    states: list[list[Tensor]] = [[x[span]] for span in spans]
    batches: dict[tuple[int, ...], tuple[Tensor, Batch]] = {}
    for index in range(2 * decoder.shape.num_layers):
        kept = tuple(place for place, each in enumerate(requests) if each.mask is None or not each.mask.bits[index])
        if kept:
            if kept not in batches:
                rows = torch.cat([torch.arange(spans[place].start, spans[place].stop) for place in kept])
                batches[kept] = rows, Batch.of([part for place in kept for part in requests[place].segments])
            rows, batch = batches[kept]
            done = decoder.run(x[rows], batch, first=index, last=index + 1)
            x = x.index_copy(0, rows, done)
        for place, request in enumerate(requests):
            if request.keep_states:
                states[place].append(x[spans[place]])
    return [states[place] if request.keep_states else x[spans[place]] for place, request in enumerate(requests)]
