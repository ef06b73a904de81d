"""Representative feature vectors of each domain, for routing by nearest anchor."""

from __future__ import annotations

import json
import math
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray
from safetensors.numpy import save

from ssd_artifacts.tensors import damaged, opened

TENSORS = ("features", "center", "labels", "others", "other_labels")


@dataclass(frozen=True, slots=True)
class AnchorSet:
    """Anchors in the feature space of the model's final-norm states.

    `features` [anchors, d] are raw (not centred); `center` [d] is subtracted before cosines are taken;
    `labels` [anchors] index `domains`. A prompt whose best cosine is below `threshold` is out of domain. `others`
    [prompts, d] with `other_labels` are some prompts that are no anchors: where a domain joins the bundle, the
    threshold is set again from them.
    """

    feature: str
    """`mean` over the prompt's tokens or `last` token."""
    domains: tuple[str, ...]
    features: NDArray[np.float32]
    center: NDArray[np.float32]
    labels: NDArray[np.int64]
    threshold: float
    others: NDArray[np.float16]
    other_labels: NDArray[np.int64]

    def to_bytes(self) -> bytes:
        """The set as a safetensors file."""
        about = {"feature": self.feature, "domains": list(self.domains), "threshold": float(self.threshold)}
        # One entry alone: safetensors writes several in an order that changes from run to run.
        metadata = {"anchors": json.dumps(about)}
        return save({name: np.ascontiguousarray(getattr(self, name)) for name in TENSORS}, metadata)

    @classmethod
    def from_file(cls, path: str) -> AnchorSet:
        """Inverse of `to_bytes`. Raises UserError when the file is damaged."""
        with opened(path, "anchors") as file:
            about = json.loads((file.metadata() or {})["anchors"])
            anchors = cls(
                about["feature"],
                tuple(about["domains"]),
                file.get_tensor("features"),
                file.get_tensor("center"),
                file.get_tensor("labels"),
                float(about["threshold"]),
                file.get_tensor("others"),
                file.get_tensor("other_labels"),
            )
        anchors._check(path)
        return anchors

    def _check(self, path: str) -> None:
        width = self.center.shape[0] if self.center.ndim == 1 else 0
        sound = (
            self.feature in ("mean", "last")
            and bool(width)
            and len(self.features) > 0
            and self._rows(self.features, self.labels, width)
            and self._rows(self.others, self.other_labels, width)
            and np.all(np.isfinite(self.center))
            and math.isfinite(self.threshold)
        )
        if not sound:
            raise damaged(path, "anchors", "shapes or values")

    def _rows(self, rows: NDArray[Any], labels: NDArray[np.int64], width: int) -> bool:
        return (
            rows.ndim == 2
            and rows.shape == (len(labels), width)
            and labels.ndim == 1
            and bool(np.all((labels >= 0) & (labels < len(self.domains))))
            and bool(np.all(np.isfinite(rows)))
        )
