"""The recurrence of a gated delta net or of Mamba-2, with its convolution, as one call of our own code.

Between two operations torch takes some microseconds, and a state of megabytes goes through the caches once for each; of
a plain step of Qwen3.5 that was a quarter.
"""

from __future__ import annotations

import ctypes
from typing import NamedTuple

import torch
from torch import Tensor

from ssd_runtime.weights.kernels.formats import TILE
from ssd_runtime.weights.native.library import COUNT, FLOAT, POINTER, fields, floats, library


class HeadNumbers(NamedTuple):
    """The parameters of a recurrence for each head, in fp32."""

    decay: Tensor
    """[heads]: the state decays by exp(decay × softplus(number + step)), with a number of each row and head."""
    step: Tensor
    """[heads]."""
    direct: Tensor | None = None
    """[heads]: factors of values in Mamba-2's output; None in a gated delta net."""


class _Recurrence(ctypes.Structure):
    _fields_ = (
        *fields(POINTER, "taps bias decay step direct"),
        *fields(COUNT, "tap_bytes bias_bytes decay_bytes step_bytes direct_bytes kernel heads groups key value"),
        *fields(FLOAT, "least most"),
    )


class NativeRecurrence:
    """The recurrence over rows that follow each other (`Recurrence` in `native/recurrence.h`).

    A row's result is the same to the bit however many rows a call has.
    """

    @classmethod
    def of(
        cls,
        taps: Tensor,
        bias: Tensor | None,
        numbers: HeadNumbers,
        state: Tensor,
        groups: int,
        limits: tuple[float, float] = (0.0, 0.0),
    ) -> NativeRecurrence | None:
        """The recurrence with the convolution `taps` [kernel, channels] and `bias` [channels], in fp32.

        `state` [heads, key, value] is one of its own, whose heads share keys in `groups`; Mamba-2's steps are clamped
        to `limits`. None where our own code does not serve it.
        """
        given = (taps, bias, *numbers, state)
        plain = all(each is None or (each.device.type == "cpu" and each.dtype == torch.float32) for each in given)
        if not plain or state.shape[1] % TILE or state.shape[2] % TILE or library() is None:
            return None
        return cls(taps, bias, numbers, state, groups, limits)

    def __init__(
        self,
        taps: Tensor,
        bias: Tensor | None,
        numbers: HeadNumbers,
        state: Tensor,
        groups: int,
        limits: tuple[float, float],
    ) -> None:
        """See `of`. Raises RuntimeError where there is no compiled code."""
        found = library()
        if found is None:
            raise RuntimeError("no compiled code for this processor")
        self._library = found
        kept = tuple(None if each is None else each.contiguous() for each in (taps, bias, *numbers))
        self._kept = kept  # what the structure points to
        heads, key, value = state.shape
        least, most = limits
        self._about = _Recurrence(
            *(None if each is None else each.data_ptr() for each in kept),
            *(0 if each is None else each.nbytes for each in kept),
            kernel=len(taps),
            heads=heads,
            groups=groups,
            key=key,
            value=value,
            least=least,
            most=most,
        )

    def __call__(self, window: Tensor, state: Tensor, inputs: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        """The outputs [n, heads, value] for `inputs` [n, width] after `window` [kernel - 1, channels] and `state`.

        The window and the state after the rows follow. All are in fp32. Raises RuntimeError if sizes do not agree.
        """
        window, state, inputs = window.contiguous(), state.contiguous(), inputs.contiguous()
        heads, _, value = state.shape
        following, after = torch.empty_like(window), torch.empty_like(state)
        n, channels = len(inputs), window.shape[1]
        outputs = self._library.write(
            floats(n, heads, value),
            n * channels,
            self._library.recur,
            ctypes.addressof(self._about),
            window.data_ptr(),
            window.nbytes,
            state.data_ptr(),
            state.nbytes,
            following.data_ptr(),
            after.data_ptr(),
            inputs.data_ptr(),
            inputs.nbytes,
            n,
        )
        return outputs, following, after
