"""The command `ssd-serve`."""

from __future__ import annotations

import logging
import sys
from dataclasses import replace
from pathlib import Path

from ssd_artifacts.reference_bundle import is_packaged
from ssd_artifacts.sharing.reachable import is_local
from ssd_profiles.errors import UserError, require_packages
from ssd_runtime.commands.command import closing, command_app, run_command, uncollected
from ssd_runtime.commands.groups import with_groups
from ssd_runtime.commands.options import (
    BundleOptions,
    KvBitsOption,
    ModelOptions,
    RecordOptions,
    StrategyOptions,
    VersionOption,
    read_size,
)
from ssd_runtime.commands.serve_options import LimitOptions, ReplicaOptions, ServerOptions
from ssd_runtime.loading.source import read_source
from ssd_runtime.serving.http.keys import KEY_VARIABLE, read_keys
from ssd_runtime.serving.http.listening import listen, url_of
from ssd_runtime.serving.http.settings import ServiceOptions
from ssd_runtime.serving.ray_app.ray_cluster import LOCAL
from ssd_runtime.serving.ray_app.scale import Scale

CLOSING = closing(
    "Serve:     ssd-serve -m ./my-model --port 8000",
    "With keys: SSD_API_KEY=secret ssd-serve --bundle bundle --host 0.0.0.0",
    "Limits:    ssd-serve --bundle bundle --max-concurrency 4 --max-new-tokens 1024",
    "Record:    ssd-serve --bundle bundle --reload --record traffic.jsonl",
    "Replicas:  ssd-serve --bundle bundle --replicas 4",
    codes="Exit codes: 0 stopped, 2 bad input, 130 interrupted while loading.",
)
app = command_app()
log = logging.getLogger("ssd_serve")


@app.command(epilog=CLOSING)
@with_groups
def serve(
    model: ModelOptions,
    bundle: BundleOptions,
    strategy: StrategyOptions,
    server: ServerOptions,
    limits: LimitOptions,
    record: RecordOptions,
    cluster: ReplicaOptions,
    kv_bits: KvBitsOption = None,
    version: VersionOption = False,
) -> None:
    """Serve a model under OpenAI's HTTP interface; decode faster, with the output of plain decoding up to rounding."""
    require_packages("ssd-serve", "serve", "starlette", "uvicorn", "prometheus_client")
    keys = read_keys(server.api_key)
    load_settings = model.load_settings(kv_bits=kv_bits)
    strategy.parameters(bundle.artifact is not None)
    allowed = limits.allowed(bundle.artifact is not None)
    source = read_source(bundle.artifact, model.model, bundle.require_signature)
    if server.reload and (source.opened is None or not Path(source.opened.where).is_dir()):
        raise UserError(
            "--reload: there is no folder to look at again; give a bundle's folder with --bundle, or omit it"
        )
    cache_bytes = read_size(limits.kv_memory, "--kv-memory")
    template = server.template
    origins = server.allowed_origins
    scale = _scale(cluster, model, server, record)
    logging.basicConfig(level=logging.WARNING, format="%(asctime)s %(levelname)s %(message)s", stream=sys.stderr)
    log.setLevel(logging.INFO)

    listener = listen(server.host, server.port)
    recorder = record.recorder()
    log.info("loading %s; requests are taken on %s once it is loaded", source.model, url_of(listener))
    if not keys and not is_local(server.host):
        log.warning("everybody who reaches %s can use this server; give --api-key or %s", server.host, KEY_VARIABLE)
    options = ServiceOptions(
        artifact=bundle.artifact,
        model=model.model,
        require_signature=bundle.require_signature,
        load=load_settings,
        strategy=strategy.strategy,
        assignments=tuple(strategy.assignments or ()),
        allow_strategies=allowed,
        name=server.name,
        api_keys=keys,
        share_between_keys=server.share_between_keys,
        max_concurrency=limits.max_concurrency,
        max_queue=limits.max_queue,
        max_prompt_tokens=limits.max_prompt_tokens,
        max_new_tokens=limits.max_new_tokens,
        max_body_bytes=limits.max_body_bytes,
        cache_bytes=cache_bytes,
        chat_template=template,
        allowed_origins=origins,
        allowed_hosts=server.allowed_hosts,
        temperature=server.temperature,
        page=not server.no_page,
    )
    if scale is not None:
        from ssd_runtime.serving.ray_app.serving import serve_replicas

        free = listener.getsockname()[1]
        listener.close()
        serve_replicas(_everywhere(options, scale), scale, cluster.ray, server.host, free)
        return
    with uncollected():
        # These imports take seconds and come last, so that bad input is answered at once.
        from ssd_runtime.serving.http.opening import open_service, watch_bundle
        from ssd_runtime.serving.http.server import serve as serve_requests

        service = open_service(options, source, log.info, recorder)
    try:
        serve_requests(service, listener, server.grace, watch_bundle(options, source, service), server.reload)
    finally:
        service.thread.close(0.0)
        if recorder is not None:
            recorder.close()


def main() -> None:
    """Run the command. A user's mistake ends it with one line and exit code 2."""
    run_command(app)


def _scale(cluster: ReplicaOptions, model: ModelOptions, server: ServerOptions, record: RecordOptions) -> Scale | None:
    """The replicas that are asked for, if any. Raises UserError for options that do not go with them."""
    if cluster.replicas is None:
        if cluster.ray != LOCAL:
            raise UserError("--ray: a cluster serves replicas; give --replicas N too, or omit it")
        return None
    require_packages("--replicas", "ray", "ray")
    scale = Scale.of(
        cluster.replicas,
        model.threads,
        device=model.device,
        local=cluster.ray == LOCAL,
        grace=server.grace,
        reload=server.reload,
    )
    if record.record is not None:
        raise UserError("--record: replicas on other hosts would write other files; omit it, or --replicas")
    return scale


def _everywhere(options: ServiceOptions, scale: Scale) -> ServiceOptions:
    """The options for a replica, with whole paths, since it runs in another folder."""
    from ssd_runtime.loading.sources import NAMED

    return replace(
        options,
        artifact=options.artifact if is_packaged(options.artifact) else _whole(options.artifact),
        model=options.model if options.model in NAMED else _whole(options.model),
        require_signature=options.require_signature and options.require_signature.resolve(),
        load=replace(options.load, threads=scale.cpus),
    )


def _whole(path: str | None) -> str | None:
    """The absolute form of a path that exists here; other names, such as Hub ids, unchanged."""
    return str(Path(path).resolve()) if path is not None and Path(path).exists() else path
