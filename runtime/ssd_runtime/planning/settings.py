"""The parameters of strategies that have some, with their papers' defaults: what `--set` can change."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class KnapsackSettings:
    """KnapSpec's parameters with its published defaults."""

    refresh: int = 64
    """T: draft-verify cycles between searches."""
    window: int = 5
    """m: cycles whose tokens' hidden states a search looks at."""
    similarity: float = 0.5
    """tau: states less similar to the full model's are dropped."""
    budget: float = 0.5
    """Largest share of the latency that may be skipped."""
    max_draft: int = 10
    """D: longest draft."""
    confidence: float = 0.7
    """Drafting ends behind a token less probable than this; 0 for the length of most tokens a second instead."""
