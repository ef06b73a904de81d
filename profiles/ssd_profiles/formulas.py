"""The papers' formulas for the gain of speculation, under the names that they use."""

from __future__ import annotations

import math


def expected_tokens(token_agreement: float, draft_length: int) -> float:
    """Expected tokens per draft-verify cycle, the bonus token included (KnapSpec eq. 1).

    Each draft token is assumed right with probability a = `token_agreement`, given that all before it were. The result
    is (1 - a^(g+1)) / (1 - a), with the limit g + 1 at a = 1.
    """
    if token_agreement >= 1.0:
        return draft_length + 1.0
    return float((1.0 - token_agreement ** (draft_length + 1)) / (1.0 - token_agreement))


def tokens_per_time(token_agreement: float, draft_length: int, draft_seconds: float, verify_seconds: float) -> float:
    """TPT, the expected tokens per second of a mask and draft length (KnapSpec eq. 4).

    The paper charges one plain target forward per verification. Pass the measured time of `draft_length` + 1 rows
    instead for a realistic figure.
    """
    return expected_tokens(token_agreement, draft_length) / (draft_length * draft_seconds + verify_seconds)


def expected_speedup(
    mean_acceptance_length: float, acceptance_rate: float, draft_cost: float, verify_cost: float = 1.0
) -> float:
    """E(Spd) = M a / ((M - 1) c + a v); with v = 1 this is SWIFT eq. 6 and KNN-SSD eq. 10.

    M is `mean_acceptance_length` and a is `acceptance_rate`, accepted ÷ drafted tokens. `draft_cost` c and
    `verify_cost` v are a draft step and a verification ÷ a target forward of one token. The papers use c = 1 - r for a
    share r of skipped layers. Returns NaN when nothing was accepted or a cycle yields less than a token, because M and
    a then do not determine the number of drafts.
    """
    if acceptance_rate <= 0.0 or mean_acceptance_length < 1.0:
        return math.nan
    drafted = (mean_acceptance_length - 1.0) / acceptance_rate
    return mean_acceptance_length / (drafted * draft_cost + verify_cost)


def tokens_per_layer(token_agreement: float, draft_length: int, exit_layer: int, num_layers: int) -> float:
    """TPL, the expected tokens per executed layer when exiting after `exit_layer` of L layers (DEL, KnapSpec eq. 2)."""
    return expected_tokens(token_agreement, draft_length) / (draft_length * exit_layer + num_layers)


def annealed_temperature(layer: int, num_layers: int, annealing: float) -> float:
    """Softmax temperature after layer 1 ≤ `layer` ≤ L: 1 + a (1 - layer / L) (SpecBound eq. 1)."""
    return 1.0 + annealing * (1.0 - layer / num_layers)
