"""What a compile was asked to do."""

from __future__ import annotations

import hashlib
import json
from dataclasses import asdict, dataclass
from pathlib import Path


@dataclass(frozen=True, slots=True)
class CompileSettings:
    """The command's options that shape the result. Two compiles with equal settings may share stages."""

    model: str
    domains: tuple[str, ...]
    domain_files: tuple[tuple[str, str], ...] = ()
    """(name, path) of domains that the user brings."""
    device: str | None = None
    dtype: str | None = None
    budget_seconds: float | None = None
    """Bound on all searches together; None when `evaluations` bounds them."""
    evaluations: int = 96
    """Masks evaluated a domain."""
    seed: int = 0
    search_prompts: int = 8
    anchor_prompts: int = 32
    validation_prompts: int = 6
    anchors: int = 10
    """k: anchors a domain (KNN-SSD §5.1)."""
    feature: str = "mean"
    block: int = 8
    """Draft length that the acceptance estimate assumes when it decides which keys a position sees."""

    @property
    def all_domains(self) -> tuple[str, ...]:
        """Packaged domains, then the user's."""
        return self.domains + tuple(name for name, _ in self.domain_files)

    def key(self) -> str:
        """A hash of the settings and of the user's prompt files."""
        files = [hashlib.sha256(Path(path).read_bytes()).hexdigest() for _, path in self.domain_files]
        return hashlib.sha256(json.dumps([asdict(self), files], sort_keys=True).encode()).hexdigest()
