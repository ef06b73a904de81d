"""The strategy `light` drafts with the whole model on light copies of its weights."""

from __future__ import annotations

from ssd_profiles.errors import UserError
from ssd_runtime.drafting.masked import Masked
from ssd_runtime.model.decoder import Decoder
from ssd_runtime.planning.plan import ConstantPlanner, Plan
from ssd_runtime.planning.settings import LightSettings
from ssd_runtime.planning.strategy import MakePlanner, StrategyInputs

LIGHT = "light drafts"
"""`Plan.reason` of light drafts."""


def require_copies(decoder: Decoder, option: str) -> None:
    """Raise UserError, which names the user's `option`, if the model has no light copies."""
    if not decoder.light.kernels:
        raise UserError(f"{option}: there is no light copy of this model's weights: {decoder.light.obstacle}")


def make_light(inputs: StrategyInputs) -> MakePlanner:
    """Return a maker of planners that plan the same light draft in every cycle.

    Raises UserError if the model has no light copies.
    """
    settings: LightSettings = inputs.settings
    decoder = inputs.decoder
    require_copies(decoder, "--strategy light")
    plan = Plan(
        reason=f"{LIGHT}, up to {settings.max_draft} tokens ({decoder.light.kernels})",
        drafter=Masked(decoder.light.mask, settings.confidence),
        draft_length=settings.max_draft,
    )
    return lambda: ConstantPlanner(plan)
