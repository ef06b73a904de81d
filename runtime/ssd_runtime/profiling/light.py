"""Measures what blocks and steps cost on light copies of the weights."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Callable
from dataclasses import replace
from functools import partial
from pathlib import Path
from statistics import median

import numpy as np
import torch
from pydantic import TypeAdapter

from ssd_artifacts.files import cache_folder, remember
from ssd_profiles.latency import LatencyTable
from ssd_profiles.latency_law import TYPICAL_SPREAD, broken_light_law
from ssd_profiles.light_costs import LightCosts
from ssd_profiles.mask import FULL, SubLayerPlan
from ssd_runtime.model.batch.batch import Batch
from ssd_runtime.model.decoder import Decoder
from ssd_runtime.model.runner import Head, ModelRunner, Work
from ssd_runtime.profiling.fit import spread_of
from ssd_runtime.profiling.latency import BusyMachineError, device_key, layers_by_kind
from ssd_runtime.profiling.other_work import OtherWork
from ssd_runtime.profiling.timer import Timer
from ssd_runtime.sampling.argmax import argmax
from ssd_runtime.sequence.session import Session

CONTEXT = 256
"""Tokens before the timed rows, at most half of the model's context."""
QUERIES = (1, 4, 16)
"""Numbers of rows that are timed; sequences that share a draft step have one each."""
MAX_ROUNDS = 9
MIN_ROUNDS = 3
"""Least rounds of a measurement that is kept."""
BUDGET_SECONDS = 10.0
"""Seconds after which no more than `MIN_ROUNDS` rounds are made."""
LATEST_SECONDS = 60.0
"""Seconds after which one round is enough, for this run only. On a busy machine, threads wait for each other and a step
takes ten times as long."""

Costs = dict[int, LightCosts]
_FILE = TypeAdapter(Costs)


def with_light(
    table: LatencyTable, decoder: Decoder, model_key: str, between: Callable[[], object] | None = None
) -> LatencyTable:
    """The table with the costs of the decoder's light copies: its own, the user cache's, or newly measured ones.

    New ones are kept in the cache; `between` is that of the `Timer` that measures them. Raises BusyMachineError, whose
    coarse table has them, if the machine was not steady or the table breaks the law.
    """
    precisions = set(decoder.light.bits)
    if precisions <= set(table.light):
        return replace(table, light={bits: table.light[bits] for bits in precisions})
    path = _path(decoder, model_key)
    try:
        costs = _FILE.validate_json(path.read_text(encoding="utf-8"))
        priced = replace(table, light=costs)
        priced.check()
        if set(costs) == precisions and broken_light_law(priced) is None:
            return priced
    except (OSError, ValueError):
        pass
    others = OtherWork()
    costs, steady = measure_light(decoder, between)
    priced = replace(table, light=costs)
    breach = broken_light_law(priced) if steady else "the times of steps on light copies spread too far"
    if breach is not None:
        # Without a spread, the whole table breaks the law.
        raise BusyMachineError(breach, others.processors(), replace(priced, spread={}))
    remember(path, json.dumps({bits: each.to_data() for bits, each in costs.items()}))
    return priced


@torch.inference_mode()
def measure_light(decoder: Decoder, between: Callable[[], object] | None = None) -> tuple[Costs, bool]:
    """Measure the costs of every precision, in turn with the full blocks; returns them and whether to keep them.

    Each figure is a pass through all layers, as in the latency table. The costs are worth keeping if the machine was
    steady over `MIN_ROUNDS` rounds at least.
    """
    bench = _LightBench(decoder)
    precisions = (FULL, *decoder.light.bits)
    taken: dict[tuple[str, int, int], list[float]] = {}
    timer = Timer(decoder.device, between)
    rounds = 0
    for number in range(MAX_ROUNDS + 1):
        if (rounds and timer.spent > LATEST_SECONDS) or (rounds >= MIN_ROUNDS and timer.spent > BUDGET_SECONDS):
            break
        rounds = number
        for n in QUERIES:
            for name, work in bench.works(n).items():
                for bits in precisions:
                    elapsed = timer(work(bits))
                    if number:  # the first round warms up
                        taken.setdefault((name, n, bits), []).append(elapsed)

    def shares(name: str, bits: int) -> np.ndarray:
        pairs = [zip(taken[name, n, bits], taken[name, n, FULL], strict=True) for n in QUERIES]
        return np.asarray([median(light / full for light, full in each) for each in pairs])

    costs = {
        bits: LightCosts(
            context=bench.context,
            queries=np.asarray(QUERIES, float),
            attention={kind: shares(kind, bits) for kind in bench.kinds},
            mlp=shares("mlp", bits),
            head=shares("head", bits),
            step=shares("step", bits),
        )
        for bits in decoder.light.bits
    }
    steps = [taken["step", 1, bits] for bits in precisions]
    return costs, rounds >= MIN_ROUNDS and all(spread_of(times) <= TYPICAL_SPREAD for times in steps)


class _LightBench:
    """The works that are timed, after a context of its own."""

    def __init__(self, decoder: Decoder) -> None:
        self._decoder = decoder
        self._session = Session(decoder)
        self.context = min(CONTEXT, decoder.shape.max_context // 2)
        self._session.prefill(decoder.probe_ids(self.context))
        self.kinds = layers_by_kind(decoder)

    def works(self, n: int) -> dict[str, Callable[[int], Callable[[], object]]]:
        """Makers of works on `n` rows, by name: each takes the bits of the weights."""
        decoder = self._decoder
        ids = decoder.probe_ids(n)
        x = decoder.embed(ids)
        cache = self._session.cache
        cache.reserve(self.context + n)
        batch = Batch.of([decoder.batches.consecutive(cache, self.context, n)])
        whole = SubLayerPlan.of(decoder.shape.num_layers)

        def attention(layers: list[int], bits: int) -> Callable[[], object]:
            return lambda: decoder.sublayers.run([(2 * layer, bits) for layer in layers], x, batch)

        def mlp(bits: int) -> Callable[[], object]:
            parts = [(2 * layer + 1, bits) for layer in range(decoder.shape.num_layers)]
            return lambda: decoder.sublayers.run(parts, x, batch)

        def head(bits: int) -> Callable[[], object]:
            return lambda: argmax(decoder.logits(x, bits)).tolist()

        def step(bits: int) -> Callable[[], object]:
            mask = whole.lightened(bits) if bits else None
            return lambda: ModelRunner(decoder).finish(self._step(ids, mask))

        kinds: dict[str, Callable[[int], Callable[[], object]]]
        kinds = {kind: partial(attention, layers) for kind, layers in self.kinds.items()}
        return {**kinds, "mlp": mlp, "head": head, "step": step}

    def _step(self, ids: list[int], mask: SubLayerPlan | None) -> Work[list[int]]:
        x = yield self._session.request(ids, mask=mask)
        logits = yield Head(x, bits=FULL if mask is None else mask.head_bits)
        return argmax(logits).tolist()


def _path(decoder: Decoder, model_key: str) -> Path:
    digest = hashlib.sha256(decoder.light.kernels.encode()).hexdigest()[:8]
    return cache_folder() / "light" / model_key[:16] / f"{device_key(decoder).slug()}-{digest}.json"
