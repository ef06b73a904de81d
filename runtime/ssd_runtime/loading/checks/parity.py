"""Checks the view of a model against the model itself, before anything is decoded."""

from __future__ import annotations

import torch
from torch import Tensor

from ssd_profiles.errors import UserError, first_line
from ssd_runtime.devices.memory import OUT_OF_MEMORY
from ssd_runtime.model.decoder import Decoder
from ssd_runtime.sequence.session import Session

FORWARDS = (11, 1, 4)
"""Numbers of rows of the compared forwards: a prefill, a plain step and a verification."""
TOLERANCE = {torch.float32: 1e-3, torch.float16: 0.03, torch.bfloat16: 0.15, torch.int8: 0.15}
"""Largest root mean square of the differences ÷ that of the logits. Rounding alone reaches 2e-6, 0.004 and 0.02 on the
test models of four layers, and grows with depth."""
QUANTISED = 0.03
"""Least tolerance with quantised modules: a difference in the last bit may move an activation by a whole step."""
NEIGHBOURS = 4
"""Number of rows in the same forward, on which a row's logits must not depend."""


def require_faithful(decoder: Decoder) -> None:
    """Raise UserError unless the decoder computes its model's logits, each row independently of the others."""
    if decoder.projections.foreign or decoder.rounding != decoder.dtype:
        require_independent_rows(decoder)
    require_parity(decoder)


@torch.inference_mode()
def require_parity(decoder: Decoder) -> None:
    """Raise UserError unless `decoder` computes the logits of `model(ids)`, up to rounding.

    A subclass with a forward of its own, a patched class or a newer transformers may differ from the family's layers.
    16 tokens run through both, in forwards of several sizes through the decoder.
    """
    ids = decoder.probe_ids(sum(FORWARDS))
    with decoder.lock:
        inputs = torch.tensor([ids], device=decoder.device)
        try:
            expected = decoder.model(input_ids=inputs, use_cache=False).logits[0].float().to(decoder.device)
        except (RuntimeError, ValueError, TypeError, LookupError, AttributeError) as error:
            if OUT_OF_MEMORY.search(str(error)):
                raise
            raise UserError(f"model: does not run ({first_line(error)}); check its config.json") from None
    session = Session(decoder)
    got = list[Tensor]()
    for rows in FORWARDS:
        chunk = ids[session.committed : session.committed + rows]
        got.append(decoder.logits(session.forward(chunk)).float())
        session.commit(chunk)
    difference = _relative_rms(torch.cat(got), expected)
    allowed = max(TOLERANCE.get(decoder.rounding, 0.0), QUANTISED if decoder.projections.foreign else 0.0)
    if not difference <= allowed:  # NaN is rejected too
        raise UserError(
            f"model: {type(decoder.model).__name__} computes other logits than a {decoder.family.title} model "
            f"(relative difference {difference:.2g}, rounding explains {allowed:g}); load it without patches and "
            "subclasses that change its forward, or decode it with transformers"
        )


@torch.inference_mode()
def require_independent_rows(decoder: Decoder) -> None:
    """Raise UserError if a row's logits depend on the rows after it.

    This happens in modules that scale or split activations by all rows of a forward, such as one dynamic scale per
    tensor or LLM.int8's outlier columns. Rejected drafts would then change the logits of accepted tokens.
    """
    row = decoder.embed([1])
    calm = decoder.embed([2])
    # After a norm, such a row is nearly all in a few columns: these are outliers, whatever the threshold.
    spike = torch.arange(calm.shape[-1], device=calm.device) % 64 == 0
    logits = []
    for neighbour in (calm, torch.where(spike, 50.0 * calm.abs().max(), calm)):
        session = Session(decoder)
        # Both forwards have the same number of rows and round alike, so any difference comes from the neighbours.
        rows = torch.cat([row] + [neighbour] * NEIGHBOURS)
        logits.append(decoder.logits(session.forward(rows))[0])
    if not torch.equal(*logits):
        kinds = ", ".join(sorted({type(module).__name__ for module in decoder.projections.foreign}))
        raise UserError(
            f"model: its {kinds} modules compute a row differently where other rows stand beside it, so that rejected "
            "drafts would change the output; load the model unquantised, or with quantised weights alone"
        )


def _relative_rms(got: Tensor, expected: Tensor) -> float:
    """Root mean square of the differences ÷ that of the centred `expected`, over its finite entries."""
    finite = expected.isfinite()
    if not finite.all():
        got, expected = got[finite], expected[finite]
    if not expected.numel():
        return 0.0
    centred = expected - expected.mean()
    return float((got - expected).norm() / centred.norm().clamp(min=1e-9))
