"""Opens a service: loads the model behind the options of a server."""

from __future__ import annotations

import gc
import threading
import time
from collections.abc import Callable
from concurrent.futures import Future
from typing import TypeVar

from ssd_profiles.errors import UserError
from ssd_runtime.devices.memory import gib
from ssd_runtime.engine.engine import Engine
from ssd_runtime.engine.opening import open_engine
from ssd_runtime.loading.source import ModelSource
from ssd_runtime.planning.registry import find_strategy, read_settings
from ssd_runtime.serving.http.app import Service
from ssd_runtime.serving.http.engine_thread import EngineThread
from ssd_runtime.serving.http.keys import ApiKeys
from ssd_runtime.serving.http.metrics import Metrics
from ssd_runtime.serving.http.openai.requests.prompt_encoder import PromptEncoder
from ssd_runtime.serving.http.reload import BundleWatch
from ssd_runtime.serving.http.settings import ServerSettings, ServiceOptions
from ssd_runtime.serving.record import Recorder

T = TypeVar("T")
LEAST_CONTEXT = 256
"""Fewer tokens of a prompt with its answer are no use to anybody, unless they are the model's whole context."""


def open_service(
    options: ServiceOptions, source: ModelSource, note: Callable[[str], object], recorder: Recorder | None = None
) -> Service:
    """Load the model, prepare what would delay the first requests, and start the engine's thread."""
    parameters = read_settings(options.strategy, list(options.assignments))
    prepared = {name: read_settings(name, []) for name in options.allow_strategies} | {options.strategy: parameters}

    def load() -> tuple[Engine, PromptEncoder, ServerSettings]:
        engine = open_engine(source, options.load, note, measure_later=True)
        engine.max_sequences = options.max_concurrency
        engine.cache_bytes = options.cache_bytes
        settings = ServerSettings(
            options=options,
            model_name=options.name or source.model,
            max_context=_context(engine, note),
            vocabulary=engine.loaded.model.config.vocab_size,
            parameters=parameters,
            has_bundle=source.bundle is not None,
            light=any(
                find_strategy(name).needs_light or getattr(known, "light", False) for name, known in prepared.items()
            ),
            created=int(time.time()),
        )
        encoder = PromptEncoder(engine.loaded, options.chat_template, settings.longest_prompt)
        if options.chat_template is not None:
            encoder.check_template("the template")
        elif not engine.loaded.tokenizer.chat_template:
            note("the model has no chat template: messages are joined without their roles; --chat-template gives one")
        # The first requests would wait for these: a first look at this device, or copies of weights.
        for name, known in prepared.items():
            engine.planners(name, known)
        return engine, encoder, settings

    engine, encoder, settings = _in_a_thread(load)
    metrics = Metrics(settings.model_name)
    service = Service(
        thread=EngineThread(engine, places=options.max_concurrency + options.max_queue, metrics=metrics),
        settings=settings,
        encoder=encoder,
        metrics=metrics,
        keys=ApiKeys(options.api_keys, options.share_between_keys),
        recorder=recorder,
    )
    watch_gauges(service)
    # No thread runs while garbage is collected: a third of a second if libraries and model are searched each time.
    gc.collect()
    gc.freeze()
    service.thread.start()
    return service


def watch_bundle(options: ServiceOptions, source: ModelSource, service: Service) -> BundleWatch | None:
    """The watch of the bundle's folder; None without a bundle."""
    if source.opened is None:
        return None
    return BundleWatch(source.opened, options.require_signature, service.thread, service.metrics)


def watch_gauges(service: Service) -> None:
    """Add the gauges that read a running engine."""
    thread = service.thread
    scheduler = thread.engine.scheduler
    gauge = service.metrics.gauge
    gauge("vllm:num_requests_running", "Requests that are being decoded.", lambda: thread.running)
    gauge("vllm:num_requests_waiting", "Requests that wait.", lambda: thread.waiting)
    gauge(
        "vllm:kv_cache_usage_perc",
        "Share of the memory for keys and values in use, from 0 to 1; prefixes are included.",
        lambda: scheduler.pool.used_bytes / max(1, scheduler.pool.bytes),
    )
    gauge("ssd:kv_pool_bytes", "Bytes for keys and values.", lambda: scheduler.pool.bytes)
    gauge("ssd:kv_pool_used_bytes", "Bytes in use, prefixes included.", lambda: scheduler.pool.used_bytes)
    gauge("ssd:prefix_bytes", "Bytes of kept prefixes.", lambda: scheduler.prefixes.bytes)
    gauge("ssd:prefixes", "Kept prefixes.", lambda: len(scheduler.prefixes))


def _in_a_thread(work: Callable[[], T]) -> T:
    """The result of work that is done in a thread of its own.

    OpenMP keeps a pool of workers per thread that used it, which ends with that thread. With more workers than cores,
    they block between operations instead of spinning, and waking them costs a third of a small model's step. So the
    thread that loaded and measured must end before the engine's begins.
    """
    done: Future[T] = Future()

    def run() -> None:
        try:
            done.set_result(work())
        except BaseException as error:  # raised where the result is asked for
            done.set_exception(error)

    thread = threading.Thread(target=run, name="ssd-load", daemon=True)
    thread.start()
    result = done.result()
    thread.join()
    return result


def _context(engine: Engine, note: Callable[[str], object]) -> int:
    """Tokens of a prompt with its answer: the model's context, or what the memory for keys and values holds."""
    scheduler = engine.scheduler
    most = scheduler.most_tokens
    pool = scheduler.pool
    room = (pool.bytes - pool.state_bytes) // pool.layout.bytes_per_slot
    states = f", {gib(pool.state_bytes)} of it for states" if pool.state_bytes else ""
    note(f"keys and values take {gib(pool.bytes)}{states}, room for {room} tokens of all requests and prefixes")
    whole = engine.decoder.shape.max_context
    least = min(LEAST_CONTEXT, whole)
    if most < least:
        raise UserError(
            f"{gib(pool.bytes)} for keys and values hold no request of {least} tokens; give more with --kv-memory"
        )
    if most < whole:
        note(f"that bounds a request to {most} tokens of the model's {whole}; --kv-memory gives more")
    return most
