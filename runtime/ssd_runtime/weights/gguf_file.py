"""The tensors of a `.gguf` file, by the names and in the order of rows that transformers gives them."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import groupby
from pathlib import Path
from typing import Any

import gguf
import torch
from gguf import GGMLQuantizationType as Type
from gguf.quants import dequantize
from torch import Tensor
from transformers import PreTrainedConfig

from ssd_profiles.errors import UserError
from ssd_runtime.weights.gguf_blocks import DENSE, dense, levels4
from ssd_runtime.weights.gguf_index import GgufIndex, MappedTensors
from ssd_runtime.weights.gguf_kernels import kernel4, kernel8
from ssd_runtime.weights.kernels.kernel import Kernel
from ssd_runtime.weights.kernels.native import Native
from ssd_runtime.weights.light import serves4

ARCHITECTURES = ("llama", "qwen2", "qwen3", "gemma2", "gemma3")
"""GGUF architectures whose conventions are known here."""
PERMUTED = ("llama",)
"""Architectures whose files hold the rows of queries and keys in the order of another form of rotation."""
WITH_OFFSET = ("gemma2", "gemma3")
"""Architectures whose files hold norm weights plus one."""
TOLERANCE = 0.04
"""Largest relative difference of a kernel's product from the dequantised weight's, in root mean squares. Scales and
outputs are rounded to bf16, which reaches 1.5% in the demo model."""
FOUR, EIGHT = "4 bits", "8 bits"
PROBED = 64
"""Outputs of each projection that are compared with the dequantised weight at every load."""


class GgufFile:
    """The tensors of a `.gguf` file for a model of `config`.

    Raises UserError when the file is of an architecture that is not known here.
    """

    def __init__(self, path: Path, index: GgufIndex, config: PreTrainedConfig) -> None:
        if index.architecture not in ARCHITECTURES:
            raise UserError(
                f"{path}: packed weights serve files of {', '.join(ARCHITECTURES)}, this is {index.architecture}; "
                "use --weights dense"
            )
        self._architecture = index.architecture
        self._index = index
        self._mapped = MappedTensors(path, index)
        self.path = path
        self.requantised = dict[str, str]()
        """Types of the tensors that are held with other levels than the file's, by their names there."""
        self._config = config
        kind = next(key for key, name in gguf.MODEL_ARCH_NAMES.items() if name == self._architecture)
        self._names = gguf.get_tensor_name_map(kind, config.num_hidden_layers)

    @property
    def types(self) -> str:
        """The types of all quantised tensors, such as `Q4_1+Q8_0`."""
        found = {place.type for place in self._index.tensors.values()} - set(DENSE)
        return "+".join(sorted(kind.name for kind in found))

    def has(self, name: str) -> bool:
        """Whether the file has a tensor for the parameter `name`."""
        return self._name_of(name) in self._index.tensors

    def stored(self, name: str) -> tuple[Any, Type]:
        """The blocks or numbers of a parameter, an array [out, …] in transformers' order, and their type."""
        if not self.has(name):
            raise UserError(f"{self.path}: has no tensor for {name}; download it again, or use --weights dense")
        found = self._name_of(name)
        heads = {"q_proj": self._config.num_attention_heads, "k_proj": self._config.num_key_value_heads}
        module = name.split(".")[-2]
        data = self._mapped.array(found)
        if self._architecture in PERMUTED and module in heads:
            halves = data.reshape(heads[module], -1, 2, *data.shape[1:])
            data = halves.swapaxes(1, 2).reshape(data.shape)
        return data, self._index.tensors[found].type

    def dense(self, name: str) -> Tensor:
        """A parameter in fp32."""
        tensor = dense(*self.stored(name))
        return tensor - 1 if self._architecture in WITH_OFFSET and "norm" in name else tensor

    def kernels(self, modules: Sequence[str]) -> list[tuple[list[str], Kernel | None]]:
        """Kernels of projections that share an input, one per run of equal formats; None for dense weights."""
        runs = [(kind, list(run)) for kind, run in groupby(modules, key=self._format)]
        return [(run, self._kernel(kind, run)) for kind, run in runs]

    def forget(self) -> None:
        """Release the memory of what has been read."""
        self._mapped.forget()

    def _name_of(self, name: str) -> str:
        module, _, part = name.rpartition(".")
        found = f"{self._names.get_name(module)}.{part}"
        if module == "lm_head" and found not in self._index.tensors:  # tied to the embedding
            found = f"{self._names.get_name('model.embed_tokens')}.{part}"
        return found

    def _format(self, module: str) -> str:
        data, kind = self.stored(f"{module}.weight")
        if kind in DENSE:
            return module  # a run of its own
        first = levels4(data[:1], kind)
        return FOUR if first is not None and serves4(len(data), first.levels.shape[1]) else EIGHT

    def _kernel(self, kind: str, modules: list[str]) -> Kernel | None:
        if kind not in (FOUR, EIGHT):
            return None
        stored = [self.stored(f"{module}.weight") for module in modules]
        bias = self._bias(modules)
        if kind == FOUR:
            kernel = kernel4(stored, bias)
        else:
            kernel = kernel8(stored, bias)
            self.requantised |= {
                self._name_of(f"{module}.weight"): of.name
                for module, (_, of) in zip(modules, stored, strict=True)
                if not (of == Type.Q8_0 and isinstance(kernel, Native))
            }
        self._check(kernel, modules, bias)
        return kernel

    def _check(self, kernel: Kernel, modules: Sequence[str], bias: Tensor | None) -> None:
        """Raise UserError unless the kernel's product is that of the dequantised weight, on rows of each module."""
        begin = 0
        for module in modules:
            data, kind = self.stored(f"{module}.weight")
            rows = min(len(data), PROBED)
            weight = torch.from_numpy(dequantize(data[:rows], kind))
            probe = torch.linspace(-1, 1, weight.shape[1])[None].to(torch.bfloat16).float()
            expected = probe @ weight.T
            if bias is not None:
                expected += bias[begin : begin + rows]
            got = kernel(probe)[:, begin : begin + rows]
            if not (got - expected).norm() <= TOLERANCE * expected.norm():
                raise UserError(
                    f"{self.path}: the {kernel.name} kernel computes {module} wrongly on this processor; "
                    "use --weights dense"
                )
            begin += len(data)

    def _bias(self, modules: Sequence[str]) -> Tensor | None:
        if not any(self.has(f"{module}.bias") for module in modules):
            return None
        return torch.cat([self._bias_of(module) for module in modules])

    def _bias_of(self, module: str) -> Tensor:
        name = f"{module}.bias"
        return self.dense(name) if self.has(name) else torch.zeros(len(self.stored(f"{module}.weight")[0]))
