"""The application of Ray Serve: a router before replicas."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

from pydantic import BaseModel, ConfigDict, Field
from ray import serve
from ray.serve.config import AutoscalingConfig, RequestRouterConfig
from ray.serve.schema import LoggingConfig
from starlette.applications import Starlette

from ssd_runtime.engine.opening import LoadSettings
from ssd_runtime.serving.http.keys import ApiKeys, read_keys
from ssd_runtime.serving.http.settings import ServiceOptions
from ssd_runtime.serving.http.transport.web_pages import web_page_middleware
from ssd_runtime.serving.ray_app.handle import ServedReplicas
from ssd_runtime.serving.ray_app.replica import Replica
from ssd_runtime.serving.ray_app.router import Router
from ssd_runtime.serving.ray_app.scale import Scale
from ssd_runtime.weights.dtype_names import read_dtype

REPLICA = "replica"
"""Name of the replicas' deployment."""
MOST_OPEN = 100_000
"""Requests that a router holds, at most; replicas limit them before."""
QUIET = LoggingConfig(log_level="WARNING", enable_access_log=False)


def application(options: ServiceOptions, scale: Scale) -> serve.Application:
    """An application that serves `options` on as many replicas as `scale` says."""

    longest, keys = options.max_body_bytes, options.api_keys
    web_pages = web_page_middleware(options.allowed_hosts, options.allowed_origins)

    def make_router() -> Starlette:
        handle = serve.get_deployment_handle(REPLICA, serve.get_replica_context().app_name)
        return Router(ServedReplicas(handle), longest, ApiKeys(keys)).app(web_pages)

    replicas: Any = serve.deployment(
        Replica,
        name=REPLICA,
        # A replica takes as many requests as it decodes at once. Others go to the next one, or wait for it.
        max_ongoing_requests=options.max_concurrency,
        max_queued_requests=max(1, options.max_queue),
        request_router_config=_routing(scale),
        ray_actor_options={"num_cpus": scale.cpus, "num_gpus": scale.gpus},
        graceful_shutdown_timeout_s=scale.grace,
        health_check_period_s=2.0,
        logging_config=QUIET,
        **_numbers(scale, options.max_concurrency),
    )
    ingress: Any = serve.ingress(make_router)()
    router: Any = serve.deployment(
        ingress,
        name="router",
        max_ongoing_requests=MOST_OPEN,
        graceful_shutdown_timeout_s=scale.grace,
        ray_actor_options={"num_cpus": 0},
        logging_config=QUIET,
    )
    bound: serve.Application = router.bind(replicas.bind(of_replica(options), scale.reload))
    return bound


def of_replica(options: ServiceOptions) -> ServiceOptions:
    """The options for a replica, on the card that Ray gives it; web pages are the router's affair alone."""
    device = options.load.device
    own = "cuda" if device is not None and device.startswith("cuda:") else device
    return replace(options, allowed_hosts=None, allowed_origins=(), load=replace(options.load, device=own))


def _routing(scale: Scale) -> RequestRouterConfig:
    """All turns of a conversation go to one replica by its key, or if that is full to the next ones."""
    # Ray Serve's own router by prompts needs pyarrow and vLLM's extra; this one takes the key that our router gives it.
    by_key: dict[str, Any] = {
        "request_router_class": "ray.serve.experimental.consistent_hash_router.ConsistentHashRouter",
        "request_router_kwargs": {"num_fallback_replicas": max(1, scale.most - 1)},
    }
    return RequestRouterConfig(**by_key)


def _numbers(scale: Scale, places: int) -> dict[str, Any]:
    """The options that say how many replicas there are: so many, or by the number of open requests."""
    if scale.least == scale.most:
        return {"num_replicas": scale.most}
    by_queue = AutoscalingConfig(
        min_replicas=scale.least, max_replicas=scale.most, target_ongoing_requests=max(1.0, 0.75 * places)
    )
    return {"autoscaling_config": by_queue}


class BuildArguments(BaseModel):
    """Arguments of `serve run ssd_runtime.serving.ray_app.application:build NAME=VALUE…`, as those of `ssd-serve`."""

    model_config = ConfigDict(extra="forbid")

    artifact: str | None = None
    model: str | None = None
    name: str | None = None
    strategy: str = "auto"
    allow_strategies: str = ""
    allow_host: str = ""
    """Names, parted by commas, under which it is reached, beside this machine's own; `*` for any."""
    replicas: str = "1"
    threads: int = Field(default=1, ge=1)
    device: str | None = None
    dtype: str | None = None
    weights: str | None = None
    allow_special: bool = False
    temperature: float = 1.0
    max_concurrency: int = Field(default=8, ge=1)
    max_queue: int = Field(default=64, ge=0)


def build(arguments: BuildArguments) -> serve.Application:
    """Build the application for `serve run`. Keys come from SSD_API_KEY, where it runs."""
    keys = read_keys(None)
    hosts = tuple(filter(None, arguments.allow_host.split(",")))
    options = ServiceOptions(
        artifact=arguments.artifact,
        model=arguments.model,
        load=LoadSettings(
            device=arguments.device,
            dtype=read_dtype(arguments.dtype),
            weights=arguments.weights,
            threads=arguments.threads,
            allow_special=arguments.allow_special,
        ),
        strategy=arguments.strategy,
        allow_strategies=tuple(filter(None, arguments.allow_strategies.split(","))),
        # Web pages have no key.
        allowed_hosts=None if keys and not hosts else hosts,
        name=arguments.name,
        api_keys=keys,
        temperature=arguments.temperature,
        max_concurrency=arguments.max_concurrency,
        max_queue=arguments.max_queue,
    )
    return application(options, Scale.of(arguments.replicas, arguments.threads, device=arguments.device))
