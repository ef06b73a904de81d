"""Rotary position embeddings from tables of the model's own angles."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from threading import Lock
from typing import Any

import torch
from torch import Tensor
from transformers import PreTrainedConfig

from ssd_runtime.model.family.family import Family
from ssd_runtime.model.family.layer_kinds import LONGROPE, rope_types

Rotation = tuple[Tensor, Tensor]
"""cos and signed sin of some rows, each [n, 1, rotated part of a head], or [n, 2, …] of queries and of keys."""


class RotaryTable:
    """A table of cos and signed sin of positions 0, 1, …, computed by the model's own module.

    With `switch`, angles depend on the sequence's length too (longrope). transformers chooses them by the largest
    position of a forward, so short and long sequences have separate tables.
    """

    def __init__(
        self,
        module: Callable[..., tuple[Tensor, Tensor]],
        like: Tensor,
        max_context: int,
        switch: int | None,
        name: str,
        alternate: bool,
        once: bool,
    ) -> None:
        """`module` is transformers': it returns cos and sin [1, n, width] of positions [1, n], in the dtype of `like`.

        It is asked for no position after `max_context` that no sequence has: angles of a module may change there.
        `alternate` pairs neighbouring columns (`rotate`); `once` says that the module has one angle per pair.
        """
        self._module = module
        self._alternate, self._once = alternate, once
        self._like = like
        self._max_context = max_context
        self._switch = switch
        self._arguments = {} if name == "default" else {"layer_type": name}
        self._lock = Lock()
        first = min(256, max_context)
        self._tables = {long: self._compute(first, long) for long in ((False, True) if switch else (False,))}

    def rows(self, positions: Tensor | slice, end: int, long: bool = False) -> Rotation:
        """The rotation of positions below `end`; with `long`, that of a sequence of more than `switch` tokens."""
        long = long or (self._switch is not None and end > self._switch)
        cos, sin = self._tables[long]
        if end > cos.shape[0]:
            with self._lock:
                have = self._tables[long][0].shape[0]
                if end > have:
                    self._tables[long] = self._compute(max(end, min(2 * have, self._max_context)), long)
            cos, sin = self._tables[long]
        return cos[positions], sin[positions]

    def _compute(self, length: int, long: bool) -> Rotation:
        if self._switch is not None:
            length = max(length, self._switch + 1) if long else min(length, self._switch)
        positions = torch.arange(length, device=self._like.device)[None]
        cos, sin = self._module(self._like, positions, **self._arguments)
        if self._once:
            cos, sin = cos.repeat(1, 1, 2), sin.repeat(1, 1, 2)
        half = cos.shape[-1] // 2
        # rotate_half(x) = cat(-x2, x1) is a roll by half with a negated first half; its sign goes into sin.
        signed = torch.cat([-sin[..., :half], sin[..., half:]], -1)
        if self._alternate:
            cos, signed = (each.unflatten(-1, (2, half)).transpose(-1, -2).flatten(-2) for each in (cos, signed))
        # The module may run on another device.
        device = self._like.device
        return cos[0, :, None].to(device).contiguous(), signed[0, :, None].to(device).contiguous()


def rope_switch(config: PreTrainedConfig, family: Family) -> int | None:
    """The length from which on all tokens are rotated by other angles (longrope); None for other models."""
    has_one = LONGROPE in rope_types(config, family).values()
    return int(config.rope_parameters["original_max_position_embeddings"]) if has_one else None


def rotary_tables(base: Any, family: Family, like: Tensor, max_context: int) -> dict[str, RotaryTable]:
    """The tables of the base model's rotary embeddings by name, in the dtype and on the device of `like`."""
    return {
        name: RotaryTable(
            module=getattr(base, family.rotary),
            like=like,
            max_context=max_context,
            switch=rope_switch(base.config, family),
            name=name,
            alternate=family.pairs_alternate,
            once=family.angles_once,
        )
        for name in rope_types(base.config, family)
    }


def joined(rotations: Sequence[Rotation | None]) -> Rotation | None:
    """The rotation of several sequences' rows, one after the other; None for layers without one."""
    first = rotations[0]
    if len(rotations) == 1 or first is None:
        return first
    cos, sin = zip(*(each for each in rotations if each is not None), strict=True)
    return torch.cat(cos), torch.cat(sin)


def by_heads(rotation: Rotation, heads: int, kept: int) -> Rotation:
    """The rotation [n, heads + 2 kept, width] of queries, keys and values.

    It turns no values: one for all three takes two operations per layer fewer than one without values.
    """
    cos, sin = rotation
    queries, keys = (cos[:, :1], sin[:, :1]), (cos[:, -1:], sin[:, -1:])
    unturned = torch.ones_like(keys[0]), torch.zeros_like(keys[1])
    parts = zip(queries, keys, unturned, strict=True)
    whole = [torch.cat([q.expand(-1, heads, -1), *(e.expand(-1, kept, -1) for e in (k, v))], 1) for q, k, v in parts]
    return whole[0], whole[1]


def repeated(rotation: Rotation | None, times: int) -> Rotation | None:
    """The rotation that has each row `times` times."""
    if rotation is None:
        return None
    cos, sin = rotation
    return cos.repeat_interleave(times, 0), sin.repeat_interleave(times, 0)


def rotate(heads: Tensor, rotation: Rotation, alternate: bool = False) -> Tensor:
    """Rotate `heads` [n, heads, head_dim]; a partial embedding rotates the first part of each head.

    The columns of a pair are half of that part apart, or neighbours with `alternate`.
    Angles may have a higher precision than `heads` (OLMo-2 keeps them in fp32). The result has the dtype of `heads`.
    """
    cos, sin = rotation
    width = cos.shape[-1]
    partial = width != heads.shape[-1]
    turned = heads[..., :width] if partial else heads
    others = turned.unflatten(-1, (-1, 2)).flip(-1).flatten(-2) if alternate else turned.roll(width // 2, -1)
    rotated = turned * cos + others * sin
    if rotated.dtype != heads.dtype:  # a call of `to` that converts nothing takes longer than the addition
        rotated = rotated.to(heads.dtype)
    return torch.cat([rotated, heads[..., width:]], -1) if partial else rotated
