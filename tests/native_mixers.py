"""Random recurrences and mixers of our own kernels, on rows after random states, and what they should compute."""

from __future__ import annotations

import random
from collections.abc import Sequence
from types import SimpleNamespace
from typing import Any

import torch
from torch import Tensor
from torch.nn.functional import normalize, silu, softplus

from ssd_runtime.model.batch.batch import Lineage, Segment
from ssd_runtime.model.cache.mixer_states import Kept, LayerStates
from ssd_runtime.model.mixers.mixer import Finish, State
from ssd_runtime.model.mixers.recurrence import Rows, recur
from ssd_runtime.model.sublayers.native_mixing import NativeMixing
from ssd_runtime.weights.kernels.kernel import RmsNorm
from ssd_runtime.weights.kernels.native_recurrence import HeadNumbers, NativeRecurrence
from tests.native_blocks import EPSILON, any_connection, any_weight, connected, normed

KINDS = ("delta", "mamba", "convolution")


class Scan:
    """A random recurrence of a gated delta net or of Mamba-2, or a convolution, and rows that follow a random state."""

    def __init__(self, in_tiles: bool = False) -> None:
        """If `in_tiles`, the numbers of a row fill tiles, and its values groups."""
        self.kind, self.groups = random.choice(KINDS), random.choice([1, 2, 4] if in_tiles else [1, 2, 3])
        self.heads, self.key, self.value = self.groups * random.choice([1, 2]), *random.choices([16, 32, 48], k=2)
        if in_tiles:
            self.heads, self.value = 16, 16
        if self.kind == "convolution":
            self.groups, self.heads, self.key, self.value = 1, 1, 0, (32 if in_tiles else 16) * random.randint(1, 5)
        self.n, self.channels = random.randint(1, 9), 2 * self.groups * self.key + self.heads * self.value
        self.taps = torch.randn(random.randint(2, 5), self.channels) * 0.3
        self.bias = random.choice([None, torch.randn(self.channels) * 0.3])
        decay, step, direct = -torch.rand(self.heads), torch.randn(self.heads), torch.randn(self.heads)
        self.numbers: HeadNumbers | None = HeadNumbers(decay, step, direct if self.kind == "mamba" else None)
        self.limits = (0.5, 1.5)
        self.window = torch.randn(len(self.taps) - 1, self.channels)
        self.state: Tensor | None = torch.randn(self.heads, self.key, self.value)
        if self.kind == "convolution":
            self.numbers = self.state = None
        per_head = {"delta": 2, "mamba": 1, "convolution": 0}[self.kind]
        self.inputs = torch.randn(self.n, self.channels + self.heads * per_head)
        self.native = self.made()

    @property
    def before(self) -> State:
        """The state that the rows follow."""
        return (self.window,) if self.state is None else (self.window, self.state)

    def made(self, **changes: Any) -> NativeRecurrence:
        """The recurrence with some parts replaced."""
        parts = {name: getattr(self, name) for name in ("taps", "bias", "numbers", "state", "groups", "limits")}
        return NativeRecurrence(**{**parts, **changes})

    def call(self) -> Tensor:
        """The rows' outputs, and the window and the state after them."""
        outputs, after = self.native(self.before, self.inputs)
        return torch.cat([each.flatten() for each in (outputs, *after)])

    def expected(self) -> Tensor:
        """The results of the call, by torch's operations."""
        outputs, after = self.scanned(self.before, self.inputs)
        return torch.cat([each.flatten() for each in (outputs, *after)])

    def scanned(self, before: State, inputs: Tensor) -> tuple[Tensor, State]:
        """The outputs [n, heads, value] of rows after a state, and that after them, by torch's operations."""
        n, inner, keys = len(inputs), self.heads * self.value, self.groups * self.key
        whole = torch.cat([before[0], inputs[:, : self.channels]])
        taps = torch.stack([whole[i : i + n] * tap for i, tap in enumerate(self.taps)]).sum(0)
        mixed = taps if self.bias is None else taps + self.bias
        if self.numbers is None:
            return mixed[:, None], (whole[n:],)
        sizes = [inner, keys, keys] if self.kind == "mamba" else [keys, keys, inner]
        first, k, last = silu(mixed).split(sizes, 1)
        q, v = (last, first) if self.kind == "mamba" else (first, last)
        queries, keyed = (
            each.unflatten(1, (self.groups, -1)).repeat_interleave(self.heads // self.groups, 1) for each in (q, k)
        )
        values, numbers = v.unflatten(1, (self.heads, -1)), inputs[:, self.channels :]
        decay, step, direct = self.numbers
        if direct is None:
            queries, keyed = (normalize(each, dim=-1, eps=1e-6) for each in (queries, keyed))
            rate, time = numbers.chunk(2, 1)
            rows = Rows(queries * self.key**-0.5, keyed, values, decay * softplus(time + step), rate.sigmoid())
            outputs, after = recur(before[1], rows)
        else:
            time = softplus(numbers + step).clamp(*self.limits)
            outputs, after = recur(before[1], Rows(queries, keyed, time[..., None] * values, decay * time))
            outputs = outputs + direct[:, None] * values
        return outputs, (whole[n:], after)


class Mixed:
    """A random mixer between its projections, on rows of random sequences: consecutive ones and trees."""

    def __init__(self, own: bool, hidden: int = 0, rows: Sequence[int] = ()) -> None:
        """The width of the stream, and the rows of sequences, may be given."""
        self.hidden, quantised = hidden or 32 * random.randint(1, 4), random.choice([True, False])
        self.scan = scan = Scan(in_tiles=True)
        self.inner = scan.heads * scan.value
        width, gates = scan.inputs.shape[1], self.inner * (1 if scan.key else 2)
        sizes = random.choice([[width + gates], [16, width + gates - 16]])
        inputs = [any_weight(size, self.hidden, own, quantised) for size in sizes]
        self.output, self.dense_output = any_weight(self.hidden, self.inner, own)
        self.dense_inputs = torch.cat([dense for _, dense in inputs])
        norm = RmsNorm(torch.rand(self.inner if scan.kind == "mamba" else scan.value), EPSILON)
        self.norm = random.choice([None, norm]) if scan.key else None
        self.order = random.choice([None, torch.randperm(self.inner, dtype=torch.int32)])
        self.connection = any_connection(self.hidden)
        by = self.connection
        self.is_beside = by is not None and by.after is None and by.factor == 1.0 and random.choice([True, False])
        scan.native.own_threads = own
        self.parts: dict[str, Any] = {
            "inputs": [kernel for kernel, _ in inputs],
            "output": self.output,
            "recurrence": scan.native,
            "finish": Finish(self.norm, self.order),
            "connection": self.connection,
        }
        self.mixing = NativeMixing(**self.parts)
        self.rows = list(rows) or [random.choice([1, 2, 7, 12]) for _ in range(random.choice([1, 1, 3]))]
        self.lineages = [random.choice([None, self._tree(rows)]) for rows in self.rows]

    @staticmethod
    def _tree(rows: int) -> Lineage:
        parents = tuple(random.randint(max(-1, row - 3), row - 1) for row in range(rows))
        return Lineage(parents=parents, starts=(5,) * rows, kept=True)

    def states(self, tokens: int) -> Any:
        """A sequence's states, of which that after these tokens is the scan's."""
        mixer: Any = SimpleNamespace(empty=lambda: self.scan.before, name="mixer", width=self.scan.inputs.shape[1])
        states = LayerStates(mixer)
        states.base = Kept(tokens, self.scan.before)
        return SimpleNamespace(of=lambda layer: states)

    def segments(self) -> list[Any]:
        """The sequences after five tokens."""
        found = list[Segment]()
        for rows, lineage in zip(self.rows, self.lineages, strict=True):
            cache: Any = SimpleNamespace(states=self.states(5))
            found.append(Segment(cache=cache, slot=5, rows=rows, views=(), lineage=lineage))
        return found

    def __call__(self, x: Tensor) -> Tensor:
        """The block's output, and the inputs and states that it kept."""
        segments = self.segments()
        return torch.cat([self.mixing(0, x, segments, self.residual(x)).flatten(), kept_by(segments)])

    def residual(self, x: Tensor) -> Tensor:
        """The rows that the output is added to: those of `x`, or others if it stands beside attention."""
        return x.flip(1) if self.is_beside else x

    def expected(self, x: Tensor) -> Tensor:
        """The result of the call if rows are not rounded."""
        segments = self.segments()
        y = connected(x, self.connection, lambda rows: self._output(rows, segments))
        return torch.cat([(y - x + self.residual(x)).flatten(), kept_by(segments)])

    def _output(self, x: Tensor, segments: list[Any]) -> Tensor:
        """The output of normed rows; keeps their inputs and states."""
        scan, size = self.scan, self.inner
        projected, width = x @ self.dense_inputs.T, self.scan.inputs.shape[1]
        if not scan.key:
            first, gates, last = projected.chunk(3, 1)
            inputs = first * last
        elif scan.kind == "mamba":
            gates, inputs = projected.split([size, width], 1)
        else:
            channels, gates, numbers = projected.split([scan.channels, size, width - scan.channels], 1)
            inputs = torch.cat([channels, numbers], 1)
        outputs, at = list[Tensor](), 0
        for segment in segments:
            own, after = inputs[at : at + segment.rows], list[State]()
            parents = range(-1, segment.rows - 1) if segment.lineage is None else segment.lineage.parents
            for row, parent in enumerate(parents):
                out, state = scan.scanned(after[parent] if parent >= 0 else scan.before, own[row : row + 1])
                outputs.append(out)
                after.append(state)
            segment.cache.states.of(0).write(5, own, None if segment.lineage else after[-1])
            at += segment.rows
        mixed = torch.cat(outputs)
        if scan.kind == "delta":
            mixed = normed(mixed, self.norm)
        mixed = mixed.flatten(1) * (silu(gates) if scan.key else gates)
        if scan.kind == "mamba":
            mixed = normed(mixed, self.norm)
        return (mixed if self.order is None else mixed[:, self.order]) @ self.dense_output.T


def kept_by(segments: list[Any]) -> Tensor:
    """The inputs and states that sequences keep of their rows."""
    found = list[Tensor]()
    for segment in segments:
        states = segment.cache.states.of(0)
        found += [states.read(segment.slot, segment.slot + segment.rows)]
        found += () if states.tip is None else states.tip.state
    return torch.cat([each.flatten() for each in found])
