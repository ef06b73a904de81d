"""Fitted exit heads: what carries an inner layer's state over to the last layer's."""

from __future__ import annotations

import json
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray
from pydantic import BaseModel
from safetensors.numpy import save

from ssd_artifacts.tensors import damaged, is_tensor, opened


@dataclass(frozen=True, slots=True)
class ExitSet:
    """One affine map for each of some layers, of states behind the final norm: y = x W + b.

    `layers` are numbers of layers gone through, from 1, ascending; `weights` [layers, d, d], `biases` [layers, d].
    """

    layers: tuple[int, ...]
    weights: NDArray[np.float16]
    biases: NDArray[np.float16]

    def to_bytes(self) -> bytes:
        """The set as a safetensors file."""
        tensors = {"weights": np.ascontiguousarray(self.weights), "biases": np.ascontiguousarray(self.biases)}
        return save(tensors, {"exits": json.dumps({"layers": list(self.layers)})})

    @classmethod
    def from_file(cls, path: str, num_layers: int) -> ExitSet:
        """Inverse of `to_bytes`. Raises UserError when the file is damaged or not for so many layers."""
        with opened(path, "exits") as file:
            about = _Metadata.model_validate_json((file.metadata() or {})["exits"])
            exits = cls(about.layers, file.get_tensor("weights"), file.get_tensor("biases"))
        exits._check(path, num_layers)
        return exits

    def _check(self, path: str, num_layers: int) -> None:
        count, width = len(self.layers), self.weights.shape[-1] if self.weights.ndim else 0
        sound = (
            all(1 <= layer < num_layers for layer in self.layers)
            and list(self.layers) == sorted(set(self.layers))
            and is_tensor(self.weights, np.float16, count, width, width)
            and is_tensor(self.biases, np.float16, count, width)
            and bool(np.all(np.isfinite(self.weights)) and np.all(np.isfinite(self.biases)))
        )
        if not sound:
            raise damaged(path, "exits", "layers, shapes, dtypes or values")


class _Metadata(BaseModel):
    """The metadata entry `exits`."""

    layers: tuple[int, ...]
