"""The command `ssd-compile`."""

from __future__ import annotations

import json
import re
from functools import partial
from pathlib import Path
from typing import Annotated

import typer

from ssd_artifacts.bundle import Bundle, require_replaceable
from ssd_artifacts.domain_config import MAX_CONCURRENCY, MIXTURE
from ssd_artifacts.sharing.opening import open_given
from ssd_compiler.progress import Reporter
from ssd_compiler.report.summary import domain_summary
from ssd_compiler.report.terminal import show
from ssd_compiler.settings import ANCHOR_RULES, MIN_PROMPTS, SEARCH_METHODS, CompileSettings, SearchMethod
from ssd_profiles.domain import load_domain
from ssd_profiles.errors import UserError, require_packages
from ssd_profiles.prompts import read_prompts
from ssd_runtime.commands.command import closing, command_app, run_command
from ssd_runtime.commands.options import (
    OUTPUT_PANEL,
    AllowSpecialOption,
    DeviceOption,
    DraftBitsOption,
    DtypeOption,
    ModelOption,
    SignatureOption,
    ThreadsOption,
    VersionOption,
    WeightMemoryOption,
    WeightsOption,
    read_size,
    values,
)
from ssd_runtime.serving.ray_app.ray_cluster import ray_cluster
from ssd_runtime.weights.draft_bits import read_draft_bits
from ssd_runtime.weights.dtype_names import read_dtype

MOST_FOUND = 64
LIBRARIES = ("sklearn", "bayes_opt")
"""Modules of the extra `compile`."""

DOMAIN_PANEL = "Domains"
SEARCH_PANEL = "Search"
EXIT_PANEL = "Exit heads"
ANCHOR_PANEL = "Routing anchors"
BUNDLE_PANEL = "Bundle"
CLUSTER_PANEL = "Cluster"
CLOSING = closing(
    "Packaged domains: ssd-compile -m ./my-model --domains cnn,gsm8k --evaluations 24 -o bundle",
    "Your prompts:     ssd-compile -m ./my-model --domain-file mail=mail.jsonl --budget 10m -o bundle",
    "Found domains:    ssd-compile -m ./my-model --domains auto --domain-file all=all.jsonl -o bundle",
    "One domain more:  ssd-compile --from bundle --domains wmt16 -o bundle",
    "Exit heads:       ssd-compile -m ./my-model --domains gsm8k --exits 8 -o bundle",
)
app = command_app()


@app.command(epilog=CLOSING)
def compile_(
    model: ModelOption = None,
    device: DeviceOption = None,
    dtype: DtypeOption = None,
    weights: WeightsOption = None,
    weight_memory: WeightMemoryOption = None,
    draft_bits: DraftBitsOption = "auto",
    threads: ThreadsOption = None,
    allow_special: AllowSpecialOption = False,
    domains: Annotated[
        str,
        typer.Option(
            help="Packaged domains, e.g. cnn,gsm8k; or auto[:N] to find N domains in one --domain-file.",
            rich_help_panel=DOMAIN_PANEL,
        ),
    ] = "",
    domain_file: Annotated[
        list[str] | None,
        typer.Option(
            help="NAME=prompts.jsonl: a domain of your own prompts; repeatable.", rich_help_panel=DOMAIN_PANEL
        ),
    ] = None,
    search: Annotated[
        str,
        typer.Option(
            help=f"How masks are searched: {', '.join(SEARCH_METHODS)}; self-sd times every mask, "
            "a minute each, for an hour at most unless --budget says otherwise.",
            rich_help_panel=SEARCH_PANEL,
            autocompletion=values(*SEARCH_METHODS),
        ),
    ] = "both",
    evaluations: Annotated[
        int,
        typer.Option(
            min=8,
            max=100_000,
            help="Most masks evaluated per domain; --budget bounds the time instead.",
            rich_help_panel=SEARCH_PANEL,
        ),
    ] = 128,
    budget: Annotated[
        str | None,
        typer.Option(help="Time for all searches together, e.g. 90s, 10m, 1h.", rich_help_panel=SEARCH_PANEL),
    ] = None,
    max_wait: Annotated[
        str,
        typer.Option(
            help="Longest wait for other processes where they keep this device too busy to be measured, e.g. 90s, 1h.",
            rich_help_panel=SEARCH_PANEL,
        ),
    ] = "5m",
    coarse: Annotated[
        bool,
        typer.Option(
            "--coarse",
            help="Search with coarse latencies where the device stays too busy; they stay out of the bundle.",
            rich_help_panel=SEARCH_PANEL,
        ),
    ] = False,
    concurrency: Annotated[
        str,
        typer.Option(
            help="Numbers of sequences at once with which chosen masks are timed, e.g. 1,4,8.",
            rich_help_panel=SEARCH_PANEL,
        ),
    ] = "1",
    seed: Annotated[
        int,
        typer.Option(min=0, max=2**32 - 1, help="Fixes splits and random choices.", rich_help_panel=SEARCH_PANEL),
    ] = 0,
    exits: Annotated[
        int,
        typer.Option(
            min=0,
            max=256,
            help="Number of layers that get an exit head, e.g. 8, for `ssd-run --strategy exit`.",
            rich_help_panel=EXIT_PANEL,
        ),
    ] = 0,
    exit_epochs: Annotated[
        int,
        typer.Option(
            min=0,
            max=1000,
            help="Epochs of training after the closed-form fit; SpecBound has 20.",
            rich_help_panel=EXIT_PANEL,
        ),
    ] = 0,
    exit_depth: Annotated[
        int,
        typer.Option(
            min=0, max=1024, help="Deepest layer that gets an exit head; 0 for any.", rich_help_panel=EXIT_PANEL
        ),
    ] = 0,
    anchors: Annotated[
        int, typer.Option(min=1, max=32, help="Anchors per domain; KNN-SSD has 10.", rich_help_panel=ANCHOR_PANEL)
    ] = 16,
    anchor_pool: Annotated[
        int,
        typer.Option(
            min=2,
            max=1000,
            help="Prompts per domain that anchors are chosen from; KNN-SSD has 1000.",
            rich_help_panel=ANCHOR_PANEL,
        ),
    ] = 32,
    anchor_rule: Annotated[
        str,
        typer.Option(
            help=f"How anchors are chosen: {', '.join(ANCHOR_RULES)}; the latter two use K-means.",
            rich_help_panel=ANCHOR_PANEL,
            autocompletion=values(*ANCHOR_RULES),
        ),
    ] = "central",
    out: Annotated[
        Path, typer.Option("--out", "-o", help="Folder that the bundle is written to.", rich_help_panel=BUNDLE_PANEL)
    ] = Path("bundle"),
    base: Annotated[
        str | None,
        typer.Option(
            "--from",
            help="A bundle that gets the new domains; its domains, mixture and latency table stay as they are.",
            rich_help_panel=BUNDLE_PANEL,
        ),
    ] = None,
    require_signature: SignatureOption = None,
    resume: Annotated[
        bool,
        typer.Option(
            "--resume",
            help="Continue an interrupted compile into the same folder with the same options.",
            rich_help_panel=BUNDLE_PANEL,
        ),
    ] = False,
    as_json: Annotated[
        bool, typer.Option("--json", help="Print the summary as one JSON object.", rich_help_panel=OUTPUT_PANEL)
    ] = False,
    ray: Annotated[
        str | None,
        typer.Option(
            help="Spread the domains over the Ray cluster at this address; `local` starts one here.",
            rich_help_panel=CLUSTER_PANEL,
        ),
    ] = None,
    workers: Annotated[
        int | None,
        typer.Option(
            min=1,
            max=4096,
            help="Workers on the cluster, with --ray; by default one per host.",
            rich_help_panel=CLUSTER_PANEL,
        ),
    ] = None,
    version: VersionOption = False,
) -> None:
    """Measure a model on this device, search what to skip for each domain, and write a bundle."""
    require_packages("ssd-compile", "compile", *LIBRARIES)
    opened = open_given(base, require_signature)
    joined = opened.bundle if opened is not None else None
    if model is None:
        if opened is None:
            raise UserError("--model: none given; give a Hub id, a folder, a .gguf file or `demo`, or use --from")
        model = opened.model_spec()
    found = _clusters(domains)
    settings = CompileSettings(
        model=model,
        domains=() if found is not None else tuple(name for name in domains.split(",") if name),
        clusters=found,
        domain_files=tuple(_named_file(text) for text in domain_file or []),
        base=str(opened.folder) if opened is not None else None,
        device=device,
        dtype=read_dtype(dtype),
        weights=weights,
        weight_memory=read_size(weight_memory),
        draft_bits=read_draft_bits(draft_bits),
        allow_special=allow_special,
        budget_seconds=_seconds("--budget", budget) if budget else None,
        evaluations=evaluations,
        search=_method(search),
        seed=seed,
        exits=exits,
        exit_epochs=exit_epochs,
        exit_depth=exit_depth,
        anchors=anchors,
        anchor_prompts=anchor_pool,
        anchor_rule=anchor_rule,
        concurrency=_loads(concurrency),
    )
    max_wait_seconds = _seconds("--max-wait", max_wait)
    _check(settings, joined, out)
    if workers is not None and ray is None:
        raise UserError("--workers: there is no cluster to hire them on; give --ray too, or omit it")

    # These imports take seconds and come last, so that bad input is answered at once.
    import torch

    from ssd_compiler.build import compile_bundle
    from ssd_compiler.patience import Patience
    from ssd_runtime.devices.memory import guard_memory

    if threads is not None:
        torch.set_num_threads(threads)
    patience = Patience(max_wait_seconds, coarse)
    compiled = partial(compile_bundle, settings, out.resolve(), resume, Reporter(), patience=patience)
    with guard_memory("compiling", device or "this device"):
        if ray is None:
            bundle = compiled()
        else:
            with ray_cluster(ray):
                from ssd_compiler.crew.ray_crew import RayCrew

                bundle = compiled(hire=partial(RayCrew, workers=workers))
    if as_json:
        summaries = [domain_summary(config, bundle.model.num_layers) for config in bundle.domains.values()]
        print(json.dumps({"bundle": str(out), "model": bundle.model.name, "domains": summaries}))
    else:
        show(bundle, out)


def main() -> None:
    """Run the command. A user's mistake ends it with one line and exit code 2."""
    run_command(app)


def _check(settings: CompileSettings, base: Bundle | None, out: Path) -> None:
    """Raise UserError for settings that cannot work, before anything slow begins."""
    names = settings.new_domains
    if settings.clusters is not None and len(settings.domain_files) != 1:
        raise UserError(
            "--domains auto: finds domains in one file of prompts; give one --domain-file NAME=prompts.jsonl"
        )
    if not names:
        raise UserError("--domains: none given; name some, e.g. --domains cnn,gsm8k, or give --domain-file")
    for name in names:
        if names.count(name) > 1 or name == MIXTURE or not re.fullmatch(r"[a-z0-9][a-z0-9_-]{0,63}", name):
            raise UserError(
                f"domain {name!r}: names must differ, be lower-case letters, digits, - or _, and not {MIXTURE!r}"
            )
        if base is not None and name in base.domains:
            raise UserError(
                f"domain {name!r}: {settings.base} has this domain already; give others, or compile without --from"
            )
    if base is not None and settings.exits and base.exits is not None:
        raise UserError(f"--exits: {settings.base} has exit heads already, which are kept; omit --exits")
    if settings.exit_epochs and settings.weights == "packed":
        raise UserError("--exit-epochs: packed weights have no gradients; use --weights dense, or omit --exit-epochs")
    if settings.exit_epochs and not settings.exits:
        raise UserError("--exit-epochs: no exit heads to train; give --exits N")
    if settings.exit_depth and not settings.exits:
        raise UserError("--exit-depth: no exit heads to place; give --exits N")
    if settings.anchor_prompts < settings.anchors:
        raise UserError(
            f"--anchor-pool {settings.anchor_prompts}: give at least as many as --anchors {settings.anchors}"
        )
    if settings.anchor_rule not in ANCHOR_RULES:
        raise UserError(f"--anchor-rule {settings.anchor_rule}: expected one of {', '.join(ANCHOR_RULES)}")
    for name in settings.domains:
        load_domain(name)
    for _, path in settings.domain_files:
        if (count := len(read_prompts(Path(path)))) < MIN_PROMPTS:
            raise UserError(
                f"--domain-file: {path} has {count} prompts; at least {MIN_PROMPTS} are needed, so add some"
            )
    if out.is_mount() or Path.cwd().is_relative_to(out.resolve()):
        raise UserError(
            f"--out: {out} is a mount point or contains the current folder, and cannot be replaced; name another"
        )
    try:
        require_replaceable(out)
    except UserError as error:
        raise UserError(f"--out: {error}") from None


def _clusters(domains: str) -> int | None:
    """Parse `--domains`: N for `auto:N`, 0 for `auto`, None when domains are named."""
    if domains.partition(":")[0] != "auto":
        return None
    count = domains.removeprefix("auto").removeprefix(":")
    if domains != "auto" and not (count.isdecimal() and 1 <= int(count) <= MOST_FOUND):
        raise UserError(f"--domains {domains}: expected auto or auto:N with N from 1 to {MOST_FOUND}")
    return int(count or 0)


def _method(text: str) -> SearchMethod:
    for method in SEARCH_METHODS:
        if method == text:
            return method
    raise UserError(f"--search {text}: expected one of {', '.join(SEARCH_METHODS)}")


def _named_file(text: str) -> tuple[str, str]:
    name, separator, path = text.partition("=")
    if not separator or not name or not path:
        raise UserError(f"--domain-file: expected NAME=prompts.jsonl, got {text!r}")
    return name, path


def _loads(text: str) -> tuple[int, ...]:
    """The numbers of `--concurrency`, ascending."""
    parts = text.split(",")
    if not all(re.fullmatch(r"[0-9]{1,3}", part) and 1 <= int(part) <= MAX_CONCURRENCY for part in parts):
        raise UserError(f"--concurrency: expected numbers from 1 to {MAX_CONCURRENCY} such as 1,4,8, got {text!r}")
    return tuple(sorted({int(part) for part in parts}))


def _seconds(option: str, text: str) -> float:
    match = re.fullmatch(r"(\d+(?:\.\d+)?)([smh]?)", text)
    if not match or float(match[1]) <= 0:
        raise UserError(f"{option}: expected a time such as 90s, 10m or 1h, got {text!r}")
    return float(match[1]) * {"": 1, "s": 1, "m": 60, "h": 3600}[match[2]]
