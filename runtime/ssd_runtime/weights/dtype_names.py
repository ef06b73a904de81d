"""Names of dtypes, as a user gives them; importing it does not load torch."""

from __future__ import annotations

from ssd_profiles.errors import UserError

DTYPE_NAMES = {"float32": "fp32", "bfloat16": "bf16", "float16": "fp16"}
"""Short name of each dtype, by the name that torch and transformers use."""


def read_dtype(text: str | None) -> str | None:
    """Parse `--dtype` into fp32, bf16 or fp16; None stays None.

    The long names float32, bfloat16 and float16 are accepted as well. Raises UserError for any other name.
    """
    short = DTYPE_NAMES.get(text or "", text)
    if short is not None and short not in DTYPE_NAMES.values():
        known = ", ".join(f"{name} ({long})" for long, name in DTYPE_NAMES.items())
        raise UserError(f"--dtype: {text!r} is unknown; give one of {known}, or omit it")
    return short
