"""Measures a device's latency table on the model itself."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from time import perf_counter

import numpy as np
import torch

from ssd_artifacts.files import cache_folder, remember
from ssd_profiles.latency import Array, DeviceKey, LatencyTable
from ssd_runtime.model.batch import Batch
from ssd_runtime.model.decoder import Decoder
from ssd_runtime.model.kv_cache import KVCache
from ssd_runtime.profiling.clock import seconds
from ssd_runtime.profiling.device import device_identity
from ssd_runtime.profiling.memory import available_bytes
from ssd_runtime.profiling.rising import rising
from ssd_runtime.profiling.shared_steps import SharedSteps, measure_shared_steps
from ssd_runtime.sampling.argmax import argmax

QUERIES = (1, 2, 3, 4, 5, 6, 8, 12, 16, 24, 32)
CONTEXTS = (16, 128, 512, 2048, 8192, 32768, 131072)
FAR = 2048
"""A context at which attention shows what it costs."""
ENGINE = 5
"""Raised whenever the decoder's steps get faster or slower, or are measured better: older tables are measured again."""
MAX_ROUNDS = 9
MIN_ROUNDS = 3
STEPS_A_ROUND = 3
"""Whole steps are taken more often than their parts: plans hang on how they grow with the number of tokens."""
MAX_CACHE_BYTES = 2 << 30
LEAST_SLOTS = 256
"""The cache has so many, whatever they take: a table needs two contexts to tell what a longer one costs."""
CACHE_SHARE = 0.25
"""Largest share of the free memory that the cache takes: a layer of it is there twice while it grows."""
SHARED_SHARE = 0.3
"""Share of the time that goes to steps of many rows and of several sequences."""

Progress = Callable[[float], None]


def device_key(decoder: Decoder) -> DeviceKey:
    """What latencies on the decoder's device depend on."""
    dtype = str(decoder.dtype).removeprefix("torch.")
    return DeviceKey(
        device_identity(decoder.device), torch.get_num_threads(), torch.__version__, dtype, decoder.kernels, ENGINE
    )


@torch.inference_mode()
def measure_latency(decoder: Decoder, budget_seconds: float = 30.0, progress: Progress | None = None) -> LatencyTable:
    """Medians over interleaved rounds of every point of the grid; at most about `budget_seconds`.

    Each figure is one pass through all layers, divided by their number: a single layer looped would stay in the
    processor's cache. Every whole step is taken right behind a plain one: their ratio holds while the machine's pace
    comes and goes. Long contexts that do not fit the budget are left out; the table goes on linearly there. So are
    steps of many rows and of many sequences.
    """
    bench = _Bench(decoder)
    deadline = perf_counter() + budget_seconds
    shared = measure_shared_steps(decoder, QUERIES[-1], SHARED_SHARE * budget_seconds, bench.cache_bytes)
    contexts = bench.contexts(budget_seconds / 2)
    points = [(name, work) for name, work in bench.works(contexts)]
    samples: dict[str, list[float]] = {name: [] for name, _ in points}  # some names come several times a round
    longest = 0.0
    for round_number in range(MAX_ROUNDS):
        began = perf_counter()
        if round_number >= MIN_ROUNDS and began + longest > deadline:
            break
        for name, work in points:
            samples[name].append(seconds(work, decoder.device))
        longest = max(longest, perf_counter() - began)
        if progress is not None:
            progress(min(1.0, (round_number + 1) / MAX_ROUNDS))
    if progress is not None:
        progress(1.0)
    return bench.table(contexts, samples, shared)


def known_latency(
    decoder: Decoder, tables: Mapping[str, LatencyTable], model_key: str, measure: Callable[[], LatencyTable]
) -> LatencyTable:
    """This device's table: of a bundle's `tables`, by slug, else of the user's cache, else measured and kept there."""
    if (known := bundled_latency(decoder, tables)) is not None:
        return known
    path = latency_path(decoder, model_key)
    try:
        return LatencyTable.from_json(path.read_text(encoding="utf-8"))
    except (OSError, ValueError):
        table = measure()
        remember(path, table.to_json())
        return table


def bundled_latency(decoder: Decoder, tables: Mapping[str, LatencyTable]) -> LatencyTable | None:
    """This device's table of a bundle's; None where there is none, or its layer kinds are not the model's."""
    table = tables.get(device_key(decoder).slug())
    return table if table is not None and table.layer_kinds == decoder.layer_kinds else None


def latency_path(decoder: Decoder, model_key: str) -> Path:
    """Where the user's cache keeps this device's table for a model."""
    return cache_folder() / "latency" / model_key[:16] / f"{device_key(decoder).slug()}.json"


@dataclass(slots=True)
class _Bench:
    decoder: Decoder
    cache: KVCache = field(init=False)

    kinds: dict[str, list[int]] = field(init=False)
    """The layers of each kind."""

    def __post_init__(self) -> None:
        self.cache = self.decoder.new_cache()
        names = self.decoder.layer_kinds
        self.kinds = {kind: [i for i, name in enumerate(names) if name == kind] for kind in dict.fromkeys(names)}

    @property
    def cache_bytes(self) -> int:
        """Bytes that caches may take."""
        return min(MAX_CACHE_BYTES, int(CACHE_SHARE * available_bytes(self.decoder.device)))

    def contexts(self, budget_seconds: float) -> list[int]:
        """The contexts that fit the model, the memory and, but for two, the time: one pass of each is tried."""
        shape = self.decoder.shape
        slots = max(LEAST_SLOTS, self.cache_bytes // self.cache.bytes_per_slot)
        room = min(shape.max_context, slots) - max(QUERIES)
        wanted = [context for context in CONTEXTS if context < room]
        if shape.max_context - max(QUERIES) == room and room > (wanted[-1] if wanted else 0):
            wanted.append(room)
        # What a longer context costs is told by two of them: the second is a far one, whatever it takes.
        far = [context for context in wanted[1:] if context <= FAR][-1:] or wanted[1:2]
        chosen: list[int] = []
        spent = 0.0
        for context in (*wanted[:1], *far, *(context for context in wanted[1:] if context not in far)):
            self.cache.reserve(context + max(QUERIES))
            passes = [self._attention(context, n, layers) for layers in self.kinds.values() for n in QUERIES]
            cost = sum(seconds(work, self.decoder.device) for work in passes)
            # Room for the rounds still to come decides, so that a slow context is tried once at most.
            if len(chosen) > 1 and spent + cost * MIN_ROUNDS > budget_seconds:
                break
            chosen.append(context)
            spent += cost * MIN_ROUNDS
        if not chosen:
            chosen = [max(1, room)]
            self.cache.reserve(chosen[0] + max(QUERIES))
        return sorted(chosen)

    def works(self, contexts: list[int]) -> list[tuple[str, Callable[[], object]]]:
        """Every figure to be taken: a name and what to run."""
        base = contexts[min(1, len(contexts) - 1)]
        works: list[tuple[str, Callable[[], object]]] = []
        for n in QUERIES:
            works += [
                (f"{kind} {context} {n}", self._attention(context, n, layers))
                for kind, layers in self.kinds.items()
                for context in contexts
            ]
            works += [(f"mlp {n}", self._mlp(n)), (f"head {n}", self._head(n))]
        plain = self._step(base, 1)
        steps = [pair for n in QUERIES for pair in ((f"plain {n}", plain), (f"step {n}", self._step(base, n)))]
        return works + steps * STEPS_A_ROUND

    def table(self, contexts: list[int], samples: dict[str, list[float]], shared: SharedSteps) -> LatencyTable:
        layers = self.decoder.shape.num_layers
        base = min(1, len(contexts) - 1)

        def grid(kind: str, scale: int = 1) -> tuple[Array, Array]:
            return _curve([np.asarray(samples[f"{kind} {n}"]) / scale for n in QUERIES])

        attention, spread = dict[str, Array](), dict[str, Array]()
        for kind, of_kind in self.kinds.items():
            medians, spreads = zip(*(grid(f"{kind} {context}", len(of_kind)) for context in contexts), strict=True)
            # A longer context never takes less time either; the table goes on behind it by the last slope.
            attention[kind] = np.apply_along_axis(rising, 0, np.asarray(medians))
            spread[kind] = np.asarray(spreads)
        (mlp, mlp_spread), (head, head_spread) = grid("mlp", layers), grid("head")
        growth, step_spread = _curve([np.divide(samples[f"step {n}"], samples[f"plain {n}"]) for n in QUERIES])
        step = growth / growth[0] * np.median(np.concatenate([samples[f"plain {n}"] for n in QUERIES]))
        blocks = sum(len(of_kind) * attention[kind][base] for kind, of_kind in self.kinds.items())
        parts = blocks + layers * mlp + head
        return LatencyTable(
            device=device_key(self.decoder),
            layer_kinds=self.decoder.layer_kinds,
            queries=np.asarray(QUERIES, float),
            contexts=np.asarray(contexts, float),
            attention=attention,
            mlp=mlp,
            head=head,
            overhead=step - parts,
            spread={**spread, "mlp": mlp_spread, "head": head_spread, "step": step_spread},
            wide_queries=shared.wide_queries,
            growth=shared.growth,
            sequences=shared.sequences,
            joint=shared.joint,
        )

    def _rows(self, n: int) -> torch.Tensor:
        # Every row another token: equal rows would make softmax and norms unusually well behaved.
        ids = [(17 + 31 * i) % self.decoder.shape.vocabulary for i in range(n)]
        return self.decoder.embed(ids)

    def _batch(self, context: int, n: int) -> Batch:
        return Batch.of([self.decoder.batches.consecutive(self.cache, context, n)])

    def _attention(self, context: int, n: int, layers: list[int]) -> Callable[[], object]:
        decoder, x, batch = self.decoder, self._rows(n), self._batch(context, n)

        def work() -> None:
            for layer in layers:
                decoder.attention(layer, x, batch)

        return work

    def _mlp(self, n: int) -> Callable[[], object]:
        decoder, x = self.decoder, self._rows(n)

        def work() -> None:
            for layer in range(decoder.shape.num_layers):
                decoder.mlp(layer, x)

        return work

    def _head(self, n: int) -> Callable[[], object]:
        decoder, x = self.decoder, self._rows(n)
        return lambda: argmax(decoder.logits(x)).tolist()

    def _step(self, context: int, n: int) -> Callable[[], object]:
        decoder = self.decoder
        ids = [(17 + 31 * i) % decoder.shape.vocabulary for i in range(n)]

        def work() -> None:
            x = decoder.run(decoder.embed(ids), self._batch(context, n))
            argmax(decoder.logits(x)).tolist()

        return work


def _curve(taken: Sequence[Array]) -> tuple[Array, Array]:
    """Medians of what was taken at each number of tokens, and their spreads, interquartile range ÷ median.

    More tokens never take less time: what looks like it is noise.
    """
    low, middle, high = np.asarray([np.percentile(samples, [25, 50, 75]) for samples in taken]).T
    return rising(middle), (high - low) / middle
