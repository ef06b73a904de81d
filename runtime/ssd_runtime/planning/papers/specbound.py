"""SpecBound drafts by early exit, bounded in depth and width."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from functools import partial

from ssd_artifacts.domain_config import ExitChoice
from ssd_runtime.drafting.early_exit import EarlyExit
from ssd_runtime.model.exit_heads import ExitHeads
from ssd_runtime.planning.plan import PLAIN, ConstantPlanner, Plan
from ssd_runtime.planning.routing import PromptRouter
from ssd_runtime.planning.settings import ExitSettings
from ssd_runtime.planning.strategy import MakePlanner, StrategyInputs
from ssd_runtime.sequence.prefill import Prefill
from ssd_runtime.sequence.session import Session

DEPTH = 10 / 32
"""Depth bound as a share of the layers (SpecBound §3.1)."""
WIDTH = 8
"""Longest draft (SpecBound §3.1)."""
THRESHOLD = 0.55
ANNEALING = 0.2
STOPS = 4
"""Number of exits up to the depth bound if none are fitted. The paper has one after every layer, but a pass through
the head of a large vocabulary costs as much as several layers of a small model."""


@dataclass(eq=False)
class BoundedExitPlanner(ConstantPlanner):
    """Plans the same early exits for a whole request: those tuned for the nearest domain, or else the paper's."""

    heads: ExitHeads
    num_layers: int
    settings: ExitSettings
    tuned: Mapping[str, ExitChoice]
    router: PromptRouter | None
    _plan: Plan = PLAIN

    def start(self, session: Session, prompt: Prefill) -> None:
        """Route the prompt, and make the request's one plan."""
        if self.router is not None:
            self.domain = self.router.route(prompt).domain
        self._plan = self._made(self.tuned.get(self.domain or ""))

    def _made(self, tuned: ExitChoice | None) -> Plan:
        """Make the plan: settings come first, then the tuned values, then the paper's."""
        settings = self.settings
        stops = self._stops(tuned)
        width = tuned.width if tuned else WIDTH
        threshold = tuned.threshold if tuned else THRESHOLD
        annealing = tuned.annealing if tuned else ANNEALING
        if settings.width >= 0:
            width = settings.width
        if settings.threshold >= 0:
            threshold = settings.threshold
        if settings.annealing >= 0:
            annealing = settings.annealing
        where = f"after layer {', '.join(map(str, stops))} of {self.num_layers}"
        return Plan(
            reason=f"up to {width} tokens, exits {where} at {threshold:g}",
            drafter=EarlyExit(heads=self.heads, stops=stops, threshold=threshold, annealing=annealing),
            draft_length=width,
        )

    def _stops(self, tuned: ExitChoice | None) -> tuple[int, ...]:
        """Layers after which a token may exit, ascending; the last is the depth bound."""
        if tuned is not None and self.settings.depth < 0:
            return tuple(tuned.stops)
        share = self.settings.depth if self.settings.depth >= 0 else DEPTH
        deepest = max(1, min(self.num_layers - 1, round(share * self.num_layers)))
        fitted = self.heads.fitted
        if not fitted:
            return _spread(deepest)
        # The bound is an exit itself, and the paper has a fitted head at every exit.
        bound = min(fitted, key=lambda layer: abs(layer - deepest))
        return tuple(layer for layer in fitted if layer <= bound)


def make_exit(inputs: StrategyInputs) -> MakePlanner:
    """Return a maker of SpecBound planners."""
    return partial(
        BoundedExitPlanner,
        heads=inputs.make_exit_heads(),
        num_layers=inputs.num_layers,
        settings=inputs.settings,
        tuned=inputs.exit_choices,
        router=inputs.make_router(),
    )


def _spread(deepest: int) -> tuple[int, ...]:
    """Up to `STOPS` layers, evenly spaced from the first to `deepest`."""
    return tuple(sorted({max(1, round(deepest * part / STOPS)) for part in range(1, STOPS + 1)}))
