"""The settings of a compile."""

from __future__ import annotations

import hashlib
import json
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Literal, get_args

from ssd_artifacts.manifest import MANIFEST
from ssd_profiles.errors import UserError
from ssd_runtime.weights.draft_bits import DraftBits

DRAFT_BLOCK = 8
"""Tokens of a draft whose keys a replayed position sees."""
MIN_PROMPTS = 6
"""Least prompts of a domain: search, anchors and validation share them."""

SearchMethod = Literal["both", "knapsack", "bayesian", "self-sd"]
"""Ways to search masks: the dynamic programme and then Bayesian optimisation, one of them alone, or the papers' own
Bayesian optimisation over all sub-layers by the clock (Self-SD, KNN-SSD)."""
SEARCH_METHODS: tuple[SearchMethod, ...] = get_args(SearchMethod)
SELF_SD = "self-sd"
SELF_SD_SECONDS = 3600.0
"""Time for all searches by the clock together, unless a budget is given: a mask takes about a minute."""
SELF_SD_EVALUATIONS = 1000
"""Masks that Self-SD and KNN-SSD time in a search."""


@dataclass(frozen=True, slots=True)
class CompileSettings:
    """The options of `ssd-compile` that determine its result. Compiles with equal settings may share stages."""

    model: str
    domains: tuple[str, ...]
    domain_files: tuple[tuple[str, str], ...] = ()
    """Pairs (name, path) of the user's own domains."""
    clusters: int | None = None
    """Number of domains to find in the user's one file, 0 to choose it; None if the file is one domain."""
    base: str | None = None
    """Bundle that the new domains join and whose domains are kept as they are."""
    device: str | None = None
    dtype: str | None = None
    weights: str | None = None
    """packed or dense (`load_model`); None for the base bundle's, or dense."""
    weight_memory: int | None = None
    """Bytes for packed copies of weights; None for half of the free memory."""
    draft_bits: DraftBits = "auto"
    """Light copies of the weights that drafts may run on: `auto` for 8 bits with 4 beside them, or one of the two."""
    allow_special: bool = False
    """Whether control tokens that prompts spell take effect."""
    budget_seconds: float | None = None
    """Time for all searches together."""
    evaluations: int | None = None
    """Most masks evaluated per domain; None for 128 without a budget."""
    search: SearchMethod = "both"
    seed: int = 0
    search_prompts: int = 8
    anchor_prompts: int = 32
    """Prompts per domain that anchors are chosen from; KNN-SSD has 1000."""
    validation_prompts: int = 6
    anchors: int = 16
    """Anchors per domain (k). KNN-SSD has 10; this number and the feature routed best (docs/lab-notes.md)."""
    feature: str = "last"
    concurrency: tuple[int, ...] = (1,)
    """Numbers of sequences at once with which the chosen masks are timed, ascending; one alone always is."""
    max_new_tokens: int = 128
    """Longest continuation. Some domains define longer ones, which would only repeat what these show."""
    exits: int = 0
    """Number of layers with an exit head. The default is none, since each head stores hidden² numbers."""
    block: int = DRAFT_BLOCK
    """Draft length that the acceptance estimate assumes when it decides which keys a position sees."""

    @property
    def search_seconds(self) -> float:
        """Time for all searches together, infinite where evaluations alone bound them."""
        if self.budget_seconds is not None:
            return self.budget_seconds
        return SELF_SD_SECONDS if self.search == SELF_SD else float("inf")

    @property
    def most_evaluations(self) -> int:
        """Most masks evaluated per domain."""
        return self.evaluations or (128 if self.budget_seconds is None else 10_000)

    @property
    def new_domains(self) -> tuple[str, ...]:
        """Names of the packaged domains, then of the user's."""
        return self.domains + tuple(name for name, _ in self.domain_files)

    def key(self) -> str:
        """Hash of the settings, of the user's prompt files and of the base bundle.

        Raises UserError if one of these cannot be read.
        """
        paths = [path for _, path in self.domain_files] + ([f"{self.base}/{MANIFEST}"] if self.base else [])
        try:
            files = [hashlib.sha256(Path(path).read_bytes()).hexdigest() for path in paths]
        except OSError as error:
            raise UserError(f"{error.filename}: cannot be read ({error.strerror}); check the path") from None
        return hashlib.sha256(json.dumps([asdict(self), files], sort_keys=True).encode()).hexdigest()
