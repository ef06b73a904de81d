"""The parameters of strategies that have some, with their papers' defaults: what `--set` can change."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Literal

POSITIVE = {"least": 1}
"""Of parameters that 0 makes no sense for."""


@dataclass(frozen=True, slots=True)
class NearestSettings:
    """KNN-SSD's parameters at run time."""

    out_of_domain: Literal["nearest", "mix", "plain"] = field(default="nearest", metadata={"was": "strangers"})
    """Where a prompt goes that is like no domain: the nearest one's masks as in the paper, the mixture's, or none."""


@dataclass(frozen=True, slots=True)
class KnapsackSettings:
    """KnapSpec's parameters with its published defaults."""

    refresh: int = field(default=64, metadata=POSITIVE)
    """T: draft-verify cycles between searches; the paper has 128 for models of 10B and more."""
    window: int = field(default=5, metadata=POSITIVE)
    """m: cycles whose tokens' hidden states a search looks at."""
    similarity: float = 0.5
    """tau: states less similar to the full model's are dropped."""
    budget: float = 0.5
    """Largest share of the latency that may be skipped."""
    max_draft: int = field(default=10, metadata=POSITIVE)
    """D: longest draft."""
    confidence: float = 0.7
    """Drafting ends behind a token less probable than this; 0 for the length of most tokens a second instead."""
    share: float = 0.05
    """Most of the time until the next search that one may take; it looks at fewer of the window's tokens to keep to
    it, but at no fewer than four; 1 for all."""
    warm_start: int = 1
    """1 to take a bundle's masks for those of the first search; 0 to search as soon as there are states."""


@dataclass(frozen=True, slots=True)
class ClaspSettings:
    """CLaSp's parameters; the paper gives no default for `refresh` and `max_draft`."""

    skip: float = 0.5
    """Share of the layers to skip: 44 of 80 in the paper's best case, half of them on average."""
    refresh: int = field(default=32, metadata=POSITIVE)
    """Verifications between searches; the paper's speed falls beyond 128."""
    confidence: float = 0.7
    """Drafting ends behind a token less probable than this."""
    max_draft: int = field(default=10, metadata=POSITIVE)
    """K: longest draft."""
    sublayers: int = 0
    """1 to skip attention and MLP blocks one by one, 0 for whole layers as in the paper."""


@dataclass(frozen=True, slots=True)
class SwiftSettings:
    """SWIFT's parameters with its published defaults; `confidence`, its epsilon, is not published."""

    window: int = field(default=32, metadata=POSITIVE)
    """gamma: generated tokens on which candidates are compared."""
    steps: int = 1000
    """S: most candidates; 0 to stay with the uniform mask."""
    bayes_interval: int = field(default=25, metadata=POSITIVE)
    """beta: every so many candidates comes from the Gaussian process, the others are random."""
    enough: float = 0.95
    """Matchness that ends the search."""
    idle: int = field(default=300, metadata=POSITIVE)
    """Candidates without a better one that end the search."""
    skip: float = 0.5
    """Share of the sub-layers to skip at first."""
    least_skip: float = 0.4
    """Where the share ends that steps down while acceptance stays low."""
    protect: int = 1
    """Layers at either end that are never skipped: its paper speaks of intermediate layers and its code spares one,
    while its eq. 2 counts all (0)."""
    acceptance: float = 0.7
    """Draft acceptance rate below which fewer sub-layers are skipped."""
    max_draft: int = field(default=25, metadata=POSITIVE)
    """N_D: longest draft."""
    confidence: float = 0.7
    """epsilon: drafting ends behind a token less probable than this; 0 to draft to the end."""
    tree: int = 1
    """1 to verify further candidates beside unsure tokens, 0 for chains."""
    seed: int = 0


@dataclass(frozen=True, slots=True)
class ExitSettings:
    """SpecBound's parameters with its published defaults; -1 for what the bundle has tuned, else the default."""

    depth: float = -1.0
    """Deepest exit, as a share of the layers: 10 of 32 in the paper."""
    width: int = -1
    """Most drafted tokens: 8 in the paper."""
    threshold: float = -1.0
    """Annealed confidence at which a token leaves: 0.55 in the paper."""
    annealing: float = -1.0
    """alpha: how much hotter the softmax is in shallow layers: 0.2 in the paper."""


@dataclass(frozen=True, slots=True)
class LookupSettings:
    """Prompt lookup's parameters."""

    max_draft: int = field(default=24, metadata=POSITIVE)
    """Longest draft."""
    recycle: int = 1
    """1 to guess by the target's earlier candidates too, as a tree (token recycling); 0 for copies alone."""


@dataclass(frozen=True, slots=True)
class DelSettings:
    """DEL's parameters as KnapSpec describes it, the confidence being KnapSpec's own; the intervals are ours."""

    every: int = field(default=4, metadata=POSITIVE)
    """Layers between possible exits, where a bundle has not fitted some."""
    refresh: int = field(default=16, metadata=POSITIVE)
    """Cycles between looks at what each exit would have predicted."""
    max_draft: int = field(default=10, metadata=POSITIVE)
    """Longest draft."""
    memory: float = 0.9
    """What share of an exit's record a new look leaves."""
    confidence: float = 0.7
    """A token less probable than this is not drafted: verification goes on with it; 0 to draft to the end."""
