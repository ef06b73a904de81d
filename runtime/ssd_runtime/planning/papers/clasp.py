"""CLaSp searches for the layers to skip again and again, on the hidden states of the last accepted token."""

from __future__ import annotations

from ssd_runtime.model.runner import Work
from ssd_runtime.planning.papers.refreshed import RefreshedPlanner
from ssd_runtime.planning.plan import Plan
from ssd_runtime.planning.settings import ClaspSettings
from ssd_runtime.planning.strategy import MakePlanner, StrategyInputs
from ssd_runtime.search.knapsack import searching_knapsack
from ssd_runtime.search.weights import Weights
from ssd_runtime.sequence.session import Session


class ClaspPlanner(RefreshedPlanner):
    """Plans a plain step for its states, then the mask whose state is closest to the full model's (CLaSp eq. 2).

    The number of skipped layers is fixed. The paper's eq. 1 prints arg min, but its algorithm maximises.
    """

    def __init__(self, settings: ClaspSettings) -> None:
        super().__init__(1, settings.refresh, settings.max_draft)
        self._settings = settings

    def replanning(self, session: Session, context: int) -> Work[Plan]:
        """Search for the mask on the last accepted token."""
        settings = self._settings
        decoder = session.decoder
        items = decoder.shape.num_layers * (2 if settings.sublayers else 1)
        count = round(min(settings.skip, 1.0) * items)
        if not count:
            return Plan("plain: there is nothing to skip")
        reference = yield from self._recent.referencing(session, 1)
        weights = Weights((1,) * items)
        [found] = yield from searching_knapsack(decoder, reference, weights, threshold=-1.0, exactly=count)
        kind = "sub-layers" if settings.sublayers else "layers"
        reason = f"clasp skips {count} of {items} {kind}, cosine {found.cosine:.3f}"
        return Plan.masked(
            reason=reason,
            mask=found.mask,
            draft_length=settings.max_draft,
            threshold=settings.confidence,
            entry="clasp",
        )


def make_clasp(inputs: StrategyInputs) -> MakePlanner:
    """Return a maker of CLaSp planners."""
    return lambda: ClaspPlanner(inputs.settings)
