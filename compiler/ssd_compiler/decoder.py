"""The view of a model that a compile works on, the same in every process that takes part."""

from __future__ import annotations

from ssd_compiler.progress import Reporter
from ssd_compiler.settings import CompileSettings
from ssd_runtime.loading.checks.parity import require_faithful
from ssd_runtime.loading.draft_copies import make_copies
from ssd_runtime.loading.loaded_model import LoadedModel
from ssd_runtime.model.decoder import Decoder
from ssd_runtime.profiling.kernel_choice import fitted_decoder, outgrows_cache


def faithful_decoder(loaded: LoadedModel, weight_memory: int | None = None) -> Decoder:
    """View a loaded model, with at most so many bytes of packed weights, and hold it against the model itself."""
    decoder = fitted_decoder(loaded.model, weight_memory)
    require_faithful(decoder)
    return decoder


def add_copies(decoder: Decoder, settings: CompileSettings, reporter: Reporter) -> None:
    """Make the light copies of weights that masks may draft on, unless the model fits a processor's cache."""
    if outgrows_cache(decoder):
        make_copies(decoder, settings.draft_bits, reporter.note)
