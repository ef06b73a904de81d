"""The tensors of a `.gguf` file, as parameters of a transformers model and as kernels for its projections."""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from dataclasses import replace
from functools import partial
from itertools import groupby
from typing import Any

import gguf
import numpy as np
import torch
from gguf import GGMLQuantizationType as Type
from torch import Tensor
from transformers import PreTrainedConfig

from ssd_profiles.errors import UserError
from ssd_runtime.weights.gguf.blocks import DENSE, UNREADABLE, dense
from ssd_runtime.weights.gguf.header import ADVICE, DTYPES, FOLDER_INSTEAD
from ssd_runtime.weights.gguf.index import GgufIndex, MappedTensors
from ssd_runtime.weights.gguf.kernels import form_of, is_kept, kernel_of
from ssd_runtime.weights.gguf.layout import RENAMED, SHARED, Layout, Order, joined_parts, parts_of, shape_of_parts
from ssd_runtime.weights.kernels.huge_pages import HugePages
from ssd_runtime.weights.kernels.kernel import Kernel, computes

EXPERT = re.compile(r"\.experts\.(\d+)\.")
"""The part of a parameter's name that says the expert; files hold all experts in one tensor."""
GATE, QKV, BOTH = ".attn_gate.", ".attn_qkv.", ".ssm_in."
"""Parts of the names of two tensors of a gated delta net that transformers may join, and of both as one."""
THIRDS = (".attn_q.", ".attn_k.", ".attn_v.")
"""Parts of the names of queries, keys and values, which may be one tensor of the name `QKV` in an attention block."""
GATE_UP, HALVES = "_gate_up_exps.", ("_gate_exps.", "_up_exps.")
"""Parts of the names of a tensor of all experts' gate and up, and of its two halves as tensors of their own."""
XIELU = ("alpha_p", "alpha_n", "beta", "eps")
"""The numbers of Apertus's activation, which files have by layer in their metadata."""
LARGEST = float(np.finfo(np.float32).max)
"""The largest number of a model."""
EMBEDDING, HEAD = "token_embd.weight", "output.weight"
"""Names of the embedding, and of the head where it is not the embedding."""
PREDICTING = {
    "mtp.fc": "eh_proj",
    "mtp.pre_fc_norm_embedding": "enorm",
    "mtp.pre_fc_norm_hidden": "hnorm",
    "mtp.norm": "shared_head_norm",
}
"""Names in files of the modules that an MTP layer has beside its decoder layer."""
TOLERANCE = 0.04
"""Largest relative difference of a kernel's product from the dequantised weight's, in root mean squares. Scales and
outputs are rounded to bf16, which reaches 1.5% in the demo model."""
PROBED = 64
"""Outputs of each projection that are compared with the dequantised weight at every load."""


class GgufFile:
    """The tensors of a `.gguf` file for a model of `config`, whose weights it holds in `layout`."""

    def __init__(self, index: GgufIndex, layout: Layout, config: PreTrainedConfig) -> None:
        self.path = index.path
        self.requantised = dict[str, str]()
        """Types of the tensors that are held with other levels than the file's, by their names there."""
        self._index = index
        self._order = Order(layout, config)
        self._alternate = layout.experts_alternate
        self._shared = ".mlp.shared_expert." if getattr(config, "num_local_experts", None) else ".mlp."
        self._mapped = MappedTensors(index)
        self._memory = HugePages()
        self._places = dict(index.tensors)
        self._parts = dict[str, tuple[str, slice]]()
        self._joined = dict[str, tuple[str, str]]()
        for name, place in index.tensors.items():
            if GATE_UP in name and len(place.shape) == 3 and place.shape[1] % 2 == 0:
                self._split(name, {name.replace(GATE_UP, half): place.shape[1] // 2 for half in HALVES})
            elif layout.gates_joined and GATE in name:
                self._join(name.replace(GATE, QKV), name)
        kind = next((key for key, name in gguf.MODEL_ARCH_NAMES.items() if name == index.architecture), None)
        if kind is None:
            raise UserError(
                f"{self.path}: the installed gguf library does not know {index.architecture}; upgrade it "
                "(pip install -U gguf)"
            )
        self._layers = config.num_hidden_layers
        self._numbers = dict[str, float]()
        for key in XIELU:
            self._take_numbers(key, index.metadata.get(f"xielu.{key}"))
        self._names = gguf.get_tensor_name_map(kind, self._layers + 1)  # that of an MTP layer, too

    @property
    def types(self) -> str:
        """The types of all quantised tensors, such as `Q4_1+Q8_0`."""
        found = {place.type for place in self._index.tensors.values()} - set(DENSE)
        return "+".join(sorted(kind.name for kind in found))

    def require(self, shapes: Mapping[str, Sequence[int]], used: Sequence[str]) -> None:
        """Raise UserError unless the file has each parameter of `shapes` in its shape, and no tensor but these.

        Biases that no layer has are zero. Tensors of the names `used` are read elsewhere. Dimensions of size 1 count
        for nothing: from then on tensors have the model's.
        """
        places = self._places
        for name in shapes:
            if ".act_fn." in name and name not in self._numbers:
                raise UserError(f"{self.path}: lacks the metadata xielu.{name.rpartition('.')[2]}; {ADVICE}")
        expected = {
            self._name_of(part): shape_of_parts(name, shape, self._alternate)
            for name, shape in shapes.items()
            if name not in self._numbers
            for part in parts_of(name)
        }
        for name in [name for name in expected if THIRDS[0] in name]:
            thirds = [name.replace(THIRDS[0], third) for third in THIRDS]
            if (joined := name.replace(THIRDS[0], QKV)) in places:
                self._split(joined, {third: expected[third][0] for third in thirds if third in expected})
        kinds = {_of_all_layers(name) for name in places}
        missing = [
            name
            for name in expected
            if name not in places and not (name.endswith(".bias") and _of_all_layers(name) not in kinds)
        ]
        if missing:
            raise UserError(f"{self.path}: lacks the tensor {missing[0]} ({len(missing)} in all); {ADVICE}")
        extra = [name for name in places if name not in expected and name not in used]
        if extra:
            raise UserError(
                f"{self.path}: tensor {extra[0]} ({len(extra)} in all) is no part of architecture "
                f"{self._index.architecture} as it is known here; {FOLDER_INSTEAD}"
            )
        for name, place in places.items():
            shape = expected.get(name, place.shape)
            if _without_ones(place.shape) != _without_ones(shape):
                raise UserError(f"{self.path}: tensor {name} is {list(place.shape)}, expected {list(shape)}; {ADVICE}")
            if place.type in UNREADABLE:
                raise UserError(
                    f"{self.path}: tensor {name} is of type {place.type.name}, which is not served; requantise it"
                )
            places[name] = replace(place, shape=tuple(shape))

    def names(self, parameters: Sequence[str]) -> set[str]:
        """The names of the file's tensors for some parameters."""
        return {self._name_of(part) for name in parameters for part in parts_of(name)}

    def has(self, name: str) -> bool:
        """Whether the file has a tensor for the parameter `name`."""
        return self._name_of(name) in self._places

    def stored(self, name: str) -> tuple[Any, Type]:
        """The blocks or numbers of a parameter, an array [out, …] in transformers' order, and their type."""
        found = self._name_of(name)
        data = self._array(found).reshape(self._places[found].array_shape)
        if expert := EXPERT.search(name):
            data = data[int(expert[1])]
        return self._order.rows(name, data), self._places[found].type

    def _array(self, name: str) -> Any:
        """A tensor as it is stored, or a part of one, or two as one."""
        if name in self._parts:
            whole, rows = self._parts[name]
            data = self._mapped.array(whole)
            return data[:, rows] if data.ndim == 3 else data[rows]
        if name not in self._joined:
            return self._mapped.array(name)
        parts = {each: self._mapped.array(each) for each in self._joined[name]}
        kinds = {each: self._index.tensors[each].type for each in parts}
        if len(set(kinds.values())) > 1:
            parts = {each: dense(data, kinds[each]).numpy() for each, data in parts.items()}
        return self._order.grouped(np.concatenate([*parts.values()]))

    def _take_numbers(self, key: str, numbers: object) -> None:
        """Let numbers of the metadata be those of all layers' activations."""
        if numbers is None:
            return
        listed = numbers if isinstance(numbers, list) else []
        if len(listed) != self._layers or not all(type(each) is float and abs(each) <= LARGEST for each in listed):
            raise UserError(f"{self.path}: xielu.{key} is not a number for each of {self._layers} layers; {ADVICE}")
        self._numbers |= {f"model.layers.{layer}.mlp.act_fn.{key}": each for layer, each in enumerate(listed)}

    def _split(self, name: str, parts: Mapping[str, int]) -> None:
        """Let a tensor [out] or [out, in], or one of experts [experts, out, in], be parts of some of its outputs.

        `parts` gives their numbers of outputs by their names. It stays whole if one of these is there, if they are not
        all of its own outputs, and if it has blocks that hold several of them.
        """
        place = self._places[name]
        axis = 1 if len(place.shape) == 3 else 0
        in_blocks = len(place.shape) == 1 and place.dtype not in DTYPES.values()
        if in_blocks or sum(parts.values()) != place.shape[axis] or not self._places.keys().isdisjoint(parts):
            return
        begin = 0
        for part, count in parts.items():
            shape = (*place.shape[:axis], count, *place.shape[axis + 1 :])
            self._places[part] = replace(place, shape=shape)
            self._parts[part] = (name, slice(begin, begin + count))
            begin += count
        del self._places[name]

    def _join(self, first: str, second: str) -> None:
        """Let two tensors be one, of numbers if their types differ; not if they do not fit or cannot be read."""
        one, other = self._places.get(first), self._places[second]
        if one is None or one.shape[1:] != other.shape[1:] or {one.type, other.type} & UNREADABLE:
            return
        name = first.replace(QKV, BOTH)
        kind = one.type if one.type == other.type else Type.F32
        self._places[name] = replace(one, shape=(one.shape[0] + other.shape[0], *one.shape[1:]), type=kind)
        self._joined[name] = (first, second)
        del self._places[first], self._places[second]

    def dense(self, name: str, shape: Sequence[int]) -> Tensor:
        """A parameter of this shape in fp32."""
        if parts_of(name) != [name]:
            of = shape_of_parts(name, shape, self._alternate)
            return joined_parts(name, [self.dense(part, of) for part in parts_of(name)], self._alternate)
        if name in self._numbers:
            return torch.full(tuple(shape), self._numbers[name])
        if not self.has(name):
            return torch.zeros(*shape)
        return self._order.values(name, dense(*self.stored(name)).view(*shape))

    def columns(self, module: str, count: int) -> Tensor | None:
        """The place in transformers' order of each of a kernel's `count` columns; None if it is their own."""
        return self._order.columns(f"{module}.weight", count)

    def kernels(self, modules: Sequence[str]) -> list[tuple[list[str], Kernel | None]]:
        """Kernels of projections that share an input, one per run of equal formats; None for dense weights."""
        runs = [(form, list(run)) for form, run in groupby(modules, key=partial(self._form, last=modules[-1]))]
        return [(run, self._kernel(form, run)) for form, run in runs]

    def forget(self) -> None:
        """Release the memory of what has been read."""
        self._mapped.forget()

    def _name_of(self, name: str) -> str:
        for own, usual in RENAMED.items():
            name = name.replace(own, usual)
        name = name.replace(SHARED, self._shared)
        name = name.replace("mtp.layers.0.", f"model.layers.{self._layers}.")
        module, _, part = EXPERT.sub(".experts.", name).rpartition(".")
        if module in PREDICTING:
            return f"blk.{self._layers}.nextn.{PREDICTING[module]}.{part}"
        if module == "lm_head":  # not every architecture's table of names has it
            return f"{(HEAD if HEAD in self._index.tensors else EMBEDDING).removesuffix('.weight')}.{part}"
        stem = self._names.get_name(module)
        if stem is None and ".experts." in module:
            parent, which = module.removesuffix("_proj").rsplit(".", 1)
            stem = str(self._names.get_name(f"{parent}.gate_up_proj")).replace("gate_up", which)
        return self._names.get_name(name) or f"{stem}.{part}"

    def _form(self, module: str, last: str) -> str:
        names = [self._name_of(part) for part in parts_of(f"{module}.weight")]
        places = [self._places[name] for name in names]
        is_last = module == last and len(names) == 1
        forms = {form_of(place.shape, place.type, is_last) or module for place in places}
        if len(forms) > 1:
            raise UserError(
                f"{self.path}: {' and '.join(names)} are of types that one kernel cannot serve; use --weights dense"
            )
        return forms.pop()  # a dense one is a run of its own

    def _kernel(self, form: str, modules: list[str]) -> Kernel | None:
        if form == modules[0]:
            return None
        bias = self._bias(modules)
        parts = [part for module in modules for part in parts_of(f"{module}.weight")]
        stored = [self.stored(part) for part in parts]
        try:
            kernel = kernel_of(stored, form, bias, self._memory)
        except ValueError as error:
            raise UserError(f"{self.path}: tensor {self._name_of(parts[0])} {error}; {ADVICE}") from None
        self.requantised |= {
            self._name_of(part): kind.name
            for part, (_, kind) in zip(parts, stored, strict=True)
            if not is_kept(kind, form)
        }
        self._check(kernel, parts, bias)
        return kernel

    def _check(self, kernel: Kernel, weights: Sequence[str], bias: Tensor | None) -> None:
        """Raise UserError unless the kernel's product is that of the dequantised weights, on rows of each."""
        begin = 0
        for name in weights:
            data, kind = self.stored(name)
            expert = EXPERT.search(name)
            if expert is not None and expert[1] != "0":  # the first one's has the same form
                return
            rows = min(len(data), PROBED)
            own = None if bias is None else bias[begin : begin + rows]
            if not computes(kernel, dense(data[:rows], kind), own, begin, TOLERANCE):
                raise UserError(
                    f"{self.path}: the {kernel.name} kernel computes {name.removesuffix('.weight')} wrongly on this "
                    "processor; use --weights dense"
                )
            begin += len(data)

    def _bias(self, modules: Sequence[str]) -> Tensor | None:
        if not any(self.has(f"{module}.bias") for module in modules):
            return None
        rows = [self._places[self._name_of(f"{module}.weight")].shape[-2:-1] for module in modules]
        return torch.cat([self.dense(f"{module}.bias", out) for module, out in zip(modules, rows, strict=True)])


def _without_ones(shape: Sequence[int]) -> tuple[int, ...]:
    """A shape without dimensions of size 1, which files drop from convolutions and add to numbers per head."""
    return tuple(size for size in shape if size != 1)


def _of_all_layers(name: str) -> str:
    return re.sub(r"^blk\.\d+\.", "blk.*.", name)
