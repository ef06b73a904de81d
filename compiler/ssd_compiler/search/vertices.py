"""Bayesian optimisation of variables that are rounded to 0 or 1."""

from __future__ import annotations

from functools import partialmethod

from bayes_opt import BayesianOptimization
from bayes_opt.acquisition import ExpectedImprovement


class _VertexImprovement(ExpectedImprovement):
    """Expected improvement, maximised over random points only.

    Variables are rounded to 0 or 1, so refining a point by gradients takes seconds and mostly rounds to the same mask.
    """

    suggest = partialmethod(ExpectedImprovement.suggest, n_random=2000, n_smart=0)


def optimiser(variables: int, xi: float, seed: int) -> BayesianOptimization:
    """An optimiser of variables named 0, 1, …; a larger `xi` explores more."""
    return BayesianOptimization(
        f=None,
        pbounds={str(place): (0.0, 1.0) for place in range(variables)},
        acquisition_function=_VertexImprovement(xi=xi, random_state=seed),
        random_state=seed,
        verbose=0,
    )
