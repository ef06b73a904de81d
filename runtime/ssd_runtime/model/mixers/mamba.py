"""Mamba-2, as in Granite-4 hybrids and Falcon-H1."""

from __future__ import annotations

from torch import Tensor, nn
from torch.nn.functional import silu, softplus

from ssd_runtime.model.mixers.mixer import Finish, Mixer, State, exact, gated_norm
from ssd_runtime.model.mixers.recurrence import Rows, recur, recur_apart
from ssd_runtime.weights.kernels.native_recurrence import HeadNumbers, NativeRecurrence


class Mamba2(Mixer):
    """A convolution over x, B and C, the recurrence of a state space, and a gated norm.

    A row's projection is the gate, x, B and C as one, and the time step dt. Its inputs are all but the gate.
    """

    name = "mamba"
    module = "mamba"
    projections = ("in_proj",)

    def _build(self) -> int:
        module = self._module
        self._heads, self._width = module.num_heads, module.head_dim
        self._groups, self._size = module.n_groups, module.ssm_state_size
        self._channels = self._taps.shape[1]
        self._decay = -module.A_log.detach().float().exp()
        self._step = module.dt_bias.detach()
        self._direct = module.D.detach().float()[:, None]
        self.native = NativeRecurrence.of(
            taps=self._taps,
            bias=self._bias,
            numbers=HeadNumbers(self._decay, self._step.float(), self._direct[:, 0]),
            state=self.empty()[1],
            groups=self._groups,
            limits=module.time_step_limit,
        )
        return self._channels + self._heads

    def finish(self) -> Finish | None:
        """The norm of all values after their gates, if there is one."""
        module = getattr(self._module, "norm", None)
        if module is None or isinstance(module, nn.Identity):
            return Finish()
        norm = gated_norm(module, self._heads * self._width, gated_before=True)
        return None if norm is None else Finish(norm)

    def empty(self) -> State:
        """The state before the first token."""
        return self._window(self._channels), self._taps.new_zeros(self._heads, self._size, self._width)

    def inputs(self, projected: Tensor) -> Tensor:
        """x, B, C and dt of projected rows."""
        return projected[:, -self.width :]

    def apart(self, state: State, inputs: Tensor) -> Tensor:
        """The heads' outputs at rows each of which follows `state`."""
        x, rows = self._rows(self._convolved_apart(state[0], inputs[:, : self._channels]), inputs)
        return self._joined(recur_apart(state[1], rows), x)

    def _scan(self, state: State, inputs: Tensor) -> tuple[Tensor, State]:
        mixed, window = self._convolved(state[0], inputs[:, : self._channels])
        x, rows = self._rows(mixed, inputs)
        out, matrix = recur(state[1], rows)
        return self._joined(out, x), (window, matrix)

    def _finished(self, mixed: Tensor, projected: Tensor) -> Tensor:
        gate = projected[:, : mixed.shape[1]]
        # Without a norm, transformers 5.0 has none, and later versions an identity.
        norm = getattr(self._module, "norm", None)
        normed: Tensor = (
            norm(mixed, gate) if norm is not None and not isinstance(norm, nn.Identity) else mixed * silu(gate)
        )
        return normed.to(projected.dtype)

    def _shaped(self, outputs: Tensor) -> Tensor:
        """The heads' outputs [n, heads * width]."""
        return outputs.flatten(1)

    def _joined(self, out: Tensor, x: Tensor) -> Tensor:
        """The heads' outputs [n, heads * width] in fp32 with the direct path from x [n, heads, width] added."""
        return (out + self._direct * x).flatten(1)

    def _rows(self, mixed: Tensor, inputs: Tensor) -> tuple[Tensor, Rows]:
        """x [n, heads, width] and the rows of the recurrence, of the convolution's result and the rows' inputs."""
        mixed = silu(mixed.to(inputs.dtype)).float()
        inner, both = self._heads * self._width, self._groups * self._size
        x = mixed[:, :inner].unflatten(-1, (self._heads, self._width))
        keys, queries = (
            each.unflatten(-1, (self._groups, self._size)).repeat_interleave(self._heads // self._groups, 1)
            for each in (mixed[:, inner : inner + both], mixed[:, inner + both :])
        )
        step = exact(softplus, inputs[:, self._channels :] + self._step).clamp(*self._module.time_step_limit).float()
        return x, Rows(queries=queries, keys=keys, values=step[..., None] * x, decays=self._decay * step)
