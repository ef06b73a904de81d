"""What a compile was asked to do."""

from __future__ import annotations

import hashlib
import json
from dataclasses import asdict, dataclass
from pathlib import Path

from ssd_artifacts.bundle import MANIFEST

ANCHOR_RULES = ("central", "joint", "per_domain")
"""How a domain's anchors are chosen: the prompts nearest to its mean, those nearest to its centre of a K-means over all
domains (KNN-SSD §4.1), or those nearest to the centres of a K-means within it (§5.1)."""


@dataclass(frozen=True, slots=True)
class CompileSettings:
    """The command's options that shape the result. Two compiles with equal settings may share stages."""

    model: str
    domains: tuple[str, ...]
    domain_files: tuple[tuple[str, str], ...] = ()
    """(name, path) of domains that the user brings."""
    clusters: int | None = None
    """Domains to find in the one file that the user brings, 0 to choose their number; None to take it as one domain."""
    base: str | None = None
    """A bundle whose domains are kept as they are, and joined by these."""
    device: str | None = None
    dtype: str | None = None
    weight_memory: int | None = None
    """Bytes that packed copies of weights may take; None for half of what is free."""
    budget_seconds: float | None = None
    """Bound on all searches together; None when `evaluations` bounds them."""
    evaluations: int = 96
    """Masks evaluated a domain."""
    seed: int = 0
    search_prompts: int = 8
    anchor_prompts: int = 32
    validation_prompts: int = 6
    anchors: int = 16
    """k: anchors a domain. KNN-SSD has 10; this, the rule and the feature are what routed best (docs/results.md)."""
    anchor_rule: str = "central"
    """Of `ANCHOR_RULES`."""
    feature: str = "last"
    concurrency: tuple[int, ...] = (1,)
    """Numbers of sequences at once with which the chosen masks are timed, ascending; one alone always is."""
    max_new_tokens: int = 128
    """Longer continuations, which some domains have, are cut to this: they would only repeat what these show."""
    exits: int = 0
    """Layers that get an exit head; none by default, since each takes hidden² numbers in the bundle."""
    exit_epochs: int = 0
    """Passes of training behind the closed-form fit; SpecBound makes 20."""
    block: int = 8
    """Draft length that the acceptance estimate assumes when it decides which keys a position sees."""

    @property
    def new_domains(self) -> tuple[str, ...]:
        """Packaged domains, then the user's."""
        return self.domains + tuple(name for name, _ in self.domain_files)

    def key(self) -> str:
        """A hash of the settings, of the user's prompt files and of the base."""
        paths = [path for _, path in self.domain_files] + ([f"{self.base}/{MANIFEST}"] if self.base else [])
        files = [hashlib.sha256(Path(path).read_bytes()).hexdigest() for path in paths]
        return hashlib.sha256(json.dumps([asdict(self), files], sort_keys=True).encode()).hexdigest()
