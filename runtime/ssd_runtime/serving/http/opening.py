"""Opens a service: the options of a server, and the model behind them."""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path

from ssd_runtime.engine.opening import LoadSettings, ModelSource, open_engine, read_source
from ssd_runtime.planning.registry import read_settings
from ssd_runtime.serving.http.app import Service
from ssd_runtime.serving.http.engine_thread import EngineThread
from ssd_runtime.serving.http.keys import ApiKeys
from ssd_runtime.serving.http.metrics import Metrics
from ssd_runtime.serving.http.openai.prompt_encoder import PromptEncoder
from ssd_runtime.serving.http.reload import BundleWatch
from ssd_runtime.serving.http.settings import ServerSettings
from ssd_runtime.serving.record import Recorder


@dataclass(frozen=True, slots=True, kw_only=True)
class ServiceOptions:
    """The options of a server, under the names of `ssd-serve`; plain data, so that every replica gets the same."""

    artifact: str | None = None
    model: str | None = None
    require_signature: Path | None = None
    load: LoadSettings = field(default_factory=LoadSettings)
    strategy: str = "auto"
    assignments: tuple[str, ...] = ()
    name: str | None = None
    api_keys: tuple[str, ...] = ()
    share_between_keys: bool = False
    max_concurrency: int = 8
    max_queue: int = 64
    max_prompt_tokens: int | None = None
    max_new_tokens: int | None = None
    max_body_bytes: int = 4 << 20
    temperature: float = 1.0

    def source(self) -> ModelSource:
        """Open the bundle. Raises UserError as `read_source` does."""
        return read_source(self.artifact, self.model, self.require_signature)


def open_service(
    options: ServiceOptions, source: ModelSource, note: Callable[[str], object], recorder: Recorder | None = None
) -> Service:
    """Load the model, prepare what would delay the first requests, and start the engine's thread."""
    engine = open_engine(source, options.load, note)
    engine.max_sequences = options.max_concurrency
    parameters = read_settings(options.strategy, list(options.assignments))
    # The first requests would wait for these: measuring this device, copying weights, allocating keys and values.
    _ = engine.latency
    _ = engine.scheduler
    engine.planners(options.strategy, parameters)
    settings = ServerSettings(
        model_name=options.name or source.model,
        max_context=engine.decoder.shape.max_context,
        vocabulary=engine.loaded.model.config.vocab_size,
        strategy=options.strategy,
        parameters=parameters,
        has_bundle=source.bundle is not None,
        temperature=options.temperature,
        max_prompt_tokens=options.max_prompt_tokens,
        max_new_tokens=options.max_new_tokens,
        max_body_bytes=options.max_body_bytes,
        created=int(time.time()),
    )
    metrics = Metrics(settings.model_name)
    service = Service(
        thread=EngineThread(engine, places=options.max_concurrency + options.max_queue, observer=metrics),
        settings=settings,
        encoder=PromptEncoder(engine.loaded),
        metrics=metrics,
        keys=ApiKeys(options.api_keys, options.share_between_keys),
        recorder=recorder,
    )
    watch_gauges(service)
    service.thread.start()
    return service


def watch_bundle(options: ServiceOptions, source: ModelSource, service: Service) -> BundleWatch | None:
    """The watch of the bundle's folder; None without a bundle."""
    if source.opened is None:
        return None
    return BundleWatch(source.opened.folder, options.require_signature, service.thread, service.metrics)


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
