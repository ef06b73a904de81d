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
from ssd_runtime.model.cache.kv_cache import KVCache
from ssd_runtime.model.decoder import Decoder
from ssd_runtime.profiling.clock import seconds
from ssd_runtime.profiling.device import device_identity
from ssd_runtime.profiling.memory import available_bytes
from ssd_runtime.profiling.rising import rising
from ssd_runtime.profiling.shared_steps import SharedSteps, measure_shared_steps
from ssd_runtime.sampling.argmax import argmax

QUERIES = (1, 2, 3, 4, 5, 6, 8, 12, 16, 24, 32)
CONTEXTS = (16, 128, 512, 2048, 8192, 32768, 131072)
FAR = 2048
"""A context at which the cost of attention is visible."""
ENGINE = 5
"""Version of the decoder's speed and of its measurement; tables of older versions are measured again."""
MAX_ROUNDS = 9
MIN_ROUNDS = 3
STEPS_PER_ROUND = 3
"""Whole steps per round; there are more of them than of their parts, because plans depend on their growth with rows."""
OVERTIME = 3.0
"""Budgets after which measuring ends with what there is, one sample of every figure at least: where other processes
keep a processor busy, threads wait for each other and a step takes ten times as long."""
MAX_CACHE_BYTES = 2 << 30
LEAST_SLOTS = 256
"""Least slots of the cache, whatever their size: the slope over contexts needs two of them."""
CACHE_SHARE = 0.25
"""Largest share of the free memory that the cache takes: one layer of it exists twice while it grows."""
SHARED_SHARE = 0.3
"""Share of the time for steps of many rows and of several sequences."""

Progress = Callable[[float], None]
Timed = tuple[str, Callable[[], object]]
"""The name of a figure, and the work to time for it."""


def device_key(decoder: Decoder) -> DeviceKey:
    """The key of everything that latencies on the decoder's device depend on."""
    return DeviceKey(
        device=device_identity(decoder.device),
        threads=torch.get_num_threads(),
        torch=torch.__version__,
        dtype=str(decoder.dtype).removeprefix("torch."),
        kernels=decoder.kernels,
        engine=ENGINE,
    )


@torch.inference_mode()
def measure_latency(decoder: Decoder, budget_seconds: float = 30.0, progress: Progress | None = None) -> LatencyTable:
    """Measure medians over interleaved rounds at every point of the grid, in about `budget_seconds`.

    Each figure is one pass through all layers ÷ their number, since a single layer in a loop would stay in the
    processor's cache. Every whole step follows a plain one, so that their ratio does not depend on the machine's pace.
    Long contexts that do not fit the budget are omitted, and the table is linear there. The same holds for steps of
    many rows and of many sequences. Large models and busy machines take up to `OVERTIME` budgets.
    """
    bench = _Bench(decoder)
    started = perf_counter()
    deadline = started + budget_seconds
    shared = measure_shared_steps(
        decoder,
        last_query=QUERIES[-1],
        budget_seconds=SHARED_SHARE * budget_seconds,
        cache_bytes=bench.cache_bytes,
    )
    contexts = bench.contexts(budget_seconds / 2)
    parts, steps = bench.works(contexts)
    sweeps = ([*parts, *steps], *[steps] * (STEPS_PER_ROUND - 1))
    samples: dict[str, list[float]] = {name: [] for name, _ in sweeps[0]}
    longest = 0.0
    for round_number in range(MAX_ROUNDS):
        began = perf_counter()
        if round_number >= MIN_ROUNDS and began + longest > deadline:
            break
        for number, sweep in enumerate(sweeps):
            if (round_number or number) and perf_counter() > started + OVERTIME * budget_seconds:
                break
            for name, work in sweep:
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
    """This device's table: the bundle's (`tables` by slug), or the user cache's, or a new one that is kept there."""
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
    """This device's table among a bundle's; None if there is none, or if its layer kinds are not the model's."""
    table = tables.get(device_key(decoder).slug())
    return table if table is not None and table.layer_kinds == decoder.layer_kinds else None


def latency_path(decoder: Decoder, model_key: str) -> Path:
    """The path of this device's table for a model in the user's cache."""
    return cache_folder() / "latency" / model_key[:16] / f"{device_key(decoder).slug()}.json"


@dataclass(slots=True)
class _Bench:
    """The works that are timed, on one cache."""

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
        """The contexts that fit the model, the memory and, except for two, the time; one pass of each is tried."""
        shape = self.decoder.shape
        slots = max(LEAST_SLOTS, self.cache_bytes // self.cache.bytes_per_slot)
        room = min(shape.max_context, slots) - max(QUERIES)
        wanted = [context for context in CONTEXTS if context < room]
        if shape.max_context - max(QUERIES) == room and room > (wanted[-1] if wanted else 0):
            wanted.append(room)
        # The slope over contexts needs two of them; the second is a far one, whatever its time.
        far = [context for context in wanted[1:] if context <= FAR][-1:] or wanted[1:2]
        others = [context for context in wanted[1:] if context not in far]
        chosen: list[int] = []
        spent = 0.0
        for context in wanted[:1] + far + others:
            self.cache.reserve(context + max(QUERIES))
            passes = [self._attention(context, n, layers) for layers in self.kinds.values() for n in QUERIES]
            cost = sum(seconds(work, self.decoder.device) for work in passes)
            # The time of all rounds decides, so that a slow context is tried once at most.
            if len(chosen) > 1 and spent + cost * MIN_ROUNDS > budget_seconds:
                break
            chosen.append(context)
            spent += cost * MIN_ROUNDS
        if not chosen:
            chosen = [max(1, room)]
            self.cache.reserve(chosen[0] + max(QUERIES))
        return sorted(chosen)

    def works(self, contexts: list[int]) -> tuple[list[Timed], list[Timed]]:
        """The parts of a step to measure, and the whole steps, each after a plain one."""
        base = contexts[min(1, len(contexts) - 1)]
        parts: list[Timed] = []
        for n in QUERIES:
            parts += [
                (f"{kind} {context} {n}", self._attention(context, n, layers))
                for kind, layers in self.kinds.items()
                for context in contexts
            ]
            parts += [(f"mlp {n}", self._mlp(n)), (f"head {n}", self._head(n))]
        plain = self._step(base, 1)
        steps = [pair for n in QUERIES for pair in ((f"plain {n}", plain), (f"step {n}", self._step(base, n)))]
        return parts, steps

    def table(self, contexts: list[int], samples: dict[str, list[float]], shared: SharedSteps) -> LatencyTable:
        """The latency table of the samples [seconds] of every figure."""
        layers = self.decoder.shape.num_layers
        base = min(1, len(contexts) - 1)

        def grid(kind: str, scale: int = 1) -> tuple[Array, Array]:
            return _curve([np.asarray(samples[f"{kind} {n}"]) / scale for n in QUERIES])

        attention = dict[str, Array]()
        spread = dict[str, Array]()
        for kind, of_kind in self.kinds.items():
            medians, spreads = zip(*(grid(f"{kind} {context}", len(of_kind)) for context in contexts), strict=True)
            # A longer context never takes less time either, and the table continues with the last slope.
            attention[kind] = np.apply_along_axis(rising, 0, np.asarray(medians))
            spread[kind] = np.asarray(spreads)
        mlp, mlp_spread = grid("mlp", layers)
        head, head_spread = grid("head")
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
        """Embeddings [n, hidden] of the decoder's probe ids."""
        return self.decoder.embed(self.decoder.probe_ids(n))

    def _batch(self, context: int, n: int) -> Batch:
        return Batch.of([self.decoder.batches.consecutive(self.cache, context, n)])

    def _attention(self, context: int, n: int, layers: list[int]) -> Callable[[], object]:
        decoder = self.decoder
        x = self._rows(n)
        batch = self._batch(context, n)

        def work() -> None:
            for layer in layers:
                decoder.sublayers.attention(layer, x, batch)

        return work

    def _mlp(self, n: int) -> Callable[[], object]:
        decoder = self.decoder
        x = self._rows(n)

        def work() -> None:
            for layer in range(decoder.shape.num_layers):
                decoder.sublayers.mlp(layer, x)

        return work

    def _head(self, n: int) -> Callable[[], object]:
        decoder = self.decoder
        x = self._rows(n)
        return lambda: argmax(decoder.logits(x)).tolist()

    def _step(self, context: int, n: int) -> Callable[[], object]:
        decoder = self.decoder
        ids = decoder.probe_ids(n)

        def work() -> None:
            x = decoder.run(decoder.embed(ids), self._batch(context, n))
            argmax(decoder.logits(x)).tolist()

        return work


def _curve(taken: Sequence[Array]) -> tuple[Array, Array]:
    """Medians of the samples at each number of rows, and their spreads, interquartile range ÷ median.

    More rows never take less time; where the samples say so, it is noise.
    """
    low, middle, high = np.asarray([np.percentile(samples, [25, 50, 75]) for samples in taken]).T
    return rising(middle), (high - low) / middle
