"""A compile from top to bottom: the stages that turn a model and some domains into a bundle."""

from __future__ import annotations

from pathlib import Path

from ssd_artifacts.bundle import Bundle
from ssd_artifacts.files import write_lock
from ssd_compiler.progress import Reporter
from ssd_compiler.report.html import html_report
from ssd_compiler.settings import CompileSettings
from ssd_compiler.stages import Stages
from ssd_compiler.workspace import Workspace
from ssd_profiles.mask import WIDTHS, SkipMask
from ssd_runtime.loading.models import load_model, weights_of
from ssd_runtime.model.parity import require_faithful
from ssd_runtime.weights.draft_copies import make_copies
from ssd_runtime.weights.kernel_choice import SMALL_BYTES, fitted_decoder


def compile_bundle(settings: CompileSettings, out: Path, resume: bool, reporter: Reporter) -> Bundle:
    """Compile a bundle into `out`. With `resume`, finished stages of an earlier, killed compile are reused."""
    base = Bundle.load(Path(settings.base)) if settings.base is not None else None
    with Workspace(out, settings, resume) as work:
        with reporter.stage(f"load {settings.model}", None):
            weights = settings.weights or weights_of(base, settings.model)
            loaded = load_model(settings.model, settings.device, settings.dtype, weights)
            fingerprint = loaded.fingerprint(full=True)
            decoder = fitted_decoder(loaded.model, settings.weight_memory)
            require_faithful(decoder)
        for line in (*loaded.notes, decoder.memory):
            reporter.note(line)
        if decoder.packed.used > SMALL_BYTES:
            # The search chooses between all widths, so `auto` makes each.
            every = SkipMask.of(decoder.shape.num_layers).lightened(min(WIDTHS))
            make_copies(decoder, settings.draft_bits, [every], reporter.note)
        work.begin(fingerprint)
        stages = Stages(
            settings=settings,
            loaded=loaded,
            decoder=decoder,
            fingerprint=fingerprint,
            work=work,
            reporter=reporter,
            base=base,
        )

        prompts = stages.prompts(stages.find_domains())
        latency = stages.latency()
        samples = {name: stages.calibrate(prompts[name]) for name in prompts}
        exits = stages.exits(samples)
        domains = {
            name: stages.domain(name, samples[name], prompts[name], latency, exits)
            for name in reporter.domains(list(prompts))
        }
        mixture = stages.mixture(samples, latency)
        anchors = stages.anchors(prompts, samples)
        successors = stages.successors(samples)
        bundle = stages.bundle(latency, domains | mixture, anchors, exits, successors)

        page = html_report(bundle)
        with write_lock(out):
            bundle.save(out, page)
        work.remove()
    return bundle
