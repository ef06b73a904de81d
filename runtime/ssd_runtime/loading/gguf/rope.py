"""The rotary embedding of a `.gguf` file as transformers' `rope_parameters`."""

from __future__ import annotations

import math
from typing import Any

import numpy as np

from ssd_profiles.errors import UserError
from ssd_runtime.loading.gguf.metadata import Metadata
from ssd_runtime.weights.gguf.header import ADVICE
from ssd_runtime.weights.gguf.index import GgufIndex, MappedTensors

FACTORS = "rope_freqs.weight"
"""Divisors of the angles, one per pair of columns: llama.cpp's form of Llama 3's scaling."""
SHORT, LONG = "rope_factors_short.weight", "rope_factors_long.weight"
"""Divisors of the angles for sequences within the original context and for longer ones (longrope)."""
TENSORS = (FACTORS, SHORT, LONG)
"""Tensors of a file that belong to its rotary embedding."""
BASE = 10_000.0
"""Base of the angles if the file does not say."""


def rope_parameters(index: GgufIndex, metadata: Metadata, pairs: int, context: int) -> dict[str, Any]:
    """The parameters of a rotary embedding of `pairs` angles, for a model of `context` tokens.

    Raises UserError for scalings that are not known, and for factors of another number.
    """
    base = metadata.optional(float, "rope.freq_base")
    theta = {"rope_theta": BASE if base is None else base}
    given, older = (metadata.optional(float, f"rope.{key}") for key in ("scaling.factor", "scale_linear"))
    factor = (older if given is None else given) or 1.0
    original = metadata.optional(int, "rope.scaling.original_context_length") or context
    metadata.ignore(("rope.scaling.finetuned",))
    kind = metadata.optional(str, "rope.scaling.type") or ("longrope" if LONG in index.tensors else "linear")
    present = [name for name in TENSORS if name in index.tensors]
    expected = {"longrope": [SHORT, LONG], "yarn": []}.get(kind, [FACTORS] if FACTORS in present else [])
    if present != expected:
        raise UserError(
            f"{index.path}: rope scaling {kind}: expected the tensors {expected or 'none'}, got {present or 'none'}; "
            f"{ADVICE}"
        )
    if kind == "yarn":
        return {**theta, **_yarn(metadata, factor), "original_max_position_embeddings": original}
    attention = metadata.optional(float, "rope.scaling.attn_factor")
    if kind == "longrope":
        if attention is None:
            attention = math.sqrt(1 + math.log(context / original) / math.log(original)) if context > original else 1.0
        short, long = (_factors(index, name, pairs) for name in (SHORT, LONG))
        return {**theta, **_longrope(short, long, original), "attention_factor": attention}
    if kind not in ("linear", "none") or attention not in (None, 1.0):
        raise metadata.refusal("rope.scaling.type", f"is {kind!r} with an attention factor of {attention}, which")
    factor = 1.0 if kind == "none" else factor
    if FACTORS in present:
        divisors = [each * factor for each in _factors(index, FACTORS, pairs)]
        # One set of factors serves every length.
        return {**theta, **_longrope(divisors, divisors, context), "attention_factor": 1.0}
    return {**theta, "rope_type": "default"} if factor == 1.0 else {**theta, "rope_type": "linear", "factor": factor}


def _longrope(short: list[float], long: list[float], original: int) -> dict[str, Any]:
    return {
        "rope_type": "longrope",
        "short_factor": short,
        "long_factor": long,
        "original_max_position_embeddings": original,
    }


def _yarn(metadata: Metadata, factor: float) -> dict[str, Any]:
    metadata.expect("rope.scaling.yarn_ext_factor", 1.0)
    given = metadata.optional(float, "rope.scaling.yarn_attn_factor")
    damping = metadata.optional(float, "rope.scaling.yarn_log_multiplier") or 0.0
    times = metadata.optional(float, "rope.scaling.attn_factor") or 1.0
    betas = {name: metadata.optional(float, f"rope.scaling.yarn_{name}") for name in ("beta_fast", "beta_slow")}
    growth = math.log(factor) if factor > 1 else 0.0
    attention = (0.1 * growth + 1.0) / (0.1 * damping * growth + 1.0) if given is None else given
    return {
        "rope_type": "yarn",
        "factor": factor,
        "attention_factor": attention * times,
        **{name: value for name, value in betas.items() if value is not None},
    }


def _factors(index: GgufIndex, name: str, pairs: int) -> list[float]:
    place = index.tensors[name]
    if place.dtype != "<f4" or place.shape != (pairs,):
        raise UserError(
            f"{index.path}: {name} is {place.type.name} {list(place.shape)}, expected F32 [{pairs}]; convert it again"
        )
    factors: list[float] = np.asarray(MappedTensors(index).array(name), dtype=np.float64).tolist()
    return factors
