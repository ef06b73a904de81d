"""Requires that a verification computes every row's logits as a plain step does, bit for bit."""

from __future__ import annotations

import torch
from torch import Tensor

from ssd_profiles.errors import UserError
from ssd_runtime.model.batch.builder import MOST_BY_ROW
from ssd_runtime.model.decoder import Decoder
from ssd_runtime.sequence.session import Session

PROBED = (2, 3, 5, 8, 16, MOST_BY_ROW)
"""Numbers of rows that are compared with plain steps when a model is loaded."""
BEFORE = 7
"""Tokens before the compared ones."""


def require_bitwise(decoder: Decoder) -> None:
    """Raise UserError unless the decoder's rows are the same to the bit in a plain step and in a verification."""
    for problem, remedy in _problems(decoder):
        raise UserError(f"--bitwise: {problem}; {remedy}")
    plain = probe(decoder, 1)
    for rows in PROBED:
        if not torch.equal(probe(decoder, rows), plain):
            raise UserError(
                f"--bitwise: on this processor the kernels ({decoder.kernels}) compute a row differently among {rows} "
                "rows; use --dtype fp32 with --weights dense, or omit it"
            )


@torch.inference_mode()
def probe(decoder: Decoder, rows: int) -> Tensor:
    """Logits of `MOST_BY_ROW` tokens [tokens, vocabulary] that run `rows` at a time after a short prompt."""
    ids = decoder.probe_ids(BEFORE + MOST_BY_ROW)
    session = Session(decoder)
    parts = list[Tensor]()
    session.prefill(ids[:BEFORE])
    while session.committed < len(ids):
        chunk = ids[session.committed : session.committed + rows]
        parts.append(decoder.logits(session.forward(chunk)))
        session.commit(chunk)
    return torch.cat(parts)


def _problems(decoder: Decoder) -> list[tuple[str, str]]:
    """Reasons against bitwise equality that no probe would find, each with a remedy."""
    other = "decode this model without it"
    found = list[tuple[str, str]]()
    if decoder.device.type != "cpu" or decoder.is_spread:
        found.append(("it needs a model that is on the processor as a whole", "give --device cpu"))
    if any(kind.window is not None for kind in decoder.batches.kinds):
        found.append(("sliding windows begin at another key in every step", other))
    if decoder.has_attention_cap:
        found.append(("attention with a soft-cap or sinks has no kernel whose rows are independent", other))
    if not decoder.projections.are_packed:
        found.append(("the model's own modules compute a row differently beside others", "raise --weight-memory"))
    return found
