"""Decoders with light copies of their weights."""

from __future__ import annotations

from ssd_runtime.drafting.masked import Masked
from ssd_runtime.engine.output.generation import Generation
from ssd_runtime.model.decoder import Decoder
from ssd_runtime.planning.plan import Plan
from ssd_runtime.weights.draft_bits import DraftBits
from tests.decoding import as_plain
from tests.models import tiny_model

LAYERS = 4
IDS = list(range(3, 13))


def lightened(variant: str = "qwen3", bits: DraftBits = "8", seed: int = 3, **settings: int) -> Decoder:
    """A decoder with light copies."""
    decoder = Decoder(tiny_model(variant, seed=seed, **settings))
    decoder.lighten(bits)
    assert decoder.light.kernels
    return decoder


def drafted(decoder: Decoder, drafter: Masked) -> Generation:
    """An answer to `IDS`, drafted by a drafter; it must be plain decoding's."""
    return as_plain(decoder, IDS, Plan("test", drafter, 5), 60)
