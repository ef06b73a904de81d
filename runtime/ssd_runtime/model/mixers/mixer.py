"""Mixers other than attention: sub-layers whose memory of a sequence is a state of fixed size.

A decoder layer has a mixer (attention, a short convolution, a gated delta net, Mamba-2) and an MLP sub-layer. Masks
stay 2L booleans: a skipped mixer neither reads nor writes its state, as a skipped attention has no keys.

Keys roll back by a number; a state cannot be cut. So the state is kept after committed tokens alone, and beside it the
*inputs* of the rows since: the numbers of each row, before the convolution, that the state is made of. Rollback stays
a number: a rejected row's inputs are overwritten, and an accepted row's are added to the state by the next forward.
Inputs were chosen over a state per row because they are small. A gated delta net of 32 heads of 128 × 128 has a state
of 2 MiB and 33 KiB of inputs per row in fp32: for 8 rows that is 0.3 MiB per layer instead of 16 MiB.

A draft's rows start from the state of the row before and never touch the committed one. A tree's rows start from their
parent's. Our own code runs rows one after the other, so that a row has the same bits in a step and in a verification,
as far as its projections have. torch's operations do so for few rows; longer chunks of a prompt run in the chunked
form, which differs by rounding. `cache/mixer_states.py` keeps states and inputs.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable
from typing import Any, ClassVar, NamedTuple

import torch
from torch import Tensor, nn
from torch.nn.functional import rms_norm, silu

from ssd_profiles.errors import UserError
from ssd_runtime.weights.hooks import hooked
from ssd_runtime.weights.kernels.kernel import RmsNorm
from ssd_runtime.weights.kernels.native_recurrence import NativeRecurrence
from ssd_runtime.weights.linear import written

FEW = 32
"""Most rows that run one after the other: more than nearly all verifications have."""
NORM_TOLERANCE = 1e-5
State = tuple[Tensor, ...]
"""The state of one mixer and sequence, whose tensors are never written in place."""


def exact(function: Callable[[Tensor], Tensor], numbers: Tensor) -> Tensor:
    """`function` of a few numbers, such as one per head, in fp64 and rounded to their dtype.

    torch computes what fills no vector by other code than the rest, whose last bits differ. So a row's would depend on
    the rows beside it, and weights that round rows to 8 bits magnify that to 0.4%.
    """
    return function(numbers.double()).to(numbers.dtype)


class Finish(NamedTuple):
    """The norm and the order of mixed values before the output projection, as our own code takes them."""

    norm: RmsNorm | None = None
    order: Tensor | None = None
    """The mixed value for each column of the output projection, in int32; None for one after the other."""


def gated_norm(norm: nn.Module, width: int, gated_before: bool) -> RmsNorm | None:
    """An RMS norm of values [n, `width`] that are gated before it, or after, as numbers; None if it is none."""
    weight, epsilon = getattr(norm, "weight", None), getattr(norm, "variance_epsilon", None)
    if epsilon is None or not isinstance(weight, Tensor) or weight.dtype != torch.float32 or hooked(norm):
        return None
    if weight.shape != (width,) or weight.device.type != "cpu":
        return None
    values = torch.linspace(-2, 3, width, dtype=torch.float32, device="cpu")[None]  # whatever the defaults are
    projected = values.flip(1)
    gates = silu(projected)
    expected = rms_norm(values * gates if gated_before else values, (width,), weight.detach(), epsilon)
    expected = expected if gated_before else expected * gates
    found = norm(values, projected)
    if bool((found - expected).abs().max() > NORM_TOLERANCE * expected.abs().max()):
        return None
    return RmsNorm(weight.detach().contiguous(), float(epsilon))


class Mixer(ABC):
    """The mixing part of one layer, between its input and output projections.

    It views the user's module, whose convolution and parameters it reads. Raises UserError if these are not plain.
    """

    name: ClassVar[str]
    """Name of the layer kind."""
    module: ClassVar[str]
    """The module's name in the decoder layer."""
    projections: ClassVar[tuple[str, ...]]
    """The module's input projections, whose outputs are the projected rows [n, …]."""
    output: ClassVar[str] = "out_proj"
    convolution: ClassVar[str] = "conv1d"
    width: int
    """Numbers of a row's inputs."""
    row_bytes: int
    """Bytes of a row's inputs."""
    state_bytes: int
    """Bytes of one state."""
    native: NativeRecurrence | None = None
    """The recurrence in our own code; None where that does not serve it."""

    def __init__(self, module: nn.Module, by_row: bool = False) -> None:
        """With `by_row`, no bit of a row among `FEW` depends on the others: each runs as it would alone."""
        self._by_row = by_row
        self._module: Any = module
        self._stamp: list[Any] = []
        self.refresh()

    def refresh(self) -> bool:
        """Read the module's parameters again if they have changed; returns whether they have."""
        conv: nn.Conv1d = getattr(self._module, self.convolution)
        norms = [self._module.norm] if hasattr(self._module, "norm") else []
        numbers = (number for norm in norms for number in norm.parameters())
        own = [each for each in (*self._module._parameters.values(), *conv.parameters(), *numbers) if each is not None]
        modules = [conv, getattr(self._module, self.output), *norms]
        stamp = [*modules, *map(hooked, modules), *map(written, own)]
        changed = stamp != self._stamp
        if changed:
            self._stamp = []  # what is refused here is refused again
            if type(conv) is not nn.Conv1d or hooked(conv) or any(each.is_meta for each in own):
                raise UserError(
                    f"model: the convolution of a {self.name} layer is adapted, hooked or offloaded, which decoding "
                    "layer by layer would bypass; load the model whole and without adapters there"
                )
            if (activation := getattr(self._module, "activation", "silu")) != "silu":
                raise UserError(
                    f"model: a {self.name} layer with the activation {activation!r} is not supported; use transformers"
                )
            # [kernel, channels], the oldest row's factor first
            self._taps = conv.weight.detach().float().squeeze(1).T.contiguous()
            self._bias = None if conv.bias is None else conv.bias.detach().float()
            self.width = self._build()
            self.row_bytes = self.width * conv.weight.element_size()
            self.state_bytes = sum(each.numel() * each.element_size() for each in self.empty())
            self._stamp = stamp
        return changed

    def finish(self) -> Finish | None:
        """The norm and the order by which our own code finishes mixed values; None where it does not serve them."""
        return None

    @abstractmethod
    def empty(self) -> State:
        """The state before the first token."""

    @abstractmethod
    def inputs(self, projected: Tensor) -> Tensor:
        """The inputs [n, width] of projected rows."""

    def scan(self, state: State, inputs: Tensor) -> tuple[Tensor, State]:
        """The mixed values [n, …] of rows that follow each other after `state`, and the state after the last one."""
        native = self.native
        if native is not None and all(each.dtype == torch.float32 for each in (*state, inputs)):
            outputs, after = native(state, inputs)
            return self._shaped(outputs), after
        if not self._by_row or not 1 < len(inputs) <= FEW:
            return self._scan(state, inputs)
        mixed = list[Tensor]()
        for row in inputs.split(1):
            out, state = self._scan(state, row)
            mixed.append(out)
        return torch.cat(mixed), state

    @abstractmethod
    def apart(self, state: State, inputs: Tensor) -> Tensor:
        """The mixed values [n, …] of rows each of which follows `state` itself, for searches."""

    def finished(self, mixed: Tensor, projected: Tensor) -> Tensor:
        """The input [n, …] of the output projection for mixed values, which the projected rows gate."""
        if not self._by_row or not 1 < len(mixed) <= FEW:
            return self._finished(mixed, projected)
        rows = zip(mixed.split(1), projected.split(1), strict=True)
        return torch.cat([self._finished(out, row) for out, row in rows])

    def _shaped(self, outputs: Tensor) -> Tensor:
        """The mixed values of the heads' outputs [n, heads, value]."""
        return outputs

    @abstractmethod
    def _scan(self, state: State, inputs: Tensor) -> tuple[Tensor, State]: ...

    @abstractmethod
    def _finished(self, mixed: Tensor, projected: Tensor) -> Tensor: ...

    @abstractmethod
    def _build(self) -> int:
        """Read the parameters beside the convolution's; returns the numbers of a row's inputs."""

    def _window(self, channels: int) -> Tensor:
        """The inputs of the convolution before the first token."""
        return getattr(self._module, self.convolution).weight.new_zeros(len(self._taps) - 1, channels)

    def _convolved(self, window: Tensor, rows: Tensor) -> tuple[Tensor, Tensor]:
        """The convolution [n, channels] in fp32 of `rows`, which follow `window`, and the window after them."""
        n = rows.shape[0]
        whole = torch.cat([window, rows])
        taps = self._taps
        wide = whole.float()
        out = wide[:n] * taps[0]
        for place in range(1, len(taps)):
            out = torch.addcmul(out, wide[place : place + n], taps[place])
        # A copy: a view would keep all rows of a chunk in memory.
        kept = whole[len(whole) - len(taps) + 1 :].clone()
        return out if self._bias is None else out + self._bias, kept

    def _convolved_apart(self, window: Tensor, rows: Tensor) -> Tensor:
        """The convolution [n, channels] in fp32 of `rows` each of which follows `window` itself."""
        out = (window.float() * self._taps[:-1]).sum(0) + rows.float() * self._taps[-1]
        return out if self._bias is None else out + self._bias
