"""The gated delta nets of Qwen3.5 and Qwen3-Next."""

from __future__ import annotations

from typing import ClassVar

import torch
from torch import Tensor
from torch.nn.functional import silu, softplus

from ssd_runtime.model.mixers.mixer import Finish, Mixer, State, exact, gated_norm
from ssd_runtime.model.mixers.recurrence import Rows, recur, recur_apart
from ssd_runtime.weights.hooks import hooked
from ssd_runtime.weights.kernels.native_recurrence import HeadNumbers, NativeRecurrence

EPSILON = 1e-6
"""Added to the squared lengths of queries and keys."""


class GatedDeltaNet(Mixer):
    """A convolution over queries, keys and values, the gated delta rule, and a gated norm of each head.

    A row's projection is q, k and v as one, the gate z, and the rates b and a. Its inputs are q, k, v, b and a.
    """

    name = "delta"
    module = "linear_attn"
    projections: ClassVar[tuple[str, ...]] = ("in_proj_qkv", "in_proj_z", "in_proj_b", "in_proj_a")

    def _build(self) -> int:
        module = self._module
        self._heads, self._value = module.num_v_heads, module.head_v_dim
        self._key_heads, self._key = module.num_k_heads, module.head_k_dim
        self._channels = self._taps.shape[1]
        self._decay = -module.A_log.detach().float().exp()
        self._step = module.dt_bias.detach().float()
        # A quantised file may hold the columns of the output projection in another order (`PackedLinear`), which a
        # module that is called itself knows.
        self._order = None if hooked(module.out_proj) else getattr(module.out_proj, "columns", None)
        self.native = NativeRecurrence.of(
            taps=self._taps,
            bias=self._bias,
            numbers=HeadNumbers(self._decay, self._step),
            state=self.empty()[1],
            groups=self._key_heads,
        )
        return self._channels + 2 * self._heads

    def finish(self) -> Finish | None:
        """The norm of each head before its gate, and the order of the output projection's columns."""
        norm = gated_norm(self._module.norm, self._value, gated_before=False)
        order = None if self._order is None else self._order.to(torch.int32)
        return None if norm is None else Finish(norm, order)

    def empty(self) -> State:
        """The state before the first token."""
        return self._window(self._channels), self._taps.new_zeros(self._heads, self._key, self._value)

    def inputs(self, projected: Tensor) -> Tensor:
        """q, k, v, b and a of projected rows."""
        projected = self._ordered(projected)
        return torch.cat([projected[:, : self._channels], projected[:, -2 * self._heads :]], -1)

    def _scan(self, state: State, inputs: Tensor) -> tuple[Tensor, State]:
        mixed, window = self._convolved(state[0], inputs[:, : self._channels])
        out, matrix = recur(state[1], self._rows(mixed, inputs))
        return out.to(inputs.dtype), (window, matrix)

    def apart(self, state: State, inputs: Tensor) -> Tensor:
        """The heads' outputs at rows each of which follows `state`."""
        mixed = self._convolved_apart(state[0], inputs[:, : self._channels])
        return recur_apart(state[1], self._rows(mixed, inputs)).to(inputs.dtype)

    def _finished(self, mixed: Tensor, projected: Tensor) -> Tensor:
        """The heads' outputs, normed and gated by z."""
        gate = self._ordered(projected)[:, self._channels : -2 * self._heads].unflatten(-1, mixed.shape[1:])
        normed: Tensor = self._module.norm(mixed.flatten(0, 1), gate.flatten(0, 1))
        rows = normed.view(len(mixed), -1)
        return rows if self._order is None else rows[:, self._order]

    def _ordered(self, projected: Tensor) -> Tensor:
        """Projected rows as q, k, v, z, b and a, each with its heads in order."""
        return projected

    def _rows(self, mixed: Tensor, inputs: Tensor) -> Rows:
        """The rows of the recurrence from the convolution's result [n, channels] in fp32 and the rows' inputs."""
        dtype, both = inputs.dtype, self._key_heads * self._key
        mixed = silu(mixed.to(dtype)).float()
        queries, keys = (
            _normed(each.unflatten(-1, (self._key_heads, self._key))).repeat_interleave(
                self._heads // self._key_heads, 1
            )
            for each in (mixed[:, :both], mixed[:, both : 2 * both])
        )
        rate, step = inputs[:, self._channels :].chunk(2, -1)
        return Rows(
            queries=queries * self._key**-0.5,
            keys=keys,
            values=mixed[:, 2 * both :].unflatten(-1, (self._heads, self._value)),
            decays=self._decay * exact(softplus, step.float() + self._step),
            betas=exact(torch.sigmoid, rate).float(),
        )


class GroupedDeltaNet(GatedDeltaNet):
    """Qwen3-Next's: each key head has its q, k, v and z side by side, and its b and a."""

    projections = ("in_proj_qkvz", "in_proj_ba")

    def finish(self) -> Finish | None:
        """None: our own code takes the heads of a projection in order."""
        return None

    def _ordered(self, projected: Tensor) -> Tensor:
        values = self._heads // self._key_heads * self._value
        groups = projected.split([projected.shape[1] - 2 * self._heads, 2 * self._heads], -1)
        whole, rates = (each.unflatten(-1, (self._key_heads, -1)) for each in groups)
        parts = (*whole.split([self._key, self._key, values, values], -1), *rates.chunk(2, -1))
        return torch.cat([part.flatten(1) for part in parts], -1)


def _normed(heads: Tensor) -> Tensor:
    """Heads [..., width] of length 1."""
    return heads * torch.rsqrt(heads.square().sum(-1, keepdim=True) + EPSILON)
