"""Dynamic programming on hidden states: what to skip, and what to run light, at each latency budget (KnapSpec)."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import NamedTuple

import torch
from torch import Tensor

from ssd_profiles.mask import SubLayerPlan
from ssd_runtime.devices.transfer import to_device
from ssd_runtime.model.batch.batch import Variants
from ssd_runtime.model.decoder import Decoder
from ssd_runtime.model.runner import FinalNorm, Forward, Head, Work
from ssd_runtime.search.replay import ReferenceStates
from ssd_runtime.search.weights import Weights

NEAR = 1e-3
"""Distance in cosine below which states count as equally close."""


@dataclass(frozen=True, slots=True)
class Candidate:
    """The best mask found for one budget of skipped weight."""

    mask: SubLayerPlan
    skipped_weight: int
    """Weight that it saves, by skipping sub-layers or running them light."""
    cosine: float
    """Mean cosine between its states and the full model's after the final norm."""
    token_agreement: float
    """Share of rows whose next token it predicts like the full model (KnapSpec eq. 9)."""


def searching_knapsack(
    decoder: Decoder,
    reference: ReferenceStates,
    weights: Weights,
    threshold: float = 0.5,
    budget: float = 0.5,
    exactly: int | None = None,
    most: int = 0,
    piece: int | None = None,
) -> Work[list[Candidate]]:
    """Find a candidate for every reachable skipped weight up to `budget` of the whole (KnapSpec Algorithm 1).

    With `exactly`, find one candidate that skips that weight (CLaSp Algorithm 1, where every layer weighs 1).

    g[i, j] is the best state after item i with weight j skipped. Executing i keeps j, and skipping it adds i's weight.
    Where sub-layers may be light, it is a multiple-choice knapsack: executing i in fewer bits adds what that saves.
    Of states with the same j, the one closest in cosine to the full model's X(i) stays. States whose cosine is at
    most `threshold` are dropped. All j of an item in the same bits run as one forward. The printed Algorithm 2
    backtracks by comparing states and stops at j = 0; here choices are kept as back-pointers.

    The paper keeps a state for every j, which a GPU runs in the time of one. With `most`, at most so many are kept
    after each item: those where skipping more begins to cost. A request has at most `piece` rows, or those of one j.
    """
    programme = _Programme(
        decoder=decoder, reference=reference, weights=weights, threshold=threshold, most=most, piece=piece
    )
    heaviest = math.floor(budget * sum(weights.items)) if exactly is None else exactly
    level, choices = yield from programme.filled(exactly or 0, heaviest)
    return (yield from programme.rated(level, choices))


class _Choice(NamedTuple):
    """The choice of a state's latest item, its bits or None for skipping, and the weight that it saves."""

    bits: int | None
    saved: int


@dataclass(frozen=True, slots=True)
class _Level:
    """g[i, ·]: the states `x` [rows, budgets, hidden] after one item, with the weights skipped so far, ascending."""

    weights: list[int]
    x: Tensor

    def between(self, least: int, most: int) -> _Level:
        """The states with skipped weights from `least` to `most`."""
        kept = [place for place, weight in enumerate(self.weights) if least <= weight <= most]
        if len(kept) == len(self.weights):
            return self
        return _Level([self.weights[place] for place in kept], self.x[:, to_device(kept, self.x.device)])


@dataclass(frozen=True, slots=True, kw_only=True)
class _Programme:
    """One run of the dynamic programme."""

    decoder: Decoder
    reference: ReferenceStates
    weights: Weights
    threshold: float
    most: int
    piece: int | None

    def filled(self, least: int, heaviest: int) -> Work[tuple[_Level, list[dict[int, _Choice]]]]:
        """Run all items; returns the states after the last one, and after each item the choice of every state.

        States that cannot reach the weight `least`, or are beyond `heaviest`, are left out.
        """
        layers, items = self.decoder.shape.num_layers, self.weights.items
        rest = sum(items)
        per_item = 2 * layers // len(items)
        level = _Level([0], self.reference.states[0][:, None])
        batches = self.decoder.batches
        rows = [batches.variants(group.cache, group.start, len(group)) for group in self.reference.groups]
        choices: list[dict[int, _Choice]] = []
        for item, weight in enumerate(items):
            rest -= weight
            span = range(item * per_item, (item + 1) * per_item)
            target = self.reference.states[span.stop][:, None]
            ways = dict[_Choice, _Level]()
            for at, saved in self.weights.options(item):
                mask = SubLayerPlan.of(layers).lightened(at) if at else None
                kept = level.between(least - rest - saved, heaviest - saved)
                ways[_Choice(at, saved)] = yield from self._executed(kept, rows, full=target, span=span, mask=mask)
            skipping = level.between(least - rest - weight, heaviest - weight)
            if self.decoder.family.layer_scalar:  # a skipped MLP is not nothing
                mask = SubLayerPlan.of(layers, span)
                skipping = yield from self._executed(skipping, rows, full=target, span=span, mask=mask)
            ways[_Choice(None, weight)] = skipping
            level, choice = _best(ways, target=target, threshold=self.threshold, most=self.most)
            choices.append(choice)
        return level, choices

    def _executed(
        self, level: _Level, groups: Sequence[Variants], full: Tensor, span: range, mask: SubLayerPlan | None
    ) -> Work[_Level]:
        """Run the sub-layers `span` on every state, all budgets together, in full or in the bits of `mask`.

        In full, the state that skips nothing becomes `full`.
        """
        known = mask is None and level.weights[:1] == [0]
        x = level.x[:, 1:] if known else level.x
        rows, count, _ = x.shape
        if count:
            parts = list[Tensor]()
            for part in x.split(max(1, self.piece // rows) if self.piece else count, dim=1):
                segments = [variants.times(part.shape[1]) for variants in groups]
                states = yield Forward(segments, part.flatten(0, 1), mask=mask, first=span.start, last=span.stop)
                parts.append(states.view_as(part))
            x = torch.cat(parts, 1)
        return _Level(level.weights, torch.cat([full, x], 1) if known else x)

    def rated(self, level: _Level, choices: list[dict[int, _Choice]]) -> Work[list[Candidate]]:
        """Rate the masks of the last level, whose states run through the head at most `piece` at a time."""
        states = level.x.flatten(0, 1)
        parts = list[Tensor]()
        for part in states.split(self.piece or len(states)):
            best, _ = yield Head(part, best=True, bits=self.weights.head)
            parts.append(best)
        tokens = torch.cat(parts)
        matches = tokens.view(-1, len(level.weights)) == self.reference.targets[:, None]
        normed = yield FinalNorm(states)
        final = normed.unflatten(0, level.x.shape[:2])
        target = (yield FinalNorm(self.reference.states[-1]))[:, None]
        cosine_rows = torch.cosine_similarity(final.float(), target.float(), -1)
        agreements, cosines = torch.stack([matches.float().mean(0), cosine_rows.mean(0)]).tolist()
        return [
            Candidate(mask=self._mask(choices, weight), skipped_weight=weight, cosine=cosine, token_agreement=agreement)
            for weight, cosine, agreement in zip(level.weights, cosines, agreements, strict=True)
        ]

    def _mask(self, choices: list[dict[int, _Choice]], skipped_weight: int) -> SubLayerPlan:
        """Follow the choices back from the last item; returns the mask that skips `skipped_weight`."""
        layers = self.decoder.shape.num_layers
        skipped = list[int]()
        bits_of = {2 * layers: self.weights.head}
        left = skipped_weight
        per_item = 2 * layers // len(choices)
        for item in range(len(choices) - 1, -1, -1):
            bits, saved = choices[item][left]
            sublayers = range(item * per_item, (item + 1) * per_item)
            if bits is None:
                skipped += sublayers
            else:
                bits_of |= dict.fromkeys(sublayers, bits)
            left -= saved
        return SubLayerPlan.of(layers, skipped).lightened(bits_of)


def _best(
    ways: Mapping[_Choice, _Level], target: Tensor, threshold: float, most: int = 0
) -> tuple[_Level, dict[int, _Choice]]:
    """For each skipped weight, the state closest to the target, and the choice that it took for the latest item.

    With `most`, only so many of these. `ways` have the states after each choice, by the weight skipped before it.
    """
    x = torch.cat([level.x for level in ways.values()], 1)
    cosines: list[float] = torch.cosine_similarity(x.float(), target.float(), -1).mean(0).tolist()
    taken = [(weight + choice.saved, choice) for choice, level in ways.items() for weight in level.weights]
    best: dict[int, int] = {}
    for place, (weight, _) in enumerate(taken):
        if weight not in best or cosines[place] > cosines[best[weight]]:
            best[weight] = place
    kept = {weight: place for weight, place in sorted(best.items()) if weight == 0 or not cosines[place] <= threshold}
    if most and len(kept) > most:
        few = _thinned({weight: cosines[place] for weight, place in kept.items()}, most)
        kept = {weight: kept[weight] for weight in few}
    chosen = {weight: taken[place][1] for weight, place in kept.items()}
    return _Level(list(kept), x[:, to_device(list(kept.values()), x.device)]), chosen


def _thinned(cosines: dict[int, float], most: int) -> list[int]:
    """At most `most` of the skipped weights, ascending, 2 at least: the lightest, the heaviest, and the sharpest knees.

    A knee is a weight whose state is closer to the full model's than those of its neighbours let expect. The least
    one is dropped until few enough are left. `cosines` are by ascending weight. Closeness is minus the logarithm of the
    distance, because what is lost near 1 counts for more.
    """
    kept = list(cosines)
    closeness = {weight: -math.log(1.0 - min(cosine, 1.0) + NEAR) for weight, cosine in cosines.items()}

    def knee(place: int) -> float:
        before, weight, after = kept[place - 1 : place + 2]
        share = (weight - before) / (after - before)
        return closeness[weight] - (1.0 - share) * closeness[before] - share * closeness[after]

    while len(kept) > max(2, most):
        del kept[min(range(1, len(kept) - 1), key=knee)]
    return kept
