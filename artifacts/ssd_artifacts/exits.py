"""Fitted exit heads: affine maps from an inner layer's states to the last layer's."""

from __future__ import annotations

import json
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray
from pydantic import BaseModel
from safetensors.numpy import save

from ssd_artifacts.tensors import MAX_HEADER, damaged, is_tensor, opened


@dataclass(frozen=True, slots=True)
class ExitSet:
    """One affine map y = x W + b per exit layer, between states after the final norm.

    `layers` are numbers of layers run, counted from 1 and ascending; `weights` is [layers, d, d] and `biases` [layers,
    d].
    """

    layers: tuple[int, ...]
    weights: NDArray[np.float16]
    biases: NDArray[np.float16]

    def to_bytes(self) -> bytes:
        """Serialise the set as a safetensors file."""
        tensors = {"weights": np.ascontiguousarray(self.weights), "biases": np.ascontiguousarray(self.biases)}
        return save(tensors, {"exits": json.dumps({"layers": list(self.layers)})})

    @classmethod
    def from_file(cls, path: str, num_layers: int, width: int) -> ExitSet:
        """Read what `to_bytes` wrote.

        Raises UserError when the file is damaged or does not fit `num_layers` layers of a hidden size of `width`.
        """
        most = num_layers * width * (width + 1) * 2 + MAX_HEADER
        with opened(path, "exits", most) as file:
            about = _ExitMetadata.model_validate_json((file.metadata() or {})["exits"], strict=True)
            exits = cls(about.layers, file.get_tensor("weights"), file.get_tensor("biases"))
        exits._check(path, num_layers, width)
        return exits

    def _check(self, path: str, num_layers: int, width: int) -> None:
        count = len(self.layers)
        sound = (
            count > 0
            and all(1 <= layer < num_layers for layer in self.layers)
            and list(self.layers) == sorted(set(self.layers))
            and is_tensor(self.weights, np.float16, count, width, width)
            and is_tensor(self.biases, np.float16, count, width)
            and bool(np.all(np.isfinite(self.weights)) and np.all(np.isfinite(self.biases)))
        )
        if not sound:
            expected = f"float16 weights [{count}, {width}, {width}] and biases, layers ascending below {num_layers}"
            raise damaged(path, "exits", f"expected {expected}")


class _ExitMetadata(BaseModel):
    """Schema of the metadata entry `exits`."""

    layers: tuple[int, ...]
