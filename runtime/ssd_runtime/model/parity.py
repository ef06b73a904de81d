"""Checks the view of a model against the model itself, before anything is decoded with it."""

from __future__ import annotations

import torch
from torch import Tensor

from ssd_profiles.errors import UserError
from ssd_runtime.engine.session import Session
from ssd_runtime.model.decoder import Decoder

FORWARDS = (11, 1, 4)
"""Rows of the forwards that are compared: a prefill, a plain step and a verification."""
TOLERANCE = {torch.float32: 1e-3, torch.float16: 0.03, torch.bfloat16: 0.15}
"""Largest root mean square of the differences, as a share of the logits' own. Rounding alone reaches 2e-6, 0.004 and
0.02 on the test models of four layers, and grows with depth."""


QUANTISED = 0.03
"""The same where modules quantise: a difference in the last bit may move an activation by a whole step."""
NEIGHBOURS = 4
"""Rows that stand beside the one whose logits must not depend on them."""


def require_faithful(decoder: Decoder) -> None:
    """Raise UserError unless the decoder can stand for its model: same logits, each row's its own."""
    if decoder.foreign:
        require_independent_rows(decoder)
    require_parity(decoder)


@torch.inference_mode()
def require_parity(decoder: Decoder) -> None:
    """Raise UserError unless `decoder` computes the logits of `model(ids)`, up to rounding.

    A subclass with a forward of its own, a patched class or a newer transformers may compute something else than the
    family's layers do. Runs 16 tokens through both, the decoder's in forwards of several sizes.
    """
    ids = [(17 + 31 * i) % decoder.shape.vocabulary for i in range(sum(FORWARDS))]
    with decoder.lock:
        inputs = torch.tensor([ids], device=decoder.device)
        expected = decoder.model(input_ids=inputs, use_cache=False).logits[0].float().to(decoder.device)
    session, got = Session(decoder), list[Tensor]()
    for rows in FORWARDS:
        chunk = ids[session.committed : session.committed + rows]
        got.append(decoder.logits(session.forward(chunk)).float())
        session.commit(chunk)
    difference = _relative_rms(torch.cat(got), expected)
    allowed = max(TOLERANCE.get(decoder.dtype, 0.0), QUANTISED if decoder.foreign else 0.0)
    if not difference <= allowed:  # a difference that is no number is refused, too
        raise UserError(
            f"model: {type(decoder.model).__name__} computes other logits than a {decoder.family.title} model "
            f"(relative difference {difference:.2g}, rounding explains {allowed:g}); load it without patches and "
            "subclasses that change its forward, or decode it with transformers"
        )


@torch.inference_mode()
def require_independent_rows(decoder: Decoder) -> None:
    """Raise UserError where a row's logits depend on the rows behind it.

    Modules that scale or split activations by what all rows of a forward hold make it so: one dynamic scale for a
    tensor, LLM.int8's outlier columns. Rejected drafts would then change the logits of accepted tokens.
    """
    row = decoder.embed([1])
    calm = decoder.embed([2])
    # After a norm, nearly all of such a row is in a few columns: outliers, whatever the threshold.
    spike = torch.arange(calm.shape[-1], device=calm.device) % 64 == 0
    logits = []
    for neighbour in (calm, torch.where(spike, 50.0 * calm.abs().max(), calm)):
        session = Session(decoder)
        # As many rows both times: kernels round alike, so that any difference is the neighbours' doing.
        logits.append(decoder.logits(session.forward(torch.cat([row, *[neighbour] * NEIGHBOURS])))[0])
    if not torch.equal(*logits):
        kinds = ", ".join(sorted({type(module).__name__ for module in decoder.foreign}))
        raise UserError(
            f"model: its {kinds} modules compute a row differently where other rows stand beside it, so that rejected "
            "drafts would change the output; load the model unquantised, or with quantised weights alone"
        )


def _relative_rms(got: Tensor, expected: Tensor) -> float:
    """Root mean square of the differences ÷ that of the centred `expected`, where this is finite."""
    finite = expected.isfinite()
    if not finite.any():
        return 0.0
    centred = expected[finite] - expected[finite].mean()
    return float((got[finite] - expected[finite]).norm() / centred.norm().clamp(min=1e-9))
