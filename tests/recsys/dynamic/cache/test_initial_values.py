"""A row's first values depend on seed, table and id, and on nothing else."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from torch import Tensor

from lightning_pipe.engine.common.errors import InputError, SetupError
from lightning_pipe.recsys.dynamic.cache.initial_values import Constant, Distribution, InitialValues, Normal, Uniform

DISTRIBUTIONS = [Uniform(-0.5, 0.25), Normal(1.0, 2.0)]
UNIFORM = [
    0.20544052124023438,
    0.4434294104576111,
    0.577297031879425,
    0.46273273229599,
    0.20149517059326172,
    0.7694365382194519,
]
NORMAL = [
    -0.8223440051078796,
    -0.14227993786334991,
    0.19498346745967865,
    -0.09355143457651138,
    -0.8362923860549927,
    0.7369926571846008,
]
KEYS = np.random.default_rng(0).integers(-(2**63), 2**63 - 1, 5000)


@pytest.mark.parametrize("one", [*DISTRIBUTIONS, Constant(3.0)])
def test_a_row_is_the_same_in_every_batch(one: Distribution) -> None:
    initial = InitialValues("table", 7, one, seed=1)
    rows = initial(KEYS)
    assert rows.shape == (5000, 7)
    assert rows.dtype == torch.float32
    assert torch.equal(initial(KEYS[::-1]), rows.flip(0))
    assert torch.equal(torch.cat([initial(KEYS[at : at + 1]) for at in range(50)]), rows[:50])
    assert torch.equal(InitialValues("table", 7, one, seed=1)(KEYS[4000:]), rows[4000:])


def test_values_are_these_on_every_machine() -> None:
    keys = np.array([0, -1, 2**63 - 1])
    uniform = InitialValues("table", 2, Uniform(0.0, 1.0))(keys)
    normal = InitialValues("table", 2, Normal(0.0, 1.0))(keys)
    assert uniform.flatten().tolist() == UNIFORM
    # The last bit may be another with another C library.
    assert normal.flatten().tolist() == pytest.approx(NORMAL, rel=2**-23)


@pytest.mark.parametrize("one", DISTRIBUTIONS)
def test_seeds_tables_ids_and_columns_have_values_of_their_own(one: Distribution) -> None:
    keys = np.arange(-100, 100)
    rows = [InitialValues(table, 4, one, seed=seed)(keys) for table, seed in (("a", 0), ("a", 1), ("b", 0), ("a", -1))]
    values = torch.stack(rows).double()
    # Of 2^24 values few meet by chance; of 3200 with another's bits all would.
    assert values.unique().numel() > 3190


@pytest.mark.parametrize("one", DISTRIBUTIONS)
def test_values_are_distributed_as_they_should_be(one: Distribution) -> None:
    values = InitialValues("t", 16, one)(np.arange(20000)).double().flatten()
    at = torch.linspace(0.02, 0.98, 49, dtype=torch.float64)
    edges = one.low + at * (one.high - one.low) if isinstance(one, Uniform) else 1.0 + 2.0 * torch.special.ndtri(at)
    counts = torch.bincount(torch.bucketize(values, edges), minlength=50).double()
    expected = values.numel() / 50
    # Chi-square with 49 degrees of freedom: above 100 once in 20,000 seeds.
    assert ((counts - expected) ** 2 / expected).sum() < 100
    if isinstance(one, Uniform):
        assert one.low <= values.min() <= values.max() <= one.high
    _no_neighbor_tells_of_another((values - values.mean()).view(-1, 16))


def _no_neighbor_tells_of_another(rows: Tensor) -> None:
    """Columns, and rows of ids that follow each other, are not correlated."""
    bound = 5 / len(rows) ** 0.5
    assert (torch.corrcoef(rows.T) - torch.eye(rows.shape[1])).abs().max() < bound
    assert torch.corrcoef(torch.cat([rows[1:].T, rows[:-1].T]))[:16, 16:].abs().max() < bound


def test_a_function_that_returns_something_else_is_refused() -> None:
    with pytest.raises(InputError, match=r"'t' returned \(2, 3\) for 2 ids; expected a tensor of shape \(2, 2\)"):
        InitialValues("t", 2, lambda ids: torch.zeros(2, 3))(np.array([1, 2]))
    with pytest.raises(InputError, match="returned list"):
        InitialValues("t", 2, lambda ids: [1])(np.array([1, 2]))  # type: ignore[arg-type, return-value]


@pytest.mark.parametrize("make", [lambda: Uniform(1.0, 0.0), lambda: Uniform(0.0, float("inf")), lambda: Normal(0, -1)])
def test_distributions_that_are_none_are_refused(make: object) -> None:
    with pytest.raises(SetupError, match=r"; expected .*finite numbers"):
        make()  # type: ignore[operator]
