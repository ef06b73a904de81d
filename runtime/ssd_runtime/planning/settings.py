"""The parameters of strategies, which `--set` can change, with their papers' defaults."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Literal, get_args

from ssd_artifacts.domain_config import MAX_DRAFT
from ssd_runtime.planning.bounds import Bounded, number

MOST_CYCLES = 1_000_000
"""Most cycles between two searches; no answer is that long, so there is no second search."""
MOST_CANDIDATES = 10_000
"""Most candidates of a search, all of which are kept."""
MOST_SEED = (1 << 32) - 1
MOST_GUESSES = 24
"""Most guesses of a verification: growing more takes time, and less probable ones have never paid."""
OutOfDomain = Literal["nearest", "mix", "plain"]


@dataclass(frozen=True, slots=True)
class AutoSettings(Bounded):
    """Parameters of `auto`."""

    light: int = number(1, 0, 1)
    """1 to draft on light copies of the weights where that is expected to pay, 0 to make and use none."""
    head: int = number(1, 0, 1)
    """1 to draft by steps that score frequent tokens alone where that is expected to pay, 0 for never."""
    mtp: int = number(1, 0, 1)
    """1 to draft with the model's own layer for that where it has one and that is expected to pay, 0 for never."""


@dataclass(frozen=True, slots=True)
class NearestSettings(Bounded):
    """KNN-SSD's parameters at run time."""

    out_of_domain: OutOfDomain = field(default="nearest", metadata={"texts": get_args(OutOfDomain)})
    """Masks for a prompt out of every domain: the nearest domain's as in the paper, the mixture's, or none."""


@dataclass(frozen=True, slots=True)
class KnapsackSettings(Bounded):
    """KnapSpec's parameters with its published defaults."""

    refresh: int = number(64, 1, MOST_CYCLES)
    """T: draft-verify cycles between searches; the paper uses 128 for models of 10B and more."""
    window: int = number(5, 1, 16)
    """m: cycles whose tokens' hidden states a search looks at."""
    similarity: float = number(0.5, 0.0, 1.0)
    """tau: states less similar to the full model's are dropped."""
    budget: float = number(0.5, 0.0, 1.0)
    """Largest share of the latency that may be skipped."""
    states: int = number(8, 0, 64)
    """Most budgets that a search carries from one sub-layer to the next; 0 for all, as in the paper."""
    max_draft: int = number(10, 1, MAX_DRAFT)
    """D: longest draft."""
    confidence: float = number(0.7, 0.0, 1.0)
    """Drafting ends after a token less probable than this; 0 to draft the length with the most tokens/s instead."""
    share: float = number(0.05, 0.0, 1.0)
    """Largest share of the time between searches that one may take. A search looks at fewer of the window's tokens
    to stay within it, but at four or more. 1 for all tokens."""
    warm_start: int = number(1, 0, 1)
    """1 to use a bundle's masks until the first search; 0 to search as soon as there are states."""


@dataclass(frozen=True, slots=True)
class ClaspSettings(Bounded):
    """CLaSp's parameters; the paper gives no default for `refresh` and `max_draft`."""

    skip: float = number(0.5, 0.0, 1.0)
    """Share of the layers to skip: 44 of 80 in the paper's best case, half of them on average."""
    refresh: int = number(32, 1, MOST_CYCLES)
    """Verifications between searches; the paper's speed falls beyond 128."""
    confidence: float = number(0.7, 0.0, 1.0)
    """Drafting ends after a token less probable than this."""
    max_draft: int = number(10, 1, MAX_DRAFT)
    """K: longest draft."""
    sublayers: int = number(0, 0, 1)
    """1 to skip attention and MLP blocks one by one, 0 for whole layers as in the paper."""


@dataclass(frozen=True, slots=True)
class SwiftSettings(Bounded):
    """SWIFT's parameters with its published defaults; `confidence`, its epsilon, is not published."""

    window: int = number(32, 1, 128)
    """gamma: generated tokens on which candidates are compared."""
    steps: int = number(1000, 0, MOST_CANDIDATES)
    """S: most candidates; 0 to keep the uniform mask."""
    bayes_interval: int = number(25, 1, MOST_CANDIDATES)
    """beta: candidates from one of the Gaussian process to the next; those between are random."""
    enough: float = number(0.95, 0.0, 1.0)
    """Matchness that ends the search."""
    idle: int = number(300, 1, MOST_CANDIDATES)
    """Candidates without a better one that end the search."""
    skip: float = number(0.5, 0.0, 1.0)
    """Share of the sub-layers to skip at first."""
    least_skip: float = number(0.4, 0.0, 1.0)
    """Least share to skip; the share steps down to it while acceptance stays low."""
    protect: int = number(1, 0, 512)
    """Layers at either end that are never skipped. The paper speaks of intermediate layers and its code spares one,
    while its eq. 2 counts all (0)."""
    acceptance: float = number(0.7, 0.0, 1.0)
    """Draft acceptance rate below which fewer sub-layers are skipped."""
    max_draft: int = number(25, 1, MAX_DRAFT)
    """N_D: longest draft."""
    confidence: float = number(0.7, 0.0, 1.0)
    """epsilon: drafting ends after a token less probable than this; 0 to draft to the end."""
    tree: int = number(1, 0, 1)
    """1 to verify further candidates beside tokens of low confidence, 0 for chains."""
    light: float = number(0.0, 0.0, 1.0)
    """Share of its sub-layers that a candidate runs on light copies of the weights; the paper has none."""
    seed: int = number(0, 0, MOST_SEED)


@dataclass(frozen=True, slots=True)
class ExitSettings(Bounded):
    """SpecBound's parameters. Those that are not set (-1) are what the bundle has tuned, else the published ones."""

    depth: float = number(-1.0, 0.0, 1.0)
    """Deepest exit, as a share of the layers: 10 of 32 in the paper."""
    width: int = number(-1, 0, MAX_DRAFT)
    """Most drafted tokens: 8 in the paper."""
    threshold: float = number(-1.0, 0.0, 1.0)
    """Annealed confidence at which a token exits: 0.55 in the paper."""
    annealing: float = number(-1.0, 0.0, 100.0)
    """alpha: growth of the softmax's temperature toward shallow layers: 0.2 in the paper."""


@dataclass(frozen=True, slots=True)
class LookupSettings(Bounded):
    """Prompt lookup's parameters."""

    max_draft: int = number(MOST_GUESSES, 1, MOST_GUESSES)
    """Longest draft."""
    recycle: int = number(1, 0, 1)
    """1 to guess by the target's earlier candidates too, as a tree (token recycling); 0 for copies alone."""


@dataclass(frozen=True, slots=True)
class LightSettings(Bounded):
    """Parameters of drafts on light copies of the weights."""

    max_draft: int = number(5, 1, MAX_DRAFT)
    """Longest draft."""
    confidence: float = number(0.0, 0.0, 1.0)
    """Drafting ends after a token less probable than this; 0 to draft to the end."""


@dataclass(frozen=True, slots=True)
class MtpSettings(Bounded):
    """Parameters of drafts by a model's own layer for multi-token prediction."""

    max_draft: int = number(3, 1, MAX_DRAFT)
    """Longest draft."""
    confidence: float = number(0.0, 0.0, 1.0)
    """Drafting ends after a token less probable than this; 0 to draft to the end."""


@dataclass(frozen=True, slots=True)
class DelSettings(Bounded):
    """DEL's parameters as KnapSpec describes it; the confidence is KnapSpec's own and the intervals are ours."""

    every: int = number(4, 1, 512)
    """Layers between possible exits, unless a bundle has fitted some."""
    refresh: int = number(16, 1, MOST_CYCLES)
    """Cycles between evaluations of every exit's predictions."""
    max_draft: int = number(10, 1, MAX_DRAFT)
    """Longest draft."""
    memory: float = number(0.9, 0.0, 1.0)
    """Share of an exit's statistics that remains after a new evaluation."""
    confidence: float = number(0.7, 0.0, 1.0)
    """A token less probable than this is not drafted, and the verification begins; 0 to draft to the end."""
