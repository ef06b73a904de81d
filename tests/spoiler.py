"""A stand-in for our own library that makes each call with each of its numbers spoilt."""

from __future__ import annotations

import ctypes
from collections.abc import Callable, Iterator
from typing import Any

from ssd_runtime.model.sublayers.native_attention import SegmentPlace, _Block
from ssd_runtime.model.sublayers.native_mixing import ContinuationPlace, _Mixing
from ssd_runtime.weights.kernels.kernel import _Connection, _Norm
from ssd_runtime.weights.kernels.native import _Weight
from ssd_runtime.weights.kernels.native_ending import _Ending
from ssd_runtime.weights.kernels.native_mlp import Activation, _Experts
from ssd_runtime.weights.kernels.native_recurrence import _Recurrence
from ssd_runtime.weights.native.library import Library

WRONG = (0, -1, 1, 2**28, 2**31 + 1, 2**62, 2**63 - 1, -(2**63))
"""Numbers that stand in for each number of a call, beside its neighbours."""
THREADS = (0, -1, -(2**31), 3)
FREE = ("slots", "own", "format", "routing", "function", "alternate", "norms_last")
"""Numbers that nothing else tells: they choose among slots that the pool has, formats of as many bytes, and forms."""
NAMES = {
    "linear": "weight norm x x_bytes n residual residual_bytes cap y memory floats threads",
    "mlp": "weight down activation connection x x_bytes n y memory floats threads",
    "end_layer": "ending inputs input_bytes x x_bytes n y memory floats threads",
    "experts": "experts connection x x_bytes n chosen weights choice_bytes y memory floats threads",
    "attention": "block connection segments count cos sin bytes width vectors x x_bytes n longest y memory floats "
    "threads",
    "mixer": "mixing connection continuations count x x_bytes n residual residual_bytes y memory floats threads",
    "recur": "recurrence window window_bytes state state_bytes next after x x_bytes n y memory floats threads",
}
OPTIONAL = (
    *("norm", "after", "connection", "residual", "bias", "cos", "sin", "q_norm", "k_norm", "v_norm", "sinks"),
    *("direct", "order", "factor", "factors", "gate", "shared", "router_norm"),
)
SIZE_OF = {
    "bias_bytes": "bias",
    "number": "chosen",
    "router_bytes": "router",
    "direct_bytes": "direct",
    "order_bytes": "order",
    "decay_bytes": "decay",
    "step_bytes": "step",
}
"""Numbers that are read only where the other one, an address, is given."""
FILL = 0x55


class Spoiler:
    """Stands in for a library: makes each call with each of its numbers spoilt, and then as it is.

    A call that is refused has written nothing. One that is not has the right result, unless the number is `FREE`.
    """

    def __init__(self, real: Library) -> None:
        self.real = real
        self.codes = list[int]()

    write = Library.write

    def refusal(self, code: int) -> RuntimeError:
        return self.real.refusal(code)

    def __getattr__(self, name: str) -> Callable[..., int]:
        return lambda *args: self.call(name, list(args))

    def call(self, function: str, args: list[Any]) -> int:
        names = NAMES[function].split()
        given = dict(zip(names, args, strict=True))
        run = getattr(self.real, function)
        areas = [(given["y"], 4 * given["n"] * _width(function, given))]
        if function == "recur":
            areas += [(given["next"], given["window_bytes"]), (given["after"], given["state_bytes"])]
        for place in _continuations(function, given):
            width = _mixing_of(given)[1] * place.rows
            found = (place.next, place.window_bytes), (place.after, place.state_bytes), (place.inputs, 4 * width)
            areas += [area for area in found if area[0] is not None]
        for segment in _segments(function, given):
            areas += [(segment.keys, segment.bytes), (segment.values, segment.bytes)]
        before = [ctypes.string_at(*area) for area in areas]
        results = len(areas) if function in ("recur", "mixer") else 1
        untouched = [bytes([FILL]) * size for _, size in areas[:results]] + before[results:]

        def trial(*changed: Any) -> tuple[int, list[bytes]]:
            for (address, _), content in zip(areas, untouched, strict=True):
                ctypes.memmove(address, content, len(content))
            return run(*changed), [ctypes.string_at(*area) for area in areas]

        def spoilt(name: str, *changed: Any) -> None:
            code, found = trial(*changed)
            assert found == (untouched if code else right) or (name in FREE and not code), name
            self.codes.append(code)

        _, right = trial(*args)
        for at, name in enumerate(names):
            for value in _spoilt(name, args[at]):
                spoilt(name, *args[:at], value, *args[at + 1 :])
        for structure in _structures(function, given):
            for name, kind in structure._fields_:
                kept = getattr(structure, name)
                if (told := SIZE_OF.get(name)) and not getattr(structure, told, True):
                    continue
                for value in _spoilt(name, kept) if kind is not ctypes.c_float else ():
                    setattr(structure, name, value)
                    spoilt(name, *args)
                setattr(structure, name, kept)
        return trial(*args)[0]


def _spoilt(name: str, right: Any) -> Iterator[Any]:
    if name == "threads":
        yield from (value for value in THREADS if value != right)
    elif name in ("scale", "cap", "own_threads") or (name in OPTIONAL) or right is None:
        return
    elif isinstance(right, int) and right > 2**40:  # an address
        yield None
    else:
        near = (right - 32, right - 16, right - 1, right + 1, right + 16, right + 32, right // 2, 2 * right)
        yield from (value for value in (*WRONG, *near) if value != right)


def _width(function: str, given: dict[str, Any]) -> int:
    if function == "attention":
        return int(given["x_bytes"] // 4 // given["n"])
    if function == "end_layer":
        return int(_Ending.from_address(given["ending"]).hidden)
    if function == "experts":
        return int(_weights_of(given["experts"])[0].in_features)
    if function == "recur":
        about = _Recurrence.from_address(given["recurrence"])
        return int(about.heads * about.value)
    if function == "mixer":
        return int(_Weight.from_address(_mixing_of(given)[0].output).out_features)
    weight = _Weight.from_address(given["weight" if function == "linear" else "down"])
    return int(weight.out_features)


def _weights_of(experts: int) -> list[_Weight]:
    """The weights of all experts, those of gate and up first."""
    about = _Experts.from_address(experts)
    lists = [(ctypes.c_void_p * about.number).from_address(each) for each in (about.gate_up, about.down)]
    return [_Weight.from_address(each) for every in lists for each in every]


def _mixing_of(given: dict[str, Any]) -> tuple[_Mixing, int]:
    """A call's mixer, and the numbers of a row's inputs."""
    mixing = _Mixing.from_address(given["mixing"])
    about = _Recurrence.from_address(mixing.recurrence)
    per_head = 0 if not about.key else 1 if about.direct else 2
    return mixing, 2 * about.groups * about.key + about.heads * (about.value + per_head)


def _continuations(function: str, given: dict[str, Any]) -> list[ContinuationPlace]:
    if function != "mixer":
        return []
    return list((ContinuationPlace * given["count"]).from_address(given["continuations"]))


def _segments(function: str, given: dict[str, Any]) -> list[SegmentPlace]:
    return list((SegmentPlace * given["count"]).from_address(given["segments"])) if function == "attention" else []


def _structures(function: str, given: dict[str, Any]) -> list[ctypes.Structure]:
    """All structures that a call's addresses lead to."""
    norms, weights, found = [given.get("norm")], [given.get("weight"), given.get("down")], list[ctypes.Structure]()
    if given.get("connection") is not None:
        connection = _Connection.from_address(given["connection"])
        norms += [connection.norm, connection.after]
        found.append(connection)
    if function == "recur":
        found.append(_Recurrence.from_address(given["recurrence"]))
    if function == "mixer":
        mixing, _ = _mixing_of(given)
        norms.append(mixing.norm)
        weights += [*(ctypes.c_void_p * mixing.projections).from_address(mixing.inputs), mixing.output]
        found += [mixing, _Recurrence.from_address(mixing.recurrence), *_continuations(function, given)]
    if function == "mlp":
        found.append(Activation.from_address(given["activation"]))
    if function == "end_layer":
        ending = _Ending.from_address(given["ending"])
        norms.append(ending.norm)
        weights += [ending.gate, ending.output]
        found += [ending, Activation.from_address(ending.activation)]
    if function == "attention":
        block = _Block.from_address(given["block"])
        norms += [block.q_norm, block.k_norm, block.v_norm]
        weights += [*(ctypes.c_void_p * block.projections).from_address(block.qkv), block.output]
        found += [block, *_segments(function, given)]
    if function == "experts":
        about = _Experts.from_address(given["experts"])
        found += [about, Activation.from_address(about.activation), *_weights_of(given["experts"])]
    found += [_Norm.from_address(each) for each in norms if each is not None]
    return found + [_Weight.from_address(each) for each in weights if each is not None]
