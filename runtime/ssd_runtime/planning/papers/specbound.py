"""SpecBound: drafts by early exit, bounded in depth and width."""

from __future__ import annotations

from collections.abc import Mapping

from ssd_artifacts.domain_config import ExitChoice
from ssd_runtime.drafting.early_exit import EarlyExit
from ssd_runtime.engine.session import Prefill, Session
from ssd_runtime.model.exit_heads import ExitHeads
from ssd_runtime.planning.plan import BasePlanner, Plan
from ssd_runtime.planning.routing import Router
from ssd_runtime.planning.settings import ExitSettings

DEPTH, WIDTH, THRESHOLD, ANNEALING = 10 / 32, 8, 0.55, 0.2
"""SpecBound §3.1, the depth as a share of its models' layers."""
STOPS = 4
"""Exits up to the depth bound where none are fitted: the paper has one behind every layer, but a look at a large
vocabulary costs as much as several layers of a small model."""


class BoundedExitPlanner(BasePlanner):
    """One way to exit for a whole request: the nearest domain's where the bundle has tuned one, else the paper's."""

    def __init__(
        self,
        heads: ExitHeads,
        num_layers: int,
        settings: ExitSettings,
        tuned: Mapping[str, ExitChoice],
        router: Router | None,
    ) -> None:
        self._heads, self._layers, self._settings = heads, num_layers, settings
        self._tuned, self._router = tuned, router
        self._plan: Plan | None = None

    def start(self, session: Session, prompt: Prefill) -> None:
        """Route the prompt."""
        if self._router is not None:
            self.domain = self._router.route(prompt).domain
        self._plan = self._made(self._tuned.get(self.domain or ""))

    def plan(self, context: int, pending: int) -> Plan:
        """The same every cycle."""
        assert self._plan is not None, "start() comes first"
        return self._plan

    def _made(self, tuned: ExitChoice | None) -> Plan:
        settings, stops = self._settings, self._stops(tuned)
        width, threshold, annealing = (
            (tuned.width, tuned.threshold, tuned.annealing) if tuned else (WIDTH, THRESHOLD, ANNEALING)
        )
        width = settings.width if settings.width >= 0 else width
        threshold = settings.threshold if settings.threshold >= 0 else threshold
        annealing = settings.annealing if settings.annealing >= 0 else annealing
        where = f"behind layer {', '.join(map(str, stops))} of {self._layers}"
        return Plan(
            f"up to {width} tokens, exits {where} at {threshold:g}",
            EarlyExit(self._heads, stops, threshold, annealing),
            width,
        )

    def _stops(self, tuned: ExitChoice | None) -> tuple[int, ...]:
        if tuned is not None and self._settings.depth < 0:
            return tuple(tuned.stops)
        share = self._settings.depth if self._settings.depth >= 0 else DEPTH
        deepest = max(1, min(self._layers - 1, round(share * self._layers)))
        fitted = self._heads.fitted
        if not fitted:
            return _spread(deepest)
        # The bound is an exit itself, and one by the model's own head would not be what its paper has there.
        bound = min(fitted, key=lambda layer: abs(layer - deepest))
        return tuple(layer for layer in fitted if layer <= bound)


def _spread(deepest: int) -> tuple[int, ...]:
    return tuple(sorted({max(1, round(deepest * part / STOPS)) for part in range(1, STOPS + 1)}))
