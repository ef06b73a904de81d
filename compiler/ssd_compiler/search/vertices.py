"""The acquisition function of searches whose variables are rounded to 0 or 1."""

from __future__ import annotations

import numpy as np
from bayes_opt.acquisition import ExpectedImprovement
from bayes_opt.target_space import TargetSpace
from numpy.typing import NDArray
from sklearn.gaussian_process import GaussianProcessRegressor


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
