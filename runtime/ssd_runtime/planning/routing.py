"""Routes a prompt to the domain of its nearest anchor by cosine (KNN-SSD eq. 4 and 5)."""

from __future__ import annotations

from dataclasses import dataclass

import faiss
from torch import Tensor

from ssd_artifacts.anchors import AnchorSet
from ssd_runtime.sequence.prefill import Prefill


@dataclass(frozen=True, slots=True)
class Route:
    """The domain that a prompt was routed to."""

    domain: str
    similarity: float
    """Cosine between the centred features of the prompt and of the nearest anchor."""
    known: bool
    """Whether the similarity reaches the out-of-domain threshold."""


class PromptRouter:
    """A cosine index of a bundle's anchors, built when the bundle is loaded."""

    def __init__(self, anchors: AnchorSet) -> None:
        self._anchors = anchors
        self._index = faiss.IndexFlatIP(anchors.features.shape[1])
        self._index.add(anchors.directions(anchors.features))

    def route(self, prompt: Prefill) -> Route:
        """The domain of a prompt, by the features of its prefill."""
        return self.nearest(prompt.feature(self._anchors.feature))

    def nearest(self, feature: Tensor) -> Route:
        """The domain of a feature vector [hidden]."""
        similarity, index = self._index.search(self._anchors.directions(feature.numpy()[None]), 1)
        domain = self._anchors.domains[int(self._anchors.labels[int(index[0, 0])])]
        cosine = float(similarity[0, 0])
        return Route(domain, cosine, cosine >= self._anchors.threshold)
