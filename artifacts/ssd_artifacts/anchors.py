"""Representative feature vectors of each domain, for routing by nearest anchor."""

from __future__ import annotations

import json
from collections.abc import Collection
from dataclasses import dataclass
from typing import Annotated, Any, Literal

import numpy as np
from numpy.typing import DTypeLike, NDArray
from pydantic import BaseModel, Field
from safetensors.numpy import save

from ssd_artifacts.tensors import ANY, damaged, is_tensor, opened

TENSORS = ("features", "center", "labels", "others", "other_labels")
LARGEST = float(np.finfo(np.float16).max)
"""Largest absolute value of a feature: the range of `others`. Cosines of larger values would overflow."""


@dataclass(frozen=True, slots=True)
class AnchorSet:
    """Anchors in the feature space of the model's final-norm states.

    `features` [anchors, d] are raw, not centred; `center` [d] is subtracted before cosines are taken. `labels`
    [anchors] index `domains`. A prompt whose best cosine is below `threshold` is out of domain.

    `others` [prompts, d] with `other_labels` [prompts] are prompts that did not become anchors. The threshold is
    computed from them again when a domain joins the bundle.
    """

    feature: str
    """Routing feature: the `mean` over the prompt's tokens, or the `last` token."""
    domains: tuple[str, ...]
    features: NDArray[np.float32]
    center: NDArray[np.float32]
    labels: NDArray[np.int64]
    threshold: float
    others: NDArray[np.float16]
    other_labels: NDArray[np.int64]

    def directions(self, features: NDArray[Any]) -> NDArray[np.float32]:
        """Features [n, d] after centring, each of length 1: their inner products are the cosines."""
        centred = np.ascontiguousarray(features - self.center, np.float32)
        directions: NDArray[np.float32] = centred / np.linalg.norm(centred, axis=1, keepdims=True).clip(1e-12)
        return directions

    def to_bytes(self) -> bytes:
        """Serialise the set as a safetensors file."""
        about = {"feature": self.feature, "domains": list(self.domains), "threshold": float(self.threshold)}
        # A single metadata entry, because safetensors writes several in an order that changes from run to run.
        metadata = {"anchors": json.dumps(about)}
        return save({name: np.ascontiguousarray(getattr(self, name)) for name in TENSORS}, metadata)

    @classmethod
    def from_file(cls, path: str, known: Collection[str]) -> AnchorSet:
        """Read what `to_bytes` wrote. Raises UserError when the file is damaged or names a domain that is not
        `known`."""
        with opened(path, "anchors") as file:
            about = _AnchorMetadata.model_validate_json((file.metadata() or {})["anchors"], strict=True)
            tensors = {name: file.get_tensor(name) for name in TENSORS}
        anchors = cls(feature=about.feature, domains=about.domains, threshold=about.threshold, **tensors)
        anchors._check(path, known)
        return anchors

    def _check(self, path: str, known: Collection[str]) -> None:
        if len(set(self.domains)) < len(self.domains) or not set(self.domains) <= set(known):
            raise damaged(
                path, "anchors", f"domains: expected those of the manifest, {list(known)}, got {self.domains}"
            )
        width = self.center.size
        sound = (
            width > 0
            and is_tensor(self.center, np.float32, width)
            and bool(np.all(np.abs(self.center) <= LARGEST))
            and self._are_rows(self.features, np.float32, self.labels, width)
            and self._are_rows(self.others, np.float16, self.other_labels, width)
            and len(self.features) > 0
            and set(self.labels.tolist()) == set(range(len(self.domains)))
        )
        if not sound:
            expected = f"float vectors of width {width} below {LARGEST:g}, and labels of each domain"
            raise damaged(path, "anchors", f"expected {expected}")

    def _are_rows(self, rows: NDArray[Any], dtype: DTypeLike, labels: NDArray[np.int64], width: int) -> bool:
        return (
            is_tensor(rows, dtype, ANY, width)
            and is_tensor(labels, np.int64, len(rows))
            and bool(np.all((labels >= 0) & (labels < len(self.domains))))
            and bool(np.all(np.abs(rows) <= LARGEST))
        )


class _AnchorMetadata(BaseModel):
    """Schema of the metadata entry `anchors`."""

    feature: Literal["mean", "last"]
    domains: tuple[str, ...]
    threshold: Annotated[float, Field(allow_inf_nan=False)]
