"""The measured speed of `auto` with a bundle ÷ without it, by domain."""

from __future__ import annotations

from pydantic import BaseModel, ValidationError

from ssd_artifacts.bundle import Bundle
from ssd_artifacts.domain_config import Count, Finite, Speedup


class Added(BaseModel):
    """The speed of `auto` with a bundle ÷ without it, on prompts of one domain that the search never saw."""

    prompts: Count
    speedup: Speedup
    interval: tuple[Finite, Finite]

    @property
    def text(self) -> str:
        """A sentence on the figures, and on what follows from them."""
        low, high = self.interval
        advice = "decode without it" if high < 1.0 else "that it adds anything is not certain"
        return (
            f"auto is {self.speedup:.2f} ({low:.2f}–{high:.2f}) times as fast with the bundle as without it, "
            f"on {self.prompts} prompts" + (f"; {advice}" if low <= 1.0 else "")
        )


class _Figures(BaseModel):
    domain: str
    added: Added | None = None


class _Report(BaseModel):
    domains: list[_Figures]


def added_by(bundle: Bundle | None) -> dict[str, Added]:
    """The figures of a bundle's report on what it adds to `auto`, by domain.

    Empty if there is no bundle, or if its report has no such figures.
    """
    if bundle is None:
        return {}
    try:
        domains = _Report.model_validate_json(bundle.report or "").domains
    except ValidationError:  # whoever made the bundle may have written anything
        return {}
    return {each.domain: each.added for each in domains if each.added is not None and each.domain in bundle.domains}
