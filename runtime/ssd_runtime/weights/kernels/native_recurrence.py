"""The recurrence of a gated delta net or of Mamba-2 with its convolution, or one alone, as a call of our own code.

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
        *fields(COUNT, "own_threads"),
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
        numbers: HeadNumbers | None = None,
        state: Tensor | None = None,
        groups: int = 1,
        limits: tuple[float, float] = (0.0, 0.0),
    ) -> NativeRecurrence | None:
        """The recurrence with the convolution `taps` [kernel, channels] and `bias` [channels], in fp32.

        `state` [heads, key, value] is one of its own, whose heads share keys in `groups`; Mamba-2's steps are clamped
        to `limits`. Without numbers and a state it is the convolution alone. None where our own code does not serve it.
        """
        given = (taps, bias, *(numbers or ()), state)
        plain = all(each is None or (each.device.type == "cpu" and each.dtype == torch.float32) for each in given)
        sizes = taps.shape[1:] if state is None else state.shape[1:]
        if not plain or any(size % TILE for size in sizes) or library() is None:
            return None
        return cls(taps, bias, numbers, state, groups, limits)

    def __init__(
        self,
        taps: Tensor,
        bias: Tensor | None,
        numbers: HeadNumbers | None,
        state: Tensor | None,
        groups: int,
        limits: tuple[float, float],
    ) -> None:
        """See `of`. Raises RuntimeError where there is no compiled code."""
        found = library()
        if found is None:
            raise RuntimeError("no compiled code for this processor")
        self._library = found
        given = (taps, bias, *(numbers or (None, None, None)))
        kept = tuple(None if each is None else each.contiguous() for each in given)
        self._kept = kept  # what the structure points to
        heads, key, value = (1, 0, taps.shape[1]) if state is None else state.shape
        self.channels, self.mixed = taps.shape[1], heads * value
        """The channels of a row, and the numbers of its outputs."""
        self.width = self.channels + (0 if numbers is None else heads * (2 if numbers.direct is None else 1))
        """The numbers of a row's inputs."""
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
        self.address = ctypes.addressof(self._about)
        self.has_matrix = key > 0

    @property
    def own_threads(self) -> bool:
        """Whether it runs on threads of our own instead of torch's (`Native.own_threads`)."""
        return bool(self._about.own_threads)

    @own_threads.setter
    def own_threads(self, own: bool) -> None:
        self._about.own_threads = int(own)

    def __call__(self, state: tuple[Tensor, ...], inputs: Tensor) -> tuple[Tensor, tuple[Tensor, ...]]:
        """The outputs [n, heads, value] for `inputs` [n, width] after a state, and that after them.

        A state is the window [kernel - 1, channels] and, but for a convolution alone, a matrix [heads, key, value]. All
        are in fp32. Raises RuntimeError if sizes do not agree.
        """
        before = tuple(each.contiguous() for each in state)
        inputs, after = inputs.contiguous(), tuple(map(torch.empty_like, before))
        n = len(inputs)
        outputs = self._library.write(
            floats(n, self._about.heads, self._about.value),
            n * self.channels,
            self._library.recur,
            self.address,
            *(number for each in pointed(before) for number in each),
            *(address for address, _ in pointed(after)),
            inputs.data_ptr(),
            inputs.nbytes,
            n,
        )
        return outputs, after


def pointed(state: tuple[Tensor, ...]) -> tuple[tuple[int | None, int], tuple[int | None, int]]:
    """Addresses and bytes of a state's window and of its matrix, where it has one."""
    window, *matrix = state
    return (window.data_ptr(), window.nbytes), (matrix[0].data_ptr(), matrix[0].nbytes) if matrix else (None, 0)
