"""Mixers other than attention that run with their projections in one call of our own code (`native/mixing.h`)."""

from __future__ import annotations

import ctypes
from collections.abc import Sequence

import torch
from torch import Tensor

from ssd_runtime.model.batch.batch import Segment
from ssd_runtime.model.cache.mixer_states import LayerStates
from ssd_runtime.model.layer.layer import Layer
from ssd_runtime.model.mixers.mixer import Finish, Mixer, State
from ssd_runtime.model.sublayers.mixing import keep, runs_of
from ssd_runtime.weights.kernels.formats import TILE
from ssd_runtime.weights.kernels.kernel import Connection
from ssd_runtime.weights.kernels.native import Native, required_library
from ssd_runtime.weights.kernels.native_recurrence import NativeRecurrence, pointed
from ssd_runtime.weights.native.library import COUNT, POINTER, fields, floats


def continues(segments: Sequence[Segment]) -> bool:
    """Whether our own code runs rows after their states: all but those that are apart, of which many share a state."""
    return all(each.lineage is None or not each.lineage.is_apart for each in segments)


class ContinuationPlace(ctypes.Structure):
    """`Continuation` in `weights/native/mixing.h`."""

    _fields_ = (
        *fields(POINTER, "window state"),
        *fields(COUNT, "window_bytes state_bytes"),
        *fields(POINTER, "next after inputs"),
        *fields(COUNT, "rows"),
    )


class _Mixing(ctypes.Structure):
    _fields_ = (
        *fields(POINTER, "inputs output recurrence norm order"),
        *fields(COUNT, "order_bytes projections"),
    )


class TreeStates:
    """Memory for the states after rows of trees, which no cache keeps: the layers of a call write it in turn."""

    def __init__(self) -> None:
        self._states = dict[tuple[object, ...], State]()

    def like(self, state: State, number: int) -> State:
        """The `number`-th of this state's sizes; 0 is for rows that nothing follows."""
        key = number, *(each.shape for each in state)
        if key not in self._states:
            self._states[key] = tuple(map(torch.empty_like, state))
        return self._states[key]


class ContinuedRows:
    """The rows of segments in one layer: the states that they continue, and what our own code writes for them."""

    def __init__(self, layer: int, segments: Sequence[Segment], width: int, trees: TreeStates) -> None:
        """Rows have inputs of this `width`; all layers of a call share `trees`."""
        followed = 0
        places = list[ContinuationPlace]()
        self._before = list[State]()  # what places point to
        self._written = list[tuple[Segment, LayerStates, Tensor, dict[int, State]]]()
        for segment in segments:
            states, inputs, after = segment.cache.states.of(layer), floats(segment.rows, width), dict[int, State]()
            for run, state in runs_of(states, segment, after):
                self._before.append(before := tuple(each.contiguous() for each in state))
                if segment.lineage is None:
                    following = tuple(map(torch.empty_like, before))
                else:
                    followed += run.is_followed
                    following = trees.like(before, followed if run.is_followed else 0)
                after[run.end - 1] = following
                place = ContinuationPlace(inputs=inputs[run.begin].data_ptr(), rows=run.end - run.begin)
                (place.window, place.window_bytes), (place.state, place.state_bytes) = pointed(before)
                (place.next, _), (place.after, _) = pointed(following)
                places.append(place)
            self._written.append((segment, states, inputs, after))
        self.places = (ContinuationPlace * len(places))(*places)
        self.address = ctypes.addressof(self.places)

    def keep(self) -> None:
        """Keep the inputs and states that were written."""
        for segment, states, inputs, after in self._written:
            keep(segment, states, inputs, after[segment.rows - 1])


class NativeMixing:
    """W_output mixer(W_inputs x); a row's result depends on the row and on those that it follows alone."""

    @classmethod
    def of(cls, layer: Layer) -> NativeMixing | None:
        """The mixer with a state of a layer, in the place of attention or beside it; None if the code serves none."""
        beside, mixer, connection = layer.parallel, layer.state, layer.attention_connection
        inputs, output = (layer.qkv, layer.output) if beside is None else (beside.inputs, beside.output)
        return None if mixer is None else cls._of(mixer, inputs.natives, output.fused, connection, beside is not None)

    @classmethod
    def _of(
        cls, mixer: Mixer, inputs: Sequence[Native], output: Native | None, connection: Connection | None, beside: bool
    ) -> NativeMixing | None:
        if mixer.native is None or not inputs or output is None or connection is None:
            return None
        if beside and (connection.after is not None or connection.factor != 1.0):
            return None
        finish, outputs = mixer.finish(), [each.out_features for each in inputs]
        if (
            finish is None
            or len({each.rounding for each in inputs}) > 1  # all multiply the same rows
            or any(number % TILE for number in (*outputs, output.out_features))
            or any(each.dtype != torch.float32 for each in mixer.empty())
        ):
            return None
        made = cls(inputs, output, mixer.native, finish, connection)
        return made if made.projected == sum(outputs) else None

    def __init__(
        self,
        inputs: Sequence[Native],
        output: Native,
        recurrence: NativeRecurrence,
        finish: Finish,
        connection: Connection | None,
    ) -> None:
        """The outputs of `inputs` together are the projections of rows."""
        self._library = required_library()
        self.connection = connection
        addresses = (ctypes.c_void_p * len(inputs))(*(each.address for each in inputs))
        norm, order = finish
        self._parts = tuple(inputs), addresses, output, norm, order  # what the structure points to
        self._recurrence = recurrence
        self._mixing = _Mixing(
            inputs=ctypes.addressof(addresses),
            output=output.address,
            recurrence=recurrence.address,
            norm=None if norm is None else norm.address,
            order=None if order is None else order.data_ptr(),
            order_bytes=0 if order is None else order.nbytes,
            projections=len(inputs),
        )
        self.address = ctypes.addressof(self._mixing)
        self.projected = recurrence.width + (1 if recurrence.has_matrix else 2) * recurrence.mixed
        """The numbers of a row's projection."""
        self.row_floats = self.projected + (1 if order is None else 2) * recurrence.mixed + recurrence.channels
        """The numbers of memory that a call takes per row."""
        self.row_floats += inputs[0].row_floats + output.row_floats

    def continued(self, layer: int, segments: Sequence[Segment], trees: TreeStates) -> ContinuedRows:
        """The rows of segments in `layer`, for a call whose layers share `trees`."""
        return ContinuedRows(layer, segments, self._recurrence.width, trees)

    def __call__(self, layer: int, x: Tensor, segments: Sequence[Segment], residual: Tensor) -> Tensor:
        """The block on `x` [rows, hidden] in layer `layer`; keeps inputs and states in the caches.

        Its output is added to `residual` [rows, hidden]: to `x`, or to the result of attention beside it. Raises
        RuntimeError if sizes do not agree.
        """
        added = None if residual is x else residual.contiguous()
        x = x.contiguous()
        rows = self.continued(layer, segments, TreeStates())
        y = self._library.write(
            torch.empty_like(x),
            len(x) * self.row_floats,
            self._library.mixer,
            self.address,
            None if self.connection is None else self.connection.address,
            rows.address,
            len(rows.places),
            x.data_ptr(),
            x.nbytes,
            len(x),
            None if added is None else added.data_ptr(),
            0 if added is None else added.nbytes,
        )
        rows.keep()
        return y
