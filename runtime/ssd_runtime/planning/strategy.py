"""The inputs that a strategy makes planners from: one planner per request."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from ssd_artifacts.bundle import Bundle
from ssd_artifacts.domain_config import DomainConfig, ExitChoice
from ssd_profiles.latency import LatencyTable
from ssd_profiles.mask import SubLayerPlan
from ssd_runtime.drafting.lookup import LookupStats
from ssd_runtime.drafting.successors import Successors
from ssd_runtime.model.decoder import Decoder
from ssd_runtime.model.exit_heads import ExitHeads
from ssd_runtime.planning.plan import Planner
from ssd_runtime.planning.routing import PromptRouter

MakePlanner = Callable[[], Planner]
"""Makes the planner of one request. Planners of `auto`, `lookup` and `swift` share the state of their stream."""


@dataclass(frozen=True, slots=True, kw_only=True)
class StrategyInputs:
    """The inputs that a strategy makes the planners of one stream from."""

    name: str
    """The strategy as the user calls it: `fixed:` is followed by a domain's name."""
    settings: Any
    """Parameters of the class that the registry names; None for a strategy without any."""
    decoder: Decoder
    bundle: Bundle | None
    latency: LatencyTable | None
    heads: ExitHeads | None = None
    """The bundle's exit heads on the decoder's device, for several streams to share; None to make them here."""
    guesses_alone: bool = False
    """Whether `latency` prices no drafts by the model, because this device is not measured yet."""

    @property
    def light(self) -> Sequence[SubLayerPlan]:
        """Drafts that run everything on light copies of the weights, if `latency` prices these; the nearest first."""
        return self.decoder.light.masks if self.latency is not None and self.latency.light else ()

    @property
    def num_layers(self) -> int:
        """Layers of the model."""
        return self.decoder.shape.num_layers

    @property
    def domains(self) -> Mapping[str, DomainConfig]:
        """The bundle's domains by name; empty without a bundle."""
        return self.bundle.domains if self.bundle is not None else {}

    @property
    def exit_choices(self) -> dict[str, ExitChoice]:
        """Tuned early exits by domain, for the domains that have them."""
        return {domain.name: domain.exit for domain in self.domains.values() if domain.exit is not None}

    @property
    def measured_latency(self) -> LatencyTable:
        """The latency table, for strategies that the registry says need one."""
        assert self.latency is not None, "the strategy declares no need of latencies"
        return self.latency

    def make_router(self) -> PromptRouter | None:
        """Build the index of the bundle's anchors; None without a bundle."""
        return PromptRouter(self.bundle.anchors) if self.bundle is not None else None

    def make_exit_heads(self) -> ExitHeads:
        """Return the shared exit heads, or make the bundle's on the decoder's device."""
        if self.heads is not None:
            return self.heads
        return ExitHeads(self.decoder, self.bundle.exits if self.bundle is not None else None)

    def make_lookup_stats(self) -> LookupStats:
        """Make a stream's lookup statistics, which start with the successors that the bundle holds."""
        known = self.bundle.successors if self.bundle is not None else None
        return LookupStats(Successors(known.rows() if known is not None else ()))
