"""Persistent workers that are started again draw their seed from no generator in use."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.utils.data import DataLoader, RandomSampler

from lightning_pipe.loops.data.persistent_workers import starting_without_a_draw, workers_wait
from tests.loops.models import Rows

made: list[DataLoader[Any]] = []


@pytest.fixture(autouse=True)
def _workers_end() -> Iterator[None]:
    yield
    for one in made:
        one._iterator = None
    made.clear()


def loader(**options: Any) -> DataLoader[Tensor]:
    return DataLoader(Rows(8), 4, num_workers=1, persistent_workers=True, **options)


def draws(one: DataLoader[Any]) -> bool:
    """Whether an iteration draws from the process's generator."""
    made.append(one)
    before = torch.get_rng_state()
    assert len(list(one)) == 2
    return not torch.equal(before, torch.get_rng_state())


def test_workers_draw_their_seed_when_they_are_started_and_never_again() -> None:
    one = loader()
    assert not workers_wait(one)
    assert draws(one)
    assert workers_wait(one)
    assert not draws(one)
    one._iterator = None
    assert draws(one)


def test_they_are_started_without_a_draw_and_the_users_loader_stays_as_it_is() -> None:
    own = torch.Generator().manual_seed(3)
    for users in (loader(), loader(generator=own, shuffle=True)):
        generator = users.generator
        same = starting_without_a_draw(users)
        assert not draws(same)
        assert users.generator is generator
        assert not workers_wait(users)
    # From its own generator the sampler has drawn its order, and the workers no seed.
    expected = torch.Generator().manual_seed(3)
    list(RandomSampler(Rows(8), generator=expected))
    assert torch.equal(own.get_state(), expected.get_state())
