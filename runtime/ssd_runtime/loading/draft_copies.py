"""Makes the light copies of a model's weights that drafts run on, and says before what memory they take."""

from __future__ import annotations

from collections.abc import Callable

from ssd_runtime.devices.memory import gib, guard_memory, return_freed
from ssd_runtime.model.decoder import Decoder
from ssd_runtime.weights.draft_bits import DraftBits


def make_copies(decoder: Decoder, bits: DraftBits, say: Callable[[str], object] | None = None) -> None:
    """Make the copies that `bits` asks for (`Decoder.lighten`), as far as the memory budget holds them.

    `say` receives one sentence before, if any copy can be made. Drafts that read a part of packed weights take none.
    """
    if decoder.light.are_nested:
        decoder.lighten(bits)
        return
    most = min(decoder.light.most_bytes(bits), decoder.packed.limit - decoder.packed.used)
    if most <= 0:
        return
    if say is not None:
        say(
            f"drafts may run on copies of the weights with fewer bits, which take up to {gib(most)}; --draft-bits none "
            "decodes without"
        )
    with guard_memory("copying weights for drafts", decoder.device, "give --draft-bits none"):
        decoder.lighten(bits)
    return_freed()
