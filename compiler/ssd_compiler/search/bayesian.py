"""Bayesian optimisation of masks around the best known one, over groups of sub-layers."""

from __future__ import annotations

import random
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import NamedTuple

import numpy as np
import torch

from ssd_compiler.search.evaluate import Evaluator, Rated
from ssd_compiler.search.vertices import optimiser
from ssd_profiles.mask import FULL, SubLayerPlan
from ssd_runtime.search.gaussian import coded

DIMENSIONS = 16
"""Variables of a round; half of them are spans of sub-layers."""
LONGEST = 6
"""Most sub-layers in a row that are skipped or kept together: three layers."""
VAIN_ROUNDS = 3
"""Rounds without an improvement after which the search ends."""
SEEDS = 2**32
"""Number of seeds that scikit-learn takes."""

Group = frozenset[int]
"""Sub-layers that one variable changes together; 2L is the head."""
Point = tuple[int, ...]
"""The variables' values: 1 changes a group."""
SKIPPED = None
"""The precision of groups that are skipped."""


class Variable(NamedTuple):
    """A group of sub-layers, and the precision that the variable gives to them."""

    group: Group
    precision: int | None = SKIPPED
    """Bits, or None to skip them."""


@dataclass(frozen=True, slots=True)
class Subspace:
    """The masks that differ from an incumbent in some groups of sub-layers, which are disjoint."""

    incumbent: SubLayerPlan
    variables: tuple[Variable, ...]
    usual: SubLayerPlan
    """The bits of sub-layers that no variable changes any more: the model's own, or those of its light copies."""

    @property
    def start(self) -> Point:
        """The incumbent's own point. A group that it has changed in part counts as unchanged."""
        return tuple(int(all(self._at(i) == each.precision for i in each.group)) for each in self.variables)

    def mask(self, point: Point) -> SubLayerPlan:
        """The mask of a point. A group that is changed back becomes usual as a whole, others stay as they are."""
        skipped = set(self.incumbent)
        bits = dict[int, int]()
        for (group, precision), before, now in zip(self.variables, self.start, point, strict=True):
            if not (now or before):
                continue
            skipped = skipped | group if now and precision is SKIPPED else skipped - group
            for index in group:
                bits[index] = (precision or FULL) if now else self.usual.bits_of(index)
        known = SubLayerPlan.of(self.incumbent.num_layers, skipped).lightened(dict(enumerate(self.incumbent.light)))
        return known.lightened(bits)

    def _at(self, index: int) -> int | None:
        """The incumbent's precision of a sub-layer or the head."""
        is_head = index == len(self.incumbent)
        return SKIPPED if not is_head and self.incumbent.skipped[index] else self.incumbent.bits_of(index)


def optimise(evaluator: Evaluator, seed: int) -> list[Rated]:
    """Search around the best mask, round by round, until the evaluator's bounds or `VAIN_ROUNDS` in vain.

    A Gaussian process over 2L thresholded variables (Self-SD, KNN-SSD) has far more dimensions than evaluations, and it
    cannot learn that two sub-layers matter only together. So each round has `DIMENSIONS` variables that are groups of
    neighbouring sub-layers; no mask need have skipped them before. A round tries every change alone, then all changes
    that gained together, then what the process suggests.
    """
    found = list[Rated]()
    tried = set[Variable]()
    vain = 0
    while vain < VAIN_ROUNDS and not evaluator.exhausted:
        before = evaluator.best().speedup
        space = Subspace(evaluator.best().mask, _variables(evaluator, tried), evaluator.usual)
        if not space.variables:
            break
        tried.update(space.variables)
        found += _round(evaluator, space, (seed + len(found)) % SEEDS)
        vain = 0 if evaluator.best().speedup > before else vain + 1
    return found


def _round(evaluator: Evaluator, space: Subspace, seed: int) -> Iterator[Rated]:
    """Optimise in a subspace until as many suggestions in a row as it has variables bring nothing."""
    picker = random.Random(seed)
    process = optimiser(len(space.variables), xi=0.0, seed=seed)
    known = dict[Point, float]()

    def rate(point: Point) -> Rated:
        rated = evaluator.rate(space.mask(point), "bayesian")
        if point not in known:
            known[point] = rated.speedup
            process.register({str(place): float(value) for place, value in enumerate(point)}, rated.speedup)
        return rated

    start = space.start
    least = rate(start).speedup
    gained = list[int]()
    for place in range(len(start)):
        if evaluator.exhausted:
            return
        alone = rate(_flipped(start, [place]))
        yield alone
        if alone.speedup > least:
            gained.append(place)
    vain = 0
    point = _flipped(start, gained)
    while not evaluator.exhausted and vain < len(start):
        # Rounding maps many suggestions to one point, so a known point is replaced by a neighbour.
        for _ in range(len(start)):
            if point in known:
                point = _flipped(point, [picker.randrange(len(start))])
        best = max(known.values())
        rated = rate(point)
        yield rated
        vain = 0 if rated.speedup > best else vain + 1
        suggested = process.suggest()
        point = tuple(int(suggested[str(place)] >= 0.5) for place in range(len(start)))


def _flipped(point: Point, places: Sequence[int]) -> Point:
    return tuple(value ^ (place in places) for place, value in enumerate(point))


def _variables(evaluator: Evaluator, tried: set[Variable]) -> tuple[Variable, ...]:
    """Variables that were none yet, of disjoint groups.

    They are the most skippable spans, then undecided sub-layers, then spans. Where there are light copies, variables
    skip their groups and change their precision in turn.
    """
    chosen = list[Variable]()
    taken = set[int]()
    undecided = [frozenset({index}) for index in undecided_sublayers(list(evaluator.rated.values()))]
    spans = skippable_spans(evaluator)
    head = frozenset({len(evaluator.usual)})
    for groups, most in ((spans, DIMENSIONS // 2), ([*undecided, head], DIMENSIONS), (spans, DIMENSIONS)):
        for group in groups:
            skipping = [] if group == head else [Variable(group)]
            ways = skipping + [Variable(group, bits) for bits in evaluator.precisions(group)]
            turn = len(chosen) % max(1, len(ways))
            variable = next((each for each in ways[turn:] + ways[:turn] if each not in tried), None)
            if len(chosen) < most and variable is not None and not group & taken:
                chosen.append(variable)
                taken |= group
    return tuple(chosen)


def skippable_spans(evaluator: Evaluator) -> list[Group]:
    """Spans of neighbouring sub-layers that the best mask does not skip as a whole, most skippable first.

    The measure is how far the full model's state moves across the span, by cosine, for the time that is saved. So two
    sub-layers that undo each other's work come first as one span, though either alone is last.
    """
    incumbent = set(evaluator.best().mask)
    states = evaluator.reference.states
    seconds = evaluator.latency.sublayer_seconds(evaluator.context, 1)
    found = list[tuple[float, Group]]()
    for first in range(len(seconds)):
        for last in range(first + 1, min(first + LONGEST, len(seconds)) + 1):
            group = frozenset(range(first, last))
            saved = sum(seconds[index] for index in group - incumbent)
            if saved > 0.0:
                moved = 1.0 - float(torch.cosine_similarity(states[first].float(), states[last].float(), -1).mean())
                found.append((moved / saved, group))
    return [group for _, group in sorted(found, key=lambda item: item[0])]


def undecided_sublayers(rated: Sequence[Rated]) -> list[int]:
    """Sub-layers on which the better half of the masks disagree, most undecided first."""
    better = sorted(rated, key=lambda item: -item.speedup)[: max(2, len(rated) // 2)]
    codes = coded([item.mask for item in better])
    votes = (codes == codes[0]).mean(0)
    order = np.argsort(np.abs(votes - 0.5), kind="stable")
    return [int(i) for i in order if votes[i] < 1.0]
