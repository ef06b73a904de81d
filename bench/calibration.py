"""A domain's calibration text, as the compiler makes it of any of its prompts, for tools that measure on it."""

from __future__ import annotations

from ssd_compiler.calibrate import Sample, continue_prompts, samples_of
from ssd_compiler.prompts import DomainPrompts, Warn, load_prompts
from ssd_compiler.settings import CompileSettings
from ssd_runtime.loading.models import LoadedModel
from ssd_runtime.model.decoder import Decoder


def calibration(
    name: str, settings: CompileSettings, loaded: LoadedModel, decoder: Decoder, warn: Warn = lambda _: None
) -> tuple[DomainPrompts, list[Sample]]:
    """The domain's prompts, and the full model's continuations of those that serve the search."""
    prompts = load_prompts(name, settings, loaded, warn)
    found = continue_prompts(decoder, prompts.search, prompts.max_new_tokens, loaded.eos_ids, lambda: None)
    return prompts, samples_of(found, name)
