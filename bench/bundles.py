"""The bundles that measurements start from, and the commands that make them."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

from ssd_artifacts.bundle import EXITS, MANIFEST
from ssd_artifacts.files import sha256_file
from ssd_artifacts.reference_bundle import bundle_path


@dataclass(frozen=True, slots=True)
class MadeBundle:
    """A bundle and how it comes to be."""

    path: str
    model: str
    first: str
    """The domain that Self-SD (Fix) is searched on: the first of a stream."""
    make: str = ""
    """The command; empty for the bundle that comes with the repository."""

    @property
    def missing(self) -> str | None:
        """What to do, where it is not there or was made in another way."""
        path, exits = Path(self.path), "--exits" in self.make
        if not self.make or (path.is_dir() and (not exits or (path / EXITS).is_file())):
            return None
        return f"{self.path} is missing, or made in another way; make it with: {self.make}"

    def digest(self) -> str:
        """Its manifest's SHA-256, which stands for all of its files."""
        return sha256_file(bundle_path(Path(self.path)) / MANIFEST)

    @property
    def origin(self) -> str:
        """For readers of a page."""
        return f"`{self.make}`" if self.make else "it comes with the repository"


def _planted(epsilon: str, model: str, path: str) -> MadeBundle:
    plant = f"python -m bench.planted --epsilon {epsilon} --out {model}"
    search = f"ssd-compile --model {model} --domains cnn,gsm8k --evaluations 24 --exits 8 --out {path}"
    return MadeBundle(path, model, "cnn", f"{plant} && {search}")


REFERENCE = MadeBundle("demo", "demo", "cnn")
PLANTED05 = _planted("0.05", "build/planted", "build/bundle05")
PLANTED02 = _planted("0.02", "build/planted02", "build/bundle02")
DOMAINS = MadeBundle(
    "build/bundle-domains",
    "build/domain-planted",
    "gsm8k",
    "python -m bench.domain_planted --out build/domain-planted && ssd-compile --model build/domain-planted "
    "--domains gsm8k,humaneval --evaluations 24 --out build/bundle-domains",
)
