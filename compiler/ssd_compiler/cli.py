"""The command `ssd-compile`."""

from __future__ import annotations

import json
import re
import sys
from functools import partial
from pathlib import Path

from ssd_artifacts.bundle import Bundle, require_free_out
from ssd_artifacts.domain_config import MIXTURE
from ssd_artifacts.manifest import DOMAIN_NAME, MAX_DOMAINS
from ssd_artifacts.sharing.opening import open_given
from ssd_compiler.options import MOST_FOUND, ClusterOptions, DomainOptions, SearchOptions, WriteOptions
from ssd_compiler.progress import Reporter
from ssd_compiler.report.terminal import show
from ssd_compiler.settings import MIN_PROMPTS, CompileSettings
from ssd_profiles.domain import load_domain
from ssd_profiles.errors import UserError, require_packages
from ssd_profiles.prompts import read_prompts
from ssd_runtime.commands.command import closing, command_app, run_command, uncollected
from ssd_runtime.commands.groups import with_groups
from ssd_runtime.commands.options import ModelOptions, VersionOption
from ssd_runtime.loading.paths import require_there
from ssd_runtime.serving.ray_app.ray_cluster import ray_cluster

LIBRARIES = ("sklearn", "bayes_opt")
"""Modules of the extra `compile`."""
CLOSING = closing(
    "Packaged domains: ssd-compile -m ./my-model --domains cnn,gsm8k --evaluations 24 -o bundle",
    "Your prompts:     ssd-compile -m ./my-model --domain-file mail=mail.jsonl --budget 10m -o bundle",
    "Found domains:    ssd-compile -m ./my-model --domains auto --domain-file all=all.jsonl -o bundle",
    "One domain more:  ssd-compile --from bundle --domains wmt16 -o bundle",
    "Exit heads:       ssd-compile -m ./my-model --domains gsm8k --exits 8 -o bundle",
)
app = command_app()


@app.command(epilog=CLOSING)
@with_groups
def compile_(
    model: ModelOptions,
    domains: DomainOptions,
    search: SearchOptions,
    bundle: WriteOptions,
    cluster: ClusterOptions,
    version: VersionOption = False,
) -> None:
    """Measure a model on this device, search what to skip for each domain, and write a bundle."""
    require_packages("ssd-compile", "compile", *LIBRARIES)
    opened = open_given(bundle.base, bundle.require_signature)
    name = model.model
    if name is None:
        if opened is None:
            raise UserError("--model: none given; give a Hub id, a folder, a .gguf file or `demo`, or use --from")
        name = opened.model_spec()
    load = model.load_settings()
    settings = CompileSettings(
        model=name,
        domains=domains.named,
        clusters=domains.found,
        domain_files=domains.files,
        base=str(opened.folder) if opened is not None else None,
        device=load.device,
        dtype=load.dtype,
        weights=load.weights,
        weight_memory=load.weight_memory,
        draft_bits=load.draft_bits,
        allow_special=load.allow_special,
        budget_seconds=search.budget_seconds,
        evaluations=search.evaluations,
        search=search.method,
        seed=search.seed,
        exits=search.exits,
        anchors=domains.anchors,
        concurrency=search.loads,
    )
    max_wait_seconds = search.max_wait_seconds
    base = opened.bundle if opened is not None else None
    _check(settings, base, bundle.out)
    if cluster.workers is not None and cluster.ray is None:
        raise UserError("--workers: there is no cluster to hire them on; give --ray too, or omit it")

    # These imports take seconds and come last, so that bad input is answered at once.
    with uncollected():
        from ssd_compiler.build import compile_bundle
        from ssd_compiler.patience import Patience
        from ssd_compiler.workspace import stages_folder
        from ssd_runtime.devices.memory import guard_memory
        from ssd_runtime.devices.threads import use_threads

    use_threads(load.threads)
    patience = Patience(max_wait_seconds, search.coarse)
    compiled = partial(
        compile_bundle, settings, bundle.out.resolve(), bundle.resume, Reporter(), patience=patience, base=base
    )
    try:
        with guard_memory("compiling", load.device or "this device"):
            if cluster.ray is None:
                written = compiled()
            else:
                with ray_cluster(cluster.ray):
                    from ssd_compiler.crew.ray_crew import RayCrew

                    written = compiled(make_crew=partial(RayCrew, workers=cluster.workers))
    except KeyboardInterrupt:
        if stages_folder(bundle.out.resolve()).is_dir():
            print("note: what was finished is kept; the same command with --resume goes on from it", file=sys.stderr)
        raise
    if bundle.as_json:
        assert written.report is not None, "a compile writes one"
        figures = json.loads(written.report)["domains"]
        print(json.dumps({"bundle": str(bundle.out), "model": written.model.name, "domains": figures}))
    else:
        show(written, bundle.out)


def main() -> None:
    """Run the command. A user's mistake ends it with one line and exit code 2."""
    run_command(app)


def _check(settings: CompileSettings, base: Bundle | None, out: Path) -> None:
    """Raise UserError for settings that cannot work, before anything slow begins."""
    require_there(settings.model)
    names = settings.new_domains
    if settings.clusters is not None and len(settings.domain_files) != 1:
        raise UserError(
            "--domains auto: finds domains in one file of prompts; give one --domain-file NAME=prompts.jsonl"
        )
    if not names:
        raise UserError("--domains: none given; name some, e.g. --domains cnn,gsm8k, or give --domain-file")
    for name in names:
        # Found domains have a number after the name.
        full = name if settings.clusters is None else f"{name}-{MOST_FOUND}"
        if names.count(name) > 1 or name == MIXTURE or not re.fullmatch(DOMAIN_NAME, full):
            raise UserError(
                f"domain {name!r}: names must differ, be lower-case letters, digits, - or _, and not {MIXTURE!r}"
            )
        if base is not None and settings.clusters is None and name in base.domains:
            raise UserError(
                f"domain {name!r}: {settings.base} has this domain already; give others, or compile without --from"
            )
    count = (settings.clusters or len(names)) + (len(base.domains) if base is not None else len(names) > 1)
    if count > MAX_DOMAINS:
        raise UserError(f"--domains: {count} domains in all; a bundle has {MAX_DOMAINS} at most, so give fewer")
    if base is not None and settings.exits and base.exits is not None:
        raise UserError(f"--exits: {settings.base} has exit heads already, which are kept; omit --exits")
    for name in settings.domains:
        load_domain(name)
    for _, path in settings.domain_files:
        if (count := len(read_prompts(Path(path)))) < MIN_PROMPTS:
            raise UserError(
                f"--domain-file: {path} has {count} prompts; at least {MIN_PROMPTS} are needed, so add some"
            )
    require_free_out(out)
