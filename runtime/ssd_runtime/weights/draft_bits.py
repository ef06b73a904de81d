"""The bits of light copies of weights, as a user gives them; importing it does not load torch."""

from __future__ import annotations

from typing import Literal, get_args

from ssd_profiles.errors import UserError

DraftBits = Literal["auto", "8", "4", "none"]
"""`auto` takes 4 bits for weights that lie on a grid of 4 bits, 8 for all others; `none` makes no copies."""


def read_draft_bits(text: str) -> DraftBits:
    """Parse `--draft-bits`. Raises UserError when it is none of its values."""
    for known in get_args(DraftBits):
        if text == known:
            return known
    raise UserError(f"--draft-bits: expected one of {', '.join(get_args(DraftBits))}, got {text!r}")
