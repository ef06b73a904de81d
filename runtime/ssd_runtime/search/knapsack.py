"""KnapSpec's search for the sub-layers to skip at each latency budget, by dynamic programming on hidden states."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from ssd_profiles.latency import LatencyTable
from ssd_profiles.mask import SkipMask
from ssd_runtime.model.batch import Variants
from ssd_runtime.model.decoder import Decoder
from ssd_runtime.model.runner import Forward, Head, ModelRunner, Work
from ssd_runtime.model.transfer import to_device
from ssd_runtime.search.replay import ReferenceStates

NEAR = 1e-3
"""Distance in cosine below which states count as equally close."""


@dataclass(frozen=True, slots=True)
class Weights:
    """Whole-number weights of the items that may be skipped."""

    items: tuple[int, ...]
    """One weight per item: per sub-layer (2L) or per layer (L)."""

    @classmethod
    def of(cls, latency: LatencyTable, context: float) -> Weights:
        """The sub-layers' latencies, rounded in units of the fastest one's (KnapSpec §3.4)."""
        seconds = latency.sublayer_seconds(context, 1)
        unit = min(seconds)
        return cls(tuple(max(1, round(each / unit)) for each in seconds))


@dataclass(frozen=True, slots=True)
class Candidate:
    """The best mask found for one budget of skipped weight."""

    mask: SkipMask
    skipped_weight: int
    cosine: float
    """Mean cosine between its states and the full model's after the final norm."""
    token_agreement: float
    """Share of rows whose next token it predicts like the full model (KnapSpec eq. 9)."""


def search_knapsack(
    decoder: Decoder,
    reference: ReferenceStates,
    weights: Weights,
    threshold: float = 0.5,
    budget: float = 0.5,
    exactly: int | None = None,
    most: int = 0,
) -> list[Candidate]:
    """Run `searching_knapsack` at once."""
    work = searching_knapsack(
        decoder=decoder,
        reference=reference,
        weights=weights,
        threshold=threshold,
        budget=budget,
        exactly=exactly,
        most=most,
    )
    return ModelRunner(decoder).finish(work)


def searching_knapsack(
    decoder: Decoder,
    reference: ReferenceStates,
    weights: Weights,
    threshold: float = 0.5,
    budget: float = 0.5,
    exactly: int | None = None,
    most: int = 0,
) -> Work[list[Candidate]]:
    """Find a candidate for every reachable skipped weight up to `budget` of the whole (KnapSpec Algorithm 1).

    With `exactly`, find one candidate that skips that weight (CLaSp Algorithm 1, where every layer weighs 1).

    g[i, j] is the best state after item i with weight j skipped. Executing i keeps j, and skipping it adds i's weight.
    Of two states with the same j, the one closer in cosine to the full model's X(i) stays. States whose cosine is at
    most `threshold` are dropped. All j of an item run as one forward. The printed Algorithm 2 backtracks by comparing
    states and stops at j = 0; here choices are kept as back-pointers.

    The paper keeps a state for every j, which a GPU runs in the time of one. With `most`, at most so many are kept
    after each item: those where skipping more begins to cost.
    """
    heaviest = math.floor(budget * sum(weights.items)) if exactly is None else exactly
    least = exactly or 0
    rest = sum(weights.items)
    width = 2 * decoder.shape.num_layers // len(weights.items)
    groups = [decoder.batches.variants(group.cache, group.start, len(group)) for group in reference.groups]
    level = _Level([0], reference.states[0][:, None])
    choices: list[dict[int, bool]] = []
    for item, weight in enumerate(weights.items):
        rest -= weight
        first = item * width
        last = first + width
        target = reference.states[last][:, None]
        skipping = level.between(least - rest - weight, heaviest - weight)
        skipped = _Level([j + weight for j in skipping.weights], skipping.x)
        executed = yield from _executing(
            groups=groups, level=level.between(least - rest, heaviest), full=target, first=first, last=last
        )
        level, choice = _better(executed=executed, skipped=skipped, target=target, threshold=threshold, most=most)
        choices.append(choice)
    return (yield from _rating(decoder=decoder, reference=reference, weights=weights, choices=choices, level=level))


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


def _better(
    executed: _Level, skipped: _Level, target: Tensor, threshold: float, most: int = 0
) -> tuple[_Level, dict[int, bool]]:
    """For each skipped weight, the state closer to the target, and whether it skips the latest item.

    With `most`, only so many of these.
    """
    both = torch.cat([executed.x, skipped.x], 1)
    cosines: list[float] = torch.cosine_similarity(both.float(), target.float(), -1).mean(0).tolist()
    ways: dict[int, tuple[float, int]] = {}
    for place, weight in enumerate(executed.weights + skipped.weights):
        if weight not in ways or cosines[place] > ways[weight][0]:
            ways[weight] = cosines[place], place
    kept = {weight: place for weight, (cosine, place) in sorted(ways.items()) if weight == 0 or cosine > threshold}
    if most and len(kept) > most:
        few = _thinned({weight: cosines[place] for weight, place in kept.items()}, most)
        kept = {weight: kept[weight] for weight in few}
    choice = {weight: place >= len(executed.weights) for weight, place in kept.items()}
    return _Level(list(kept), both[:, to_device(list(kept.values()), both.device)]), choice


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


def _executing(groups: Sequence[Variants], level: _Level, full: Tensor, first: int, last: int) -> Work[_Level]:
    """Run an item's sub-layers on every state, all budgets together; the state that skips nothing becomes `full`."""
    known = level.weights[:1] == [0]
    x = level.x[:, 1:] if known else level.x
    count = x.shape[1]
    if count:
        segments = [variants.times(count) for variants in groups]
        states = yield Forward(segments, x.flatten(0, 1), first=first, last=last)
        x = states.view_as(x)
    return _Level(level.weights, torch.cat([full, x], 1) if known else x)


def _rating(
    decoder: Decoder, reference: ReferenceStates, weights: Weights, choices: list[dict[int, bool]], level: _Level
) -> Work[list[Candidate]]:
    """Rate the masks of the last level, whose states run through the head together."""
    tokens, _ = yield Head(level.x.flatten(0, 1), best=True)
    matches = tokens.view(-1, len(level.weights)) == reference.targets[:, None]
    final = decoder.norm(level.x)
    target = decoder.norm(reference.states[-1])[:, None]
    cosine_rows = torch.cosine_similarity(final.float(), target.float(), -1)
    agreements, cosines = torch.stack([matches.float().mean(0), cosine_rows.mean(0)]).tolist()
    return [
        Candidate(
            mask=_mask(num_layers=decoder.shape.num_layers, weights=weights, choices=choices, skipped_weight=weight),
            skipped_weight=weight,
            cosine=cosine,
            token_agreement=agreement,
        )
        for weight, cosine, agreement in zip(level.weights, cosines, agreements, strict=True)
    ]


def _mask(num_layers: int, weights: Weights, choices: list[dict[int, bool]], skipped_weight: int) -> SkipMask:
    """Follow the choices back from the last item; returns the mask that skips `skipped_weight`."""
    skipped = list[int]()
    left = skipped_weight
    width = 2 * num_layers // len(choices)
    for item in range(len(choices) - 1, -1, -1):
        if choices[item][left]:
            skipped += range(item * width, (item + 1) * width)
            left -= weights.items[item]
    return SkipMask.of(num_layers, skipped)
