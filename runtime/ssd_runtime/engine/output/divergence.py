"""Tells a rounding tie from a wrong output if two decodings of one prompt differ."""

from __future__ import annotations

from dataclasses import dataclass
from enum import StrEnum

import torch

from ssd_runtime.sequence.session import Session

NEAR_TIE = {torch.float32: 1e-3, torch.float16: 0.05, torch.bfloat16: 0.25, torch.int8: 0.25}
"""Gap between plain decoding's top two logits within which the number of rows of a forward may change the choice."""


class Kind(StrEnum):
    """Kinds of differences between two outputs."""

    NONE = "none"
    NEAR_TIE = "near_tie"
    ERROR = "error"


@dataclass(frozen=True, slots=True)
class Divergence:
    """The first difference between plain decoding and another output of the same prompt."""

    kind: Kind
    position: int | None = None
    """Index among the new tokens."""
    gap: float | None = None
    """Larger lead, in logits, of the full model's choice over the two tokens, the noise of sampling included."""


@torch.inference_mode()
def compare(
    session: Session, prompt_ids: list[int], plain: list[int], other: list[int], within: float | None = None
) -> Divergence:
    """Classify the first difference by the full model's logits at that position.

    It is a near tie if logits that differ by at most `within` choose the token of either output. The default of
    `within` is `NEAR_TIE` of the dtype to which rows are rounded.
    """
    if plain == other:
        return Divergence(Kind.NONE)
    position = next((i for i, (a, b) in enumerate(zip(plain, other, strict=False)) if a != b), None)
    if position is None:
        return Divergence(Kind.ERROR, min(len(plain), len(other)))
    logits = session.decoder.head(session.prefill(prompt_ids + plain[:position]).last[None])[0]
    if within is None:
        within = NEAR_TIE.get(session.decoder.rounding, NEAR_TIE[torch.float32])
    gaps = [
        session.gap(logits, prompt=len(prompt_ids), token=output[position], within=within) for output in (plain, other)
    ]
    near = all(each for _, each in gaps)
    return Divergence(Kind.NEAR_TIE if near else Kind.ERROR, position, max(gap for gap, _ in gaps))
