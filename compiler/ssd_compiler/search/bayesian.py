"""Bayesian optimisation of masks around the best known one."""

from __future__ import annotations

import random
from collections.abc import Sequence

import numpy as np
from bayes_opt import BayesianOptimization
from bayes_opt.acquisition import ExpectedImprovement
from bayes_opt.target_space import TargetSpace
from numpy.typing import NDArray
from sklearn.gaussian_process import GaussianProcessRegressor

from ssd_compiler.search.evaluate import Evaluator, Rated
from ssd_profiles.mask import SkipMask

DIMENSIONS = 16
PATIENCE = 24
"""Suggestions without an improvement after which the search ends."""


class VertexImprovement(ExpectedImprovement):
    """Expected improvement, maximised over random points only.

    Variables are rounded to 0 or 1, so refining a point by gradients takes seconds and mostly rounds to the same mask.
    """

    def suggest(
        self,
        gp: GaussianProcessRegressor,
        target_space: TargetSpace,
        n_random: int = 2000,
        n_smart: int = 0,
        fit_gp: bool = True,
        random_state: int | np.random.RandomState | None = None,
    ) -> NDArray[np.float64]:
        """Suggest the point with the best acquisition value among `n_random`."""
        return np.asarray(super().suggest(gp, target_space, n_random, n_smart, fit_gp, random_state))


def optimise(evaluator: Evaluator, seed: int, origin: str = "bayesian") -> list[Rated]:
    """Search over the sub-layers on which good masks disagree, keeping the rest as in the best mask.

    A Gaussian process over 2L thresholded variables (Self-SD, KNN-SSD) has far more dimensions than evaluations. Here
    the masks rated so far vote, and only the `DIMENSIONS` least decided sub-layers become variables in [0, 1], skipped
    from 0.5. The search ends with the evaluator's bounds, or after `PATIENCE` suggestions without an improvement.
    """
    undecided = undecided_sublayers(list(evaluator.rated.values()))[:DIMENSIONS]
    if not undecided:
        return []
    names = {str(index): index for index in undecided}
    process = BayesianOptimization(
        f=None,
        pbounds=dict.fromkeys(names, (0.0, 1.0)),
        acquisition_function=VertexImprovement(xi=0.0, random_state=seed),
        random_state=seed,
        verbose=0,
    )
    incumbent = evaluator.best()
    picker = random.Random(seed)
    tried = set[frozenset[int]]()
    base = set(incumbent.mask) - set(undecided)

    def register(rated: Rated) -> None:
        """Tell the process the speed-up of a mask in the subspace, at the rounded point that was measured."""
        chosen = frozenset(rated.mask) & frozenset(undecided)
        if chosen not in tried:
            tried.add(chosen)
            process.register({name: float(i in chosen) for name, i in names.items()}, rated.speedup)

    for rated in evaluator.rated.values():
        if set(rated.mask) - set(undecided) == base:
            register(rated)
    found = list[Rated]()
    vain = 0
    while not evaluator.exhausted and vain < PATIENCE:
        point = process.suggest()
        skipped = {i for name, i in names.items() if point[name] >= 0.5}
        # Rounding maps many suggestions to one mask, so a known mask is replaced by a neighbour.
        for _ in range(len(undecided)):
            if frozenset(skipped) in tried:
                skipped ^= {picker.choice(undecided)}
        rated = evaluator.rate(SkipMask.of(incumbent.mask.num_layers, base | skipped), origin)
        register(rated)
        found.append(rated)
        incumbent, vain = (rated, 0) if rated.speedup > incumbent.speedup else (incumbent, vain + 1)
    return found


def undecided_sublayers(rated: Sequence[Rated]) -> list[int]:
    """Sub-layers on which the better half of the masks disagree, most undecided first."""
    better = sorted(rated, key=lambda item: -item.speedup)[: max(2, len(rated) // 2)]
    votes = np.mean([item.mask.bits for item in better], axis=0)
    order = np.argsort(np.abs(votes - 0.5), kind="stable")
    return [int(i) for i in order if 0.0 < votes[i] < 1.0]
