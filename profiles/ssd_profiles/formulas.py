"""The published formulas for what speculation brings, under the names that their papers use."""

from __future__ import annotations

import math


def expected_tokens(token_agreement: float, draft_length: int) -> float:
    """Tokens a draft-verify cycle yields, the bonus token included (KnapSpec eq. 1).

    Assumes that each draft token is right with probability `token_agreement` given that all before it were:
    (1 - a^(g+1)) / (1 - a), and its limit g + 1 at a = 1.
    """
    if token_agreement >= 1.0:
        return draft_length + 1.0
    return float((1.0 - token_agreement ** (draft_length + 1)) / (1.0 - token_agreement))


def tokens_per_time(token_agreement: float, draft_length: int, draft_seconds: float, verify_seconds: float) -> float:
    """TPT, the expected tokens a second of a (mask, draft length) (KnapSpec eq. 4).

    The paper charges one plain target forward for a verification; pass the measured time of one over
    `draft_length` + 1 tokens to get what will really happen.
    """
    return expected_tokens(token_agreement, draft_length) / (draft_length * draft_seconds + verify_seconds)


def expected_speedup(
    mean_acceptance_length: float, acceptance_rate: float, draft_cost: float, verify_cost: float = 1.0
) -> float:
    """E(Spd) = M a / ((M - 1) c + a v); with v = 1 SWIFT eq. 6 and KNN-SSD eq. 10.

    `acceptance_rate` a is accepted ÷ drafted tokens, `draft_cost` c the cost of a draft step ÷ a target forward
    of one token (the papers take 1 - r for a share r of skipped layers), `verify_cost` v that of a
    verification ÷ the same. Not a number when nothing was accepted: M and a do not tell the drafts then.
    """
    if acceptance_rate <= 0.0:
        return math.nan
    drafted = (mean_acceptance_length - 1.0) / acceptance_rate
    return mean_acceptance_length / (drafted * draft_cost + verify_cost)


def tokens_per_layer(token_agreement: float, draft_length: int, exit_layer: int, num_layers: int) -> float:
    """TPL, the expected tokens a layer that is run: exits behind `exit_layer` of L layers (DEL, KnapSpec eq. 2)."""
    return expected_tokens(token_agreement, draft_length) / (draft_length * exit_layer + num_layers)


def bounded_speedup(token_agreement: float, width: int, depth: int, num_layers: int) -> float:
    """SpecBound eq. 5: L a (1 - a^w) / ((1 - a)(w d + L - d)), and its limit at a = 1.

    A formula of the paper, not a predictor: it leaves out the bonus token and charges every draft the full depth.
    """
    accepted = expected_tokens(token_agreement, width) - 1.0
    return num_layers * accepted / (width * depth + num_layers - depth)


def annealed_temperature(layer: int, num_layers: int, annealing: float) -> float:
    """T of the softmax behind layer 1 ≤ `layer` ≤ L: 1 + a (1 - layer / L) (SpecBound eq. 1)."""
    return 1.0 + annealing * (1.0 - layer / num_layers)


def switch_probability(mix_ratio: float, domains: int, same: bool) -> float:
    """That the next prompt of a stream is of one particular domain: the last one's, or another (KNN-SSD eq. 8)."""
    return 1.0 - mix_ratio if same else mix_ratio / (domains - 1)


def sufficient_cosine(margin: float, norm: float, farthest: float) -> float:
    """A cosine of two final states of equal `norm` above which both choose the same token (KnapSpec Lemma 4.1).

    `margin` is the best logit less the second, `farthest` the largest distance of another token's head row from
    the best one's. Holds for cosines strictly above.
    """
    return 1.0 - margin**2 / (2.0 * norm**2 * farthest**2)
