"""The strategy `mtp` drafts with the model's own layer that predicts the token after the next one."""

from __future__ import annotations

from ssd_profiles.errors import UserError
from ssd_profiles.latency import LatencyTable
from ssd_runtime.drafting.mtp import MtpChain
from ssd_runtime.planning.plan import ConstantPlanner, Plan
from ssd_runtime.planning.settings import MtpSettings
from ssd_runtime.planning.strategy import MakePlanner, StrategyInputs

MTP = "mtp drafts"
"""The reason of plans that draft so."""


def mtp_cost(latency: LatencyTable, context: int) -> float:
    """Cost of a step of the MTP layer and the head after `context` tokens, in plain steps.

    The projection that joins embedding and state is taken for a further attention block, which has about its weights.
    """
    blocks = 2 * latency.mixer_seconds(context, 1, "full") + latency.mlp_seconds(1)
    beside = latency.draft_head_seconds(1) + max(0.0, latency.overhead_seconds(1))
    return (blocks + beside) / latency.step_seconds(context)


def make_mtp(inputs: StrategyInputs) -> MakePlanner:
    """Return a maker of planners that plan the same draft in every cycle.

    Raises UserError if the model has no such layer.
    """
    settings: MtpSettings = inputs.settings
    if inputs.decoder.mtp is None:
        raise UserError("--strategy mtp: this model has no layer for multi-token prediction; use auto")
    plan = Plan(
        reason=f"{MTP}, up to {settings.max_draft} tokens",
        drafter=MtpChain(settings.confidence),
        draft_length=settings.max_draft,
    )
    return lambda: ConstantPlanner(plan)
