"""A compile from top to bottom: the stages that turn a model and some domains into a bundle."""

from __future__ import annotations

from pathlib import Path

from ssd_artifacts.bundle import Bundle, require_replaceable
from ssd_artifacts.domain_config import MIXTURE
from ssd_artifacts.files import write_lock
from ssd_artifacts.manifest import MANIFEST
from ssd_compiler.added import with_added
from ssd_compiler.crew.crew import Alone, MakeCrew
from ssd_compiler.decoder import add_copies, faithful_decoder
from ssd_compiler.patience import Patience
from ssd_compiler.progress import Reporter
from ssd_compiler.report.html import html_report
from ssd_compiler.settings import CompileSettings
from ssd_compiler.stages import Stages
from ssd_compiler.workspace import Workspace
from ssd_runtime.loading.models import load_model, weights_of


def compile_bundle(
    settings: CompileSettings,
    out: Path,
    resume: bool,
    reporter: Reporter,
    make_crew: MakeCrew = Alone,
    patience: Patience = Patience(),
    base: Bundle | None = None,
) -> Bundle:
    """Compile a bundle into `out`. With `resume`, finished stages of an earlier, killed compile are reused.

    `base` is the bundle that `settings.base` names. The crew of `make_crew` runs the steps of each domain: by default
    this process does, one after the other. `patience` is for a machine that is too busy to be measured.
    """
    with Workspace(out, settings, resume) as work:
        if work.kept and not resume:
            reporter.note(
                f"{work.folder}: drops {work.kept} finished stages of an earlier compile when the model is loaded; "
                "--resume goes on from them"
            )
        with reporter.stage(f"load {settings.model}", None):
            weights = settings.weights or weights_of(base, settings.model, settings.device, settings.dtype)
            loaded = load_model(settings.model, settings.device, settings.dtype, weights, settings.allow_special)
            fingerprint = loaded.fingerprint(full=True)
            decoder = faithful_decoder(loaded, settings.weight_memory)
        for line in (*loaded.notes, decoder.memory):
            reporter.note(line)
        if (out / MANIFEST).is_file():
            reporter.note(f"{out} holds a bundle, which this one replaces when it is complete")
        add_copies(decoder, settings, reporter)
        if not work.begin(fingerprint) and resume:
            reporter.note(f"--resume: no stage of a compile into {out} is kept, so this one begins anew")
        stages = Stages(
            settings=settings,
            loaded=loaded,
            decoder=decoder,
            fingerprint=fingerprint,
            work=work,
            reporter=reporter,
            base=base,
            patience=patience,
        )

        pools = stages.pools(stages.find_domains())
        with make_crew(stages) as crew:
            with crew.alone():
                latency = stages.latency()
            prompts = crew.each(Stages.split, {pool.name: (pool,) for pool in pools})
            samples = crew.each(Stages.calibrate, {name: (prompts[name],) for name in prompts})
            exits = stages.exits(samples)
            searched = stages.to_search(samples)
            found = crew.each(Stages.search, {name: (name, searched[name], latency) for name in searched})
            tuned = crew.each(Stages.tune_exits, {name: (name, samples[name], latency, exits) for name in prompts})
            domains = crew.each(
                Stages.validate, {name: (name, found[name], prompts[name], latency) for name in prompts}, latency.device
            )
            features = crew.each(Stages.anchor_features, {name: (prompts[name],) for name in prompts})
        if MIXTURE in found:
            domains[MIXTURE] = stages.mixture(found[MIXTURE], latency)
        anchors = stages.anchors(features, samples)
        successors = stages.successors(samples)
        bundle = stages.bundle(latency, domains, tuned, anchors, exits, successors)
        bundle = with_added(bundle, stages, prompts, latency)

        page = html_report(bundle)
        with write_lock(out):
            require_replaceable(out)  # hours have passed; results stay for --resume
            bundle.save(out, page)
    return bundle
