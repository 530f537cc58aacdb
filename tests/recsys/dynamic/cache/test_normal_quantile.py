"""The normal distribution's quantiles: right, and the same wherever a probability stands."""

from __future__ import annotations

from statistics import NormalDist

import numpy as np

from lightning_pipe.recsys.dynamic.cache.normal_quantile import normal_quantile


def test_quantiles_are_those_of_the_standard_library() -> None:
    ends = 10.0 ** -np.arange(1, 16)
    probabilities = np.concatenate([np.random.default_rng(0).random(3000), [0.5, 0.075, 0.925], ends, 1 - ends])
    expected = np.array([NormalDist().inv_cdf(one) for one in probabilities])
    np.testing.assert_allclose(normal_quantile(probabilities), expected, rtol=4e-15, atol=1e-15)


def test_a_quantile_does_not_depend_on_its_neighbours() -> None:
    probabilities = np.random.default_rng(1).random((37, 5))
    alone = [[normal_quantile(np.array([one]))[0] for one in row] for row in probabilities]
    assert (normal_quantile(probabilities) == np.array(alone)).all()
