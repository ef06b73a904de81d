"""Measures a device's latency table on the model itself."""

from __future__ import annotations

import os
from collections.abc import Callable, Mapping
from itertools import count, cycle
from pathlib import Path

import torch

from ssd_artifacts.files import cache_folder, remember
from ssd_profiles.latency import DeviceKey, LatencyTable, base_of
from ssd_profiles.latency_law import broken_law
from ssd_profiles.mask import FULL
from ssd_runtime.devices.device import device_identity
from ssd_runtime.devices.memory import available_bytes
from ssd_runtime.model.batch.batch import Batch
from ssd_runtime.model.decoder import Decoder
from ssd_runtime.profiling.fit import DRAFT_HEAD, MIN_SAMPLES, Samples, coarse, fitted
from ssd_runtime.profiling.other_work import OtherWork, others_text
from ssd_runtime.profiling.shared_steps import measure_shared_steps
from ssd_runtime.profiling.timer import Timer
from ssd_runtime.sampling.argmax import argmax

QUERIES = (1, 2, 3, 4, 5, 6, 8, 12, 16, 24, 32)
CONTEXTS = (16, 128, 512, 2048, 8192, 32768, 131072)
COARSE_QUERIES = (1, 2, 4, 8, 32)
COARSE_SECONDS = 10.0
FIRST_QUERIES = (1, 2, 4, 8)
"""Numbers of rows in the provisional table for the first answers; measuring them takes a second at 1.5B."""
VARIED = 4
"""Number of inputs with which a mixture's MLP blocks are timed in turn, so that its experts do not stay in a cache."""
FAR = 2048
"""A context at which the cost of attention is visible."""
ENGINE = 11
"""Version of the decoder's speed and of its measurement; tables of older versions are measured again."""
MAX_ROUNDS = 9
STEPS_PER_ROUND = 3
"""Whole steps per round; there are more of them than of their parts, because plans depend on their growth with rows."""
OVERTIME = 3.0
"""Measuring ends after this many budgets, with at least one sample per figure. On a busy machine, threads wait for each
other and a step takes ten times as long."""
MAX_CACHE_BYTES = 2 << 30
LEAST_SLOTS = 256
"""Least slots of the cache, whatever their size: the slope over contexts needs two of them."""
CACHE_SHARE = 0.25
"""Largest share of the free memory that the cache takes: one layer of it exists twice while it grows."""
SHARED_SHARE = 0.3
"""Share of the time for steps of many rows and of several sequences."""

Timed = tuple[str, Callable[[], object]]
"""The name of a figure, and the work to time for it."""


class BusyMachineError(Exception):
    """A latency table breaks the law. Its text says how, and what other processes did meanwhile."""

    def __init__(self, breach: str, others: float, coarse: LatencyTable) -> None:
        """`coarse` is a table for callers that cannot wait; `others` is the number of processors that were busy."""
        super().__init__(f"{breach}; {others_text(others, os.cpu_count() or 1)}")
        self.coarse = coarse


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
def measure_latency(
    decoder: Decoder, budget_seconds: float = 30.0, between: Callable[[], object] | None = None
) -> LatencyTable:
    """Measure medians over interleaved rounds at every point of the grid, in about `budget_seconds`.

    Each figure is one pass through all layers ÷ their number, since a single layer in a loop would stay in the
    processor's cache. Every whole step follows a plain one, so that their ratio does not depend on the machine's pace.
    Long contexts that do not fit the budget are omitted, and the table is linear there. The same holds for steps of
    many rows and of many sequences. Large models and busy machines take up to `OVERTIME` budgets. `between` is that of
    `Timer`. Raises BusyMachineError, which has a coarse table, if the table breaks the law.
    """
    timer = Timer(decoder.device, between)
    bench = _Bench(decoder, QUERIES, timer)
    others = OtherWork()
    shared = measure_shared_steps(
        decoder,
        last_query=QUERIES[-1],
        budget_seconds=SHARED_SHARE * budget_seconds,
        cache_bytes=bench.cache_bytes,
        timer=timer,
    )
    contexts = bench.contexts(budget_seconds / 2)
    parts, steps = bench.works(contexts)
    rounds = ([*parts, *steps], *[steps] * (STEPS_PER_ROUND - 1))
    sweeps: list[dict[str, float]] = []
    longest = 0.0
    for round_number in range(MAX_ROUNDS):
        began = timer.spent
        if round_number >= MIN_SAMPLES and began + longest > budget_seconds:
            break
        for works in rounds:
            if sweeps and timer.spent > OVERTIME * budget_seconds:
                break
            sweeps.append({name: timer(work) for name, work in works})
        longest = max(longest, timer.spent - began)
    samples = bench.samples(contexts, sweeps)
    table = fitted(samples, shared)
    if (breach := broken_law(table)) is not None:
        raise BusyMachineError(breach, others.processors(), coarse(samples))
    return table


@torch.inference_mode()
def coarse_latency(
    decoder: Decoder, queries: tuple[int, ...] = COARSE_QUERIES, budget_seconds: float = COARSE_SECONDS
) -> LatencyTable:
    """A table of few points for callers that cannot wait, from as many sweeps as fit the budget, at least one."""
    timer = Timer(decoder.device)
    bench = _Bench(decoder, queries, timer)
    contexts = bench.contexts(0.0)
    parts, steps = bench.works(contexts)
    sweeps: list[dict[str, float]] = []
    while len(sweeps) < MAX_ROUNDS and (not sweeps or timer.spent < budget_seconds):
        sweeps.append({name: timer(work) for name, work in (*parts, *steps)})
    return coarse(bench.samples(contexts, sweeps))


def known_latency(decoder: Decoder, tables: Mapping[str, LatencyTable], model_key: str) -> LatencyTable | None:
    """This device's table: the bundle's (`tables` by slug), or the user cache's. None if neither has a sound one."""
    if (known := bundled_latency(decoder, tables)) is not None:
        return known
    try:
        kept = LatencyTable.from_json(latency_path(decoder, model_key).read_text(encoding="utf-8"))
    except (OSError, ValueError):
        return None
    return kept if broken_law(kept) is None else None


def keep_latency(decoder: Decoder, model_key: str, table: LatencyTable) -> bool:
    """Keep this device's table in the user's cache, unless it breaks the law. False if it cannot be written there."""
    return broken_law(table) is not None or remember(latency_path(decoder, model_key), table.to_json())


def bundled_latency(decoder: Decoder, tables: Mapping[str, LatencyTable]) -> LatencyTable | None:
    """This device's table among a bundle's.

    None if there is none, if its layer kinds are not the model's, or if it breaks the law.
    """
    table = tables.get(device_key(decoder).slug())
    if table is None or table.layer_kinds != decoder.layer_kinds or broken_law(table) is not None:
        return None
    return table


def latency_path(decoder: Decoder, model_key: str) -> Path:
    """The path of this device's table for a model in the user's cache."""
    return cache_folder() / "latency" / model_key[:16] / f"{device_key(decoder).slug()}.json"


def layers_by_kind(decoder: Decoder) -> dict[str, list[int]]:
    """The numbers of the layers of each kind."""
    names = decoder.layer_kinds
    return {kind: [i for i, name in enumerate(names) if name == kind] for kind in dict.fromkeys(names)}


class _Bench:
    """The works that are timed, on one cache."""

    def __init__(self, decoder: Decoder, queries: tuple[int, ...], timer: Timer) -> None:
        self.decoder = decoder
        self.queries = queries
        self.timer = timer
        self.cache = decoder.new_cache()
        self.kinds = layers_by_kind(decoder)

    @property
    def cache_bytes(self) -> int:
        """Bytes that caches may take."""
        return min(MAX_CACHE_BYTES, int(CACHE_SHARE * available_bytes(self.decoder.device)))

    def contexts(self, budget_seconds: float) -> list[int]:
        """The contexts that fit the model, the memory and, except for two, the time; one pass of each is tried."""
        shape = self.decoder.shape
        slots = max(LEAST_SLOTS, self.cache_bytes // self.decoder.kv_layout.bytes_per_slot)
        room = min(shape.max_context, slots) - max(self.queries)
        wanted = [context for context in CONTEXTS if context < room]
        if shape.max_context - max(self.queries) == room and room > (wanted[-1] if wanted else 0):
            wanted.append(room)
        # The slope over contexts needs two of them; the second is a far one, whatever its time.
        far = [context for context in wanted[1:] if context <= FAR][-1:] or wanted[1:2]
        others = [context for context in wanted[1:] if context not in far]
        chosen: list[int] = []
        spent = 0.0
        for context in wanted[:1] + far + others:
            self._reserve(context)
            passes = [self._attention(context, n, layers) for layers in self.kinds.values() for n in self.queries]
            cost = sum(self.timer(work) for work in passes)
            # The time of all rounds decides, so that a slow context is tried once at most.
            if len(chosen) > 1 and spent + cost * MIN_SAMPLES > budget_seconds:
                break
            chosen.append(context)
            spent += cost * MIN_SAMPLES
        if not chosen:
            chosen = [max(1, room)]
            self._reserve(chosen[0])
        return sorted(chosen)

    def _reserve(self, context: int) -> None:
        """Make room for a context and the rows after it, and write all of it.

        Memory that was never written is one page of zeros, which a processor reads from its cache. And over keys that
        are no numbers, all rows of a mixture choose the same experts.
        """
        self.cache.reserve(context + max(self.queries))
        for memory in self.cache.pool.storage:
            memory.zero_()

    def works(self, contexts: list[int]) -> tuple[list[Timed], list[Timed]]:
        """The parts of a step to measure, and the whole steps, each after a plain one."""
        base = contexts[base_of(contexts)]
        parts: list[Timed] = []
        for n in self.queries:
            parts += [
                (f"{kind} {context} {n}", self._attention(context, n, layers))
                for kind, layers in self.kinds.items()
                for context in contexts
            ]
            parts += [(f"mlp {n}", self._mlp(base, n)), (f"head {n}", self._head(n))]
        parts.append((DRAFT_HEAD, self._head(1, drafting=True)))
        plain = self._step(base, 1)
        steps = [pair for n in self.queries for pair in ((f"plain {n}", plain), (f"step {n}", self._step(base, n)))]
        return parts, steps

    def samples(self, contexts: list[int], sweeps: list[dict[str, float]]) -> Samples:
        """The sweeps, with the device, layers and grid that they were measured on."""
        return Samples(
            device=device_key(self.decoder),
            layer_kinds=self.decoder.layer_kinds,
            queries=self.queries,
            contexts=contexts,
            sweeps=sweeps,
        )

    def _rows(self, n: int) -> torch.Tensor:
        """Embeddings [n, hidden] of the decoder's probe ids."""
        return self.decoder.embed(self.decoder.probe_ids(n))

    def _batch(self, context: int, n: int) -> Batch:
        return Batch.of([self.decoder.batches.timed(self.cache, context, n)])

    def _attention(self, context: int, n: int, layers: list[int]) -> Callable[[], object]:
        decoder = self.decoder
        x = self._rows(n)
        batch = self._batch(context, n)
        parts = [(2 * layer, FULL) for layer in layers]
        return lambda: decoder.sublayers.run(parts, x, batch)

    def _mlp(self, context: int, n: int) -> Callable[[], object]:
        decoder = self.decoder
        x = self._rows(n)
        batch = self._batch(0, n)
        if decoder.family.router is not None:
            passes = cycle([self._before_mlps(context, n, n * number) for number in range(VARIED)])
            return lambda: [decoder.sublayers.mlp(layer, x) for layer, x in enumerate(next(passes))]
        parts = [(2 * layer + 1, FULL) for layer in range(decoder.shape.num_layers)]
        return lambda: decoder.sublayers.run(parts, x, batch)

    def _before_mlps(self, context: int, n: int, first: int) -> list[torch.Tensor]:
        """The states [n, hidden] that reach each MLP block: they decide how many experts the rows share."""
        states = list[torch.Tensor]()
        x = self.decoder.embed(self.decoder.probe_ids(n, first))
        self.decoder.run(x, self._batch(context, n), states=states)
        return states[::2]

    def _head(self, n: int, drafting: bool = False) -> Callable[[], object]:
        decoder = self.decoder
        x = self._rows(n)
        return lambda: argmax(decoder.logits(x, drafting=drafting)).tolist()

    def _step(self, context: int, n: int) -> Callable[[], object]:
        decoder = self.decoder
        numbers = count()

        def work() -> None:
            ids = decoder.probe_ids(n, n * next(numbers))  # others each time: a mixture's experts would stay in a cache
            x = decoder.run(decoder.embed(ids), self._batch(context, n))
            argmax(decoder.logits(x)).tolist()

        return work
