"""KnapSpec's search: which sub-layers to skip for each latency budget, by dynamic programming on hidden states."""

from __future__ import annotations

import math
from dataclasses import dataclass

import torch
from torch import Tensor

from ssd_profiles.latency import LatencyTable
from ssd_profiles.mask import SkipMask
from ssd_runtime.model.decoder import Decoder
from ssd_runtime.model.rotary import repeated
from ssd_runtime.search.replay import ReferenceStates, RowGroup, predictions


@dataclass(frozen=True, slots=True)
class Weights:
    """What skipping costs or saves, in whole numbers: of each of the 2L sub-layers, or of each of the L layers."""

    items: tuple[int, ...]

    @classmethod
    def of(cls, latency: LatencyTable, context: float) -> Weights:
        """Sub-layers' rounded latencies, in units of the fastest one's (KnapSpec §3.4)."""
        seconds = latency.sublayer_seconds(context, 1)
        unit = min(seconds)
        return cls(tuple(max(1, round(each / unit)) for each in seconds))


@dataclass(frozen=True, slots=True)
class Candidate:
    """The best mask found for one budget of skipped weight."""

    mask: SkipMask
    skipped_weight: int
    cosine: float
    """Mean cosine between its states and the full model's behind the final norm."""
    token_agreement: float
    """Share of rows whose next token it predicts as the full model does (KnapSpec eq. 9)."""


@torch.inference_mode()
def search_knapsack(
    decoder: Decoder,
    reference: ReferenceStates,
    weights: Weights,
    threshold: float = 0.5,
    budget: float = 0.5,
    exactly: int | None = None,
) -> list[Candidate]:
    """A candidate for every reachable skipped weight up to `budget` of the whole (KnapSpec Algorithm 1).

    With `exactly`, one candidate that skips that weight (CLaSp Algorithm 1, where every layer weighs 1).

    g[i, j] is the best state behind item i with weight j skipped: executing i keeps j, skipping it adds i's
    weight, and of two ways to the same j the one closer in cosine to the full model's X(i) stays. States whose
    cosine falls below `threshold` are dropped. All j of a sub-layer run as one batch. Unlike the printed Algorithm 2,
    which backtracks by comparing states and stops at j = 0, choices are kept as back-pointers.
    """
    most = math.floor(budget * sum(weights.items)) if exactly is None else exactly
    least, rest = exactly or 0, sum(weights.items)
    width = 2 * decoder.shape.num_layers // len(weights.items)
    level = _Level([0], reference.states[0][None])
    choices: list[dict[int, bool]] = []
    for item, weight in enumerate(weights.items):
        rest -= weight
        indices = range(item * width, (item + 1) * width)
        target = reference.states[indices[-1] + 1]
        stay = level.between(least - rest, most)
        move = level.between(least - rest - weight, most - weight)
        executed = _execute(decoder, reference, indices, stay)
        level, choice = _better(executed, _Level([j + weight for j in move.weights], move.x), target, threshold)
        choices.append(choice)
    return _candidates(decoder, reference, weights, choices, level)


@dataclass(frozen=True, slots=True)
class _Level:
    """g[i, ·]: the states `x` [budgets, rows, hidden] behind one item, with the weights skipped so far, ascending."""

    weights: list[int]
    x: Tensor

    def between(self, least: int, most: int) -> _Level:
        kept = [place for place, weight in enumerate(self.weights) if least <= weight <= most]
        if len(kept) == len(self.weights):
            return self
        return _Level([self.weights[place] for place in kept], self.x[kept])


def _better(executed: _Level, skipped: _Level, target: Tensor, threshold: float) -> tuple[_Level, dict[int, bool]]:
    """For each weight the state closer to the target, and whether it is the one that skipped."""
    both = torch.cat([executed.x, skipped.x])
    cosines: list[float] = torch.cosine_similarity(both.float(), target.float(), -1).mean(-1).tolist()
    ways: dict[int, tuple[float, int]] = {}
    for place, weight in enumerate(executed.weights + skipped.weights):
        if weight not in ways or cosines[place] > ways[weight][0]:
            ways[weight] = cosines[place], place
    kept = {weight: place for weight, (cosine, place) in sorted(ways.items()) if weight == 0 or cosine > threshold}
    choice = {weight: place >= len(executed.weights) for weight, place in kept.items()}
    return _Level(list(kept), both[list(kept.values())]), choice


def _execute(decoder: Decoder, reference: ReferenceStates, indices: range, level: _Level) -> _Level:
    """Run the sub-layers on every state, all budgets in one batch; where nothing is skipped, it is known already."""
    known = level.weights[:1] == [0]
    x = level.x[1:] if known else level.x
    if x.shape[0]:
        for index in indices:
            layer, is_mlp = divmod(index, 2)
            if is_mlp:
                x = decoder.mlp(layer, x.flatten(0, 1)).to(x.device).view_as(x)
            else:
                with decoder.lock:
                    x = torch.cat([branch_attention(decoder, layer, x[:, g.rows], g) for g in reference.groups], 1)
    return _Level(level.weights, torch.cat([reference.states[indices[-1] + 1][None], x]) if known else x)


def branch_attention(decoder: Decoder, layer: int, x: Tensor, group: RowGroup) -> Tensor:
    """The attention block on `x` [branches, rows, hidden], variants of a group's rows that do not see each other.

    A row sees the full model's keys before its own position, and its own key. Nothing is written to the cache.
    """
    shape, parts = decoder.shape, decoder.layers[layer]
    window = decoder.batches.kinds[parts.kind].window
    branches, n, _ = x.shape
    view = decoder.view(layer, decoder.batches.consecutive(group.cache, group.start, n))
    flat = x.flatten(0, 1).to(parts.device)
    queries, new = decoder.project(layer, flat, repeated(view.rotation, branches))
    # [kv_heads, groups, branches * n, head_dim]; keys and values have one head a group, broadcast over it.
    queries = queries.transpose(0, 1).reshape(shape.kv_heads, shape.groups, branches * n, shape.head_dim)
    keys, values = (own.transpose(0, 1)[:, None] for own in new.chunk(2, 1))
    last = group.start + n - 1
    known_keys, known_values = (known[0] for known in group.cache.read(layer, view.begin, last))
    scores = decoder.scores(layer, queries.flatten(1, 2) @ known_keys.transpose(1, 2))
    scores = scores.view(shape.kv_heads, shape.groups * branches, n, -1)
    if n > 1:
        row = torch.arange(group.start, last + 1, device=parts.device)[:, None]
        key = torch.arange(view.begin, last, device=parts.device)
        hidden = key >= row if window is None else (key >= row) | (key <= row - window)
        scores = scores.masked_fill(hidden, float("-inf"))
    scores = scores.view(shape.kv_heads, shape.groups, branches * n, -1)
    own_scores = decoder.scores(layer, (queries * keys).sum(-1, keepdim=True))
    weights = torch.softmax(torch.cat([scores, own_scores], -1), -1, dtype=torch.float32).to(x.dtype)
    mixed = weights[..., :-1].flatten(1, 2) @ known_values
    mixed = mixed.view_as(queries) + weights[..., -1:] * values
    merged = mixed.view(shape.heads, branches * n, shape.head_dim).transpose(0, 1).reshape(branches * n, -1)
    return parts.add_attention(flat, merged).to(x.device).view_as(x)


def _candidates(
    decoder: Decoder, reference: ReferenceStates, weights: Weights, choices: list[dict[int, bool]], level: _Level
) -> list[Candidate]:
    """The masks that led to the last level, all their states through the head together."""
    count = len(level.weights)
    matches, _ = predictions(decoder, level.x.flatten(0, 1), reference.targets.repeat(count))
    agreements: list[float] = matches.float().view(count, -1).mean(-1).tolist()
    final, target = decoder.norm(level.x), decoder.norm(reference.states[-1])
    cosines: list[float] = torch.cosine_similarity(final.float(), target.float(), -1).mean(-1).tolist()
    return [
        Candidate(_mask(decoder.shape.num_layers, weights, choices, weight), weight, cosine, agreement)
        for weight, cosine, agreement in zip(level.weights, cosines, agreements, strict=True)
    ]


def _mask(num_layers: int, weights: Weights, choices: list[dict[int, bool]], left: int) -> SkipMask:
    """Follow the choices back from the last item."""
    skipped, width = list[int](), 2 * num_layers // len(choices)
    for item in range(len(choices) - 1, -1, -1):
        if choices[item][left]:
            skipped += range(item * width, (item + 1) * width)
            left -= weights.items[item]
    return SkipMask.of(num_layers, skipped)
