"""The strategy `light` drafts with the whole model on lighter copies of its weights."""

from __future__ import annotations

from ssd_profiles.errors import UserError
from ssd_runtime.drafting.masked import Masked
from ssd_runtime.planning.plan import ConstantPlanner, Plan
from ssd_runtime.planning.settings import LightSettings
from ssd_runtime.planning.strategy import MakePlanner, StrategyInputs

LIGHT = "light drafts"
"""The reason of plans that draft so."""
NO_COPIES = (
    "there is no lighter copy of this model's weights; it takes dense weights on a CPU, --draft-bits other than none "
    "and room within --weight-memory"
)


def make_light(inputs: StrategyInputs) -> MakePlanner:
    """Return a maker of planners that plan the same light draft in every cycle.

    Raises UserError if the model has no lighter copies.
    """
    settings: LightSettings = inputs.settings
    decoder = inputs.decoder
    if not decoder.light.kernels:
        raise UserError(f"--strategy light: {NO_COPIES}")
    plan = Plan(
        reason=f"{LIGHT}, up to {settings.max_draft} tokens ({decoder.light.kernels})",
        drafter=Masked(decoder.light.mask, settings.confidence),
        draft_length=settings.max_draft,
    )
    return lambda: ConstantPlanner(plan)
