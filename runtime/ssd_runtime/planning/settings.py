"""The parameters of strategies, which `--set` can change, with their papers' defaults."""

from __future__ import annotations

import math
from dataclasses import dataclass, field
from typing import Literal

POSITIVE = {"least": 1}
"""Metadata of parameters for which 0 makes no sense. Floats are shares and probabilities, up to 1, unless their
metadata says otherwise."""


@dataclass(frozen=True, slots=True)
class AutoSettings:
    """Parameters of `auto`."""

    light: int = 1
    """1 to draft on lighter copies of the weights where that is expected to pay, 0 to make and use none."""


@dataclass(frozen=True, slots=True)
class NearestSettings:
    """KNN-SSD's parameters at run time."""

    out_of_domain: Literal["nearest", "mix", "plain"] = field(default="nearest", metadata={"was": "strangers"})
    """Masks for a prompt out of every domain: the nearest domain's as in the paper, the mixture's, or none."""


@dataclass(frozen=True, slots=True)
class KnapsackSettings:
    """KnapSpec's parameters with its published defaults."""

    refresh: int = field(default=64, metadata=POSITIVE)
    """T: draft-verify cycles between searches; the paper uses 128 for models of 10B and more."""
    window: int = field(default=5, metadata=POSITIVE)
    """m: cycles whose tokens' hidden states a search looks at."""
    similarity: float = 0.5
    """tau: states less similar to the full model's are dropped."""
    budget: float = 0.5
    """Largest share of the latency that may be skipped."""
    states: int = 8
    """Most budgets that a search carries from one sub-layer to the next; 0 for all, as in the paper."""
    max_draft: int = field(default=10, metadata=POSITIVE)
    """D: longest draft."""
    confidence: float = 0.7
    """Drafting ends after a token less probable than this; 0 to draft the length with the most tokens/s instead."""
    share: float = 0.05
    """Largest share of the time between searches that one may take. A search looks at fewer of the window's tokens
    to stay within it, but at four or more. 1 for all tokens."""
    warm_start: int = 1
    """1 to use a bundle's masks until the first search; 0 to search as soon as there are states."""


@dataclass(frozen=True, slots=True)
class ClaspSettings:
    """CLaSp's parameters; the paper gives no default for `refresh` and `max_draft`."""

    skip: float = 0.5
    """Share of the layers to skip: 44 of 80 in the paper's best case, half of them on average."""
    refresh: int = field(default=32, metadata=POSITIVE)
    """Verifications between searches; the paper's speed falls beyond 128."""
    confidence: float = 0.7
    """Drafting ends after a token less probable than this."""
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
    """S: most candidates; 0 to keep the uniform mask."""
    bayes_interval: int = field(default=25, metadata=POSITIVE)
    """beta: candidates from one of the Gaussian process to the next; those between are random."""
    enough: float = 0.95
    """Matchness that ends the search."""
    idle: int = field(default=300, metadata=POSITIVE)
    """Candidates without a better one that end the search."""
    skip: float = 0.5
    """Share of the sub-layers to skip at first."""
    least_skip: float = 0.4
    """Least share to skip; the share steps down to it while acceptance stays low."""
    protect: int = 1
    """Layers at either end that are never skipped. The paper speaks of intermediate layers and its code spares one,
    while its eq. 2 counts all (0)."""
    acceptance: float = 0.7
    """Draft acceptance rate below which fewer sub-layers are skipped."""
    max_draft: int = field(default=25, metadata=POSITIVE)
    """N_D: longest draft."""
    confidence: float = 0.7
    """epsilon: drafting ends after a token less probable than this; 0 to draft to the end."""
    tree: int = 1
    """1 to verify further candidates beside tokens of low confidence, 0 for chains."""
    light: float = 0.0
    """Share of its sub-layers that a candidate runs on lighter copies of the weights; the paper has none."""
    seed: int = 0


@dataclass(frozen=True, slots=True)
class ExitSettings:
    """SpecBound's parameters. Those that are not set (-1) are what the bundle has tuned, else the published ones."""

    depth: float = -1.0
    """Deepest exit, as a share of the layers: 10 of 32 in the paper."""
    width: int = -1
    """Most drafted tokens: 8 in the paper."""
    threshold: float = -1.0
    """Annealed confidence at which a token exits: 0.55 in the paper."""
    annealing: float = field(default=-1.0, metadata={"most": math.inf})
    """alpha: growth of the softmax's temperature toward shallow layers: 0.2 in the paper."""


@dataclass(frozen=True, slots=True)
class LookupSettings:
    """Prompt lookup's parameters."""

    max_draft: int = field(default=24, metadata=POSITIVE)
    """Longest draft."""
    recycle: int = 1
    """1 to guess by the target's earlier candidates too, as a tree (token recycling); 0 for copies alone."""


@dataclass(frozen=True, slots=True)
class LightSettings:
    """Parameters of drafts on lighter copies of the weights."""

    max_draft: int = field(default=5, metadata=POSITIVE)
    """Longest draft."""
    confidence: float = 0.0
    """Drafting ends after a token less probable than this; 0 to draft to the end."""


@dataclass(frozen=True, slots=True)
class DelSettings:
    """DEL's parameters as KnapSpec describes it; the confidence is KnapSpec's own and the intervals are ours."""

    every: int = field(default=4, metadata=POSITIVE)
    """Layers between possible exits, unless a bundle has fitted some."""
    refresh: int = field(default=16, metadata=POSITIVE)
    """Cycles between evaluations of every exit's predictions."""
    max_draft: int = field(default=10, metadata=POSITIVE)
    """Longest draft."""
    memory: float = 0.9
    """Share of an exit's statistics that remains after a new evaluation."""
    confidence: float = 0.7
    """A token less probable than this is not drafted, and the verification begins; 0 to draft to the end."""
