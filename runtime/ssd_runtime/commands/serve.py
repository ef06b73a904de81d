"""The command `ssd-serve`."""

from __future__ import annotations

import logging
import sys
from dataclasses import replace
from pathlib import Path
from typing import Annotated

import typer

from ssd_artifacts.reference_bundle import is_packaged
from ssd_artifacts.sharing.reachable import is_local
from ssd_profiles.errors import UserError, require_packages
from ssd_runtime.commands.command import closing, command_app, run_command
from ssd_runtime.commands.options import (
    AllowSpecialOption,
    ArtifactOption,
    AssignmentsOption,
    DeviceOption,
    DraftBitsOption,
    DtypeOption,
    ModelOption,
    SignatureOption,
    StrategyOption,
    ThreadsOption,
    VersionOption,
    WeightMemoryOption,
    WeightsOption,
    read_size,
)
from ssd_runtime.engine.opening import LoadSettings
from ssd_runtime.loading.source import read_source
from ssd_runtime.planning.registry import check_strategy, read_settings
from ssd_runtime.serving.http.keys import KEY_VARIABLE, read_keys
from ssd_runtime.serving.ray_app.ray_cluster import LOCAL, require_ray
from ssd_runtime.serving.ray_app.scale import Scale
from ssd_runtime.serving.record import RecordOption, RedactOption, ShareOption, read_recorder
from ssd_runtime.weights.draft_bits import read_draft_bits
from ssd_runtime.weights.dtype_names import read_dtype

SERVER_PANEL = "Server"
LIMIT_PANEL = "Limits"
CLUSTER_PANEL = "Cluster"
CLOSING = closing(
    "Serve:     ssd-serve -m ./my-model --port 8000",
    "With keys: SSD_API_KEY=secret ssd-serve --bundle bundle --host 0.0.0.0",
    "Limits:    ssd-serve --bundle bundle --max-concurrency 4 --max-new-tokens 1024",
    "Record:    ssd-serve --bundle bundle --reload --record traffic.jsonl",
    "Replicas:  ssd-serve --bundle bundle --replicas 4",
)
app = command_app()
log = logging.getLogger("ssd_serve")


@app.command(epilog=CLOSING)
def serve(
    model: ModelOption = None,
    artifact: ArtifactOption = None,
    require_signature: SignatureOption = None,
    device: DeviceOption = None,
    dtype: DtypeOption = None,
    weights: WeightsOption = None,
    weight_memory: WeightMemoryOption = None,
    threads: ThreadsOption = None,
    allow_special: AllowSpecialOption = False,
    strategy: StrategyOption = "auto",
    assignments: AssignmentsOption = None,
    draft_bits: DraftBitsOption = "auto",
    host: Annotated[
        str, typer.Option(help="Address to listen on; 0.0.0.0 for all.", rich_help_panel=SERVER_PANEL)
    ] = "127.0.0.1",
    port: Annotated[
        int,
        typer.Option(min=0, max=65535, help="Port to listen on; 0 for a free one.", rich_help_panel=SERVER_PANEL),
    ] = 8000,
    name: Annotated[
        str | None,
        typer.Option(help="The model's name for clients; by default its own.", rich_help_panel=SERVER_PANEL),
    ] = None,
    api_key: Annotated[
        list[str] | None,
        typer.Option(
            "--api-key",
            help=f"A key that clients must send; repeatable, or {KEY_VARIABLE}=A,B.",
            rich_help_panel=SERVER_PANEL,
        ),
    ] = None,
    share_between_keys: Annotated[
        bool,
        typer.Option(
            "--share-between-keys",
            help="Let all keys share cached prefixes and what decoding has learned.",
            rich_help_panel=SERVER_PANEL,
        ),
    ] = False,
    reload: Annotated[
        bool,
        typer.Option(
            "--reload",
            help="Load the bundle again when its folder changes; without --replicas, SIGHUP does so too.",
            rich_help_panel=SERVER_PANEL,
        ),
    ] = False,
    grace: Annotated[
        float,
        typer.Option(
            min=0.0,
            max=3600.0,
            help="Seconds that open requests have to finish in at shutdown.",
            rich_help_panel=SERVER_PANEL,
        ),
    ] = 30.0,
    chat_template: Annotated[
        Path | None,
        typer.Option(
            help="A file with the chat template (Jinja) to use in place of the model's own.",
            rich_help_panel=SERVER_PANEL,
        ),
    ] = None,
    allow_origin: Annotated[
        list[str] | None,
        typer.Option(
            help="An origin, such as https://chat.example, whose web pages may use the server; repeatable.",
            rich_help_panel=SERVER_PANEL,
        ),
    ] = None,
    temperature: Annotated[
        float,
        typer.Option(
            min=0.0,
            max=2.0,
            help="Temperature of requests that name none; 0 is greedy.",
            rich_help_panel=SERVER_PANEL,
        ),
    ] = 1.0,
    max_concurrency: Annotated[
        int, typer.Option(min=1, max=1024, help="Answers decoded at once, at most.", rich_help_panel=LIMIT_PANEL)
    ] = 8,
    max_queue: Annotated[
        int, typer.Option(min=0, max=65536, help="Answers that may wait for a place.", rich_help_panel=LIMIT_PANEL)
    ] = 64,
    kv_memory: Annotated[
        str | None,
        typer.Option(
            help="Memory for keys and values, prefixes included, e.g. 4G; by default half of the free memory, "
            "but at most twice what --max-concurrency full contexts need.",
            rich_help_panel=LIMIT_PANEL,
        ),
    ] = None,
    max_prompt_tokens: Annotated[
        int | None,
        typer.Option(min=1, help="Longest prompt; by default what the context holds.", rich_help_panel=LIMIT_PANEL),
    ] = None,
    max_new_tokens: Annotated[
        int | None,
        typer.Option(
            min=1,
            help="Longest answer that a request may ask for; by default what the context holds.",
            rich_help_panel=LIMIT_PANEL,
        ),
    ] = None,
    max_body_bytes: Annotated[
        int, typer.Option(min=1024, help="Largest body of a request, in bytes.", rich_help_panel=LIMIT_PANEL)
    ] = 4 << 20,
    record: RecordOption = None,
    record_share: ShareOption = None,
    record_redact: RedactOption = None,
    replicas: Annotated[
        str | None,
        typer.Option(
            help="Serve from N processes on Ray, or MIN:MAX by the load; by default one, without Ray.",
            rich_help_panel=CLUSTER_PANEL,
        ),
    ] = None,
    ray: Annotated[
        str,
        typer.Option(
            help="Address of the cluster for --replicas, such as auto; `local` starts one here.",
            rich_help_panel=CLUSTER_PANEL,
        ),
    ] = LOCAL,
    version: VersionOption = False,
) -> None:
    """Serve a model under OpenAI's HTTP interface; decode faster, with the output of plain decoding up to rounding."""
    require_packages("ssd-serve", "serve", "starlette", "uvicorn", "prometheus_client")
    keys = read_keys(api_key)
    bits = read_draft_bits(draft_bits)
    load_settings = LoadSettings(
        device=device,
        dtype=read_dtype(dtype),
        weights=weights,
        weight_memory=read_size(weight_memory),
        threads=threads,
        draft_bits=bits,
        allow_special=allow_special,
    )
    check_strategy(strategy, artifact is not None)
    read_settings(strategy, assignments or [])
    source = read_source(artifact, model, require_signature)
    if reload and source.opened is None:
        raise UserError("--reload: there is no bundle to load again; give one with --bundle, or omit it")
    cache_bytes = read_size(kv_memory, "--kv-memory")
    template = _template(chat_template)
    if replicas is None and ray != LOCAL:
        raise UserError("--ray: a cluster serves replicas; give --replicas N too, or omit it")
    scale = None
    if replicas is not None:
        require_ray("--replicas")
        scale = Scale.of(replicas, threads, device=device, local=ray == LOCAL, grace=grace, reload=reload)
        if record is not None:
            raise UserError("--record: replicas on other hosts would write other files; omit it, or --replicas")
    recorder = read_recorder(record, record_share, record_redact)
    logging.basicConfig(level=logging.WARNING, format="%(asctime)s %(levelname)s %(message)s", stream=sys.stderr)
    log.setLevel(logging.INFO)

    from ssd_runtime.serving.http.server import Binding, listen, serve, url_of

    listener = listen(host, port)
    log.info("loading %s; requests are taken on %s once it is loaded", source.model, url_of(listener))
    if not keys and not is_local(host):
        log.warning("everybody who reaches %s can use this server; give --api-key or %s", host, KEY_VARIABLE)
    # These imports take seconds and come last, so that bad input is answered at once.
    from ssd_runtime.serving.http.opening import ServiceOptions, open_service, watch_bundle
    from ssd_runtime.serving.http.reload import POLL_SECONDS

    options = ServiceOptions(
        artifact=artifact,
        model=model,
        require_signature=require_signature,
        load=load_settings,
        strategy=strategy,
        assignments=tuple(assignments or ()),
        name=name,
        api_keys=keys,
        share_between_keys=share_between_keys,
        max_concurrency=max_concurrency,
        max_queue=max_queue,
        max_prompt_tokens=max_prompt_tokens,
        max_new_tokens=max_new_tokens,
        max_body_bytes=max_body_bytes,
        cache_bytes=cache_bytes,
        chat_template=template,
        allowed_origins=tuple(allow_origin or ()),
        temperature=temperature,
    )
    if scale is not None:
        from ssd_runtime.loading.sources import DEMOS
        from ssd_runtime.serving.ray_app.serving import serve_replicas

        # Ray shows a replica the cards that it has got, and no others.
        own = "cuda" if device is not None and device.startswith("cuda:") else device
        load = replace(load_settings, threads=scale.cpus, device=own)
        key = require_signature and require_signature.resolve()
        options = replace(
            options,
            artifact=artifact if is_packaged(artifact) else _whole(artifact),
            model=model if model in DEMOS else _whole(model),
            require_signature=key,
            load=load,
        )
        free = listener.getsockname()[1]
        listener.close()
        serve_replicas(options, scale, ray, host, free)
        return
    service = open_service(options, source, log.info, recorder)
    binding = Binding(listener=listener, grace=grace, poll=POLL_SECONDS if reload else None)
    try:
        serve(service, binding, watch_bundle(options, source, service))
    finally:
        service.thread.close(0.0)
        if recorder is not None:
            recorder.close()


def main() -> None:
    """Run the command. A user's mistake ends it with one line and exit code 2."""
    run_command(app)


def _template(path: Path | None) -> str | None:
    """The text of a Jinja template; None without a path. Raises UserError if the file cannot be read, or is empty."""
    if path is None:
        return None
    try:
        text = path.read_text(encoding="utf-8")
    except (OSError, UnicodeDecodeError) as error:
        reason = getattr(error, "strerror", None) or "it is not text in UTF-8"
        raise UserError(f"--chat-template: {path} cannot be read ({reason}); give a file with a template") from None
    if not text.strip():
        raise UserError(f"--chat-template: {path} is empty; give a file with a template")
    return text


def _whole(path: str | None) -> str | None:
    """A path of this machine from its root, since replicas run in other folders; names of other kinds as they are."""
    return str(Path(path).resolve()) if path is not None and Path(path).exists() else path
