"""Representative feature vectors of each domain, for routing by nearest anchor."""

from __future__ import annotations

import json
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray
from safetensors import SafetensorError, safe_open
from safetensors.numpy import save

from ssd_profiles.errors import UserError


@dataclass(frozen=True, slots=True)
class AnchorSet:
    """Anchors in the feature space of the model's final-norm states.

    `features` [anchors, d] are raw (not centred); `center` [d] is subtracted before cosines are taken;
    `labels` [anchors] index `domains`. A prompt whose best cosine is below `threshold` is out of domain.
    """

    feature: str
    """`mean` over the prompt's tokens or `last` token."""
    domains: tuple[str, ...]
    features: NDArray[np.float32]
    center: NDArray[np.float32]
    labels: NDArray[np.int64]
    threshold: float

    def to_bytes(self) -> bytes:
        """The set as a safetensors file."""
        about = {"feature": self.feature, "domains": list(self.domains), "threshold": float(self.threshold)}
        # One entry alone: safetensors writes several in an order that changes from run to run.
        metadata = {"anchors": json.dumps(about)}
        tensors = {"features": self.features, "center": self.center, "labels": self.labels}
        return save({name: np.ascontiguousarray(value) for name, value in tensors.items()}, metadata)

    @classmethod
    def from_file(cls, path: str) -> AnchorSet:
        """Inverse of `to_bytes`. Raises UserError when the file is damaged."""
        try:
            with safe_open(path, framework="numpy") as file:
                about = json.loads((file.metadata() or {})["anchors"])
                anchors = cls(
                    about["feature"],
                    tuple(about["domains"]),
                    file.get_tensor("features"),
                    file.get_tensor("center"),
                    file.get_tensor("labels"),
                    float(about["threshold"]),
                )
        except (OSError, SafetensorError, KeyError, TypeError, ValueError) as error:
            raise UserError(f"{path}: damaged anchors ({error}); compile the bundle again") from None
        anchors._check(path)
        return anchors

    def _check(self, path: str) -> None:
        count, width = self.features.shape if self.features.ndim == 2 else (0, 0)
        if not (
            self.feature in ("mean", "last")
            and count
            and self.center.shape == (width,)
            and self.labels.shape == (count,)
            and self.labels.min() >= 0
            and self.labels.max() < len(self.domains)
            and np.all(np.isfinite(self.features))
            and np.all(np.isfinite(self.center))
        ):
            raise UserError(f"{path}: damaged anchors (shapes or values); compile the bundle again")
