"""A loader that continues gives the samples of the one whose state it has, or says that it cannot."""

from __future__ import annotations

import random
from collections.abc import Iterator
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.utils.data import DataLoader, Sampler

from lightning_pipe.engine import SetupError
from lightning_pipe.loops.data.resumable_loader import make_resumable
from tests.loops.models import Rows

LENGTH = 12


class Noisy(Rows):
    """Draws from the generator that `Popping` draws from."""

    def __getitem__(self, index: int) -> Tensor:
        return super().__getitem__(index) + random.random() / 4


class Popping(Sampler[int]):
    """Draws each index when it is asked for it, from the shared generator."""

    def __len__(self) -> int:
        return LENGTH

    def __iter__(self) -> Iterator[int]:
        left = list(range(LENGTH))
        while left:
            yield left.pop(random.randrange(len(left)))


def first_values(batches: Any) -> list[list[int]]:
    return [[int(value) for value in batch[:, 0]] for batch in batches]


def after_two_batches(dataset: Rows, **options: Any) -> tuple[dict[str, Any], list[list[int]]]:
    """The state of a loader after two batches, and the samples that follow; the generator is put back."""
    loader: Any = make_resumable(DataLoader(dataset, batch_size=3, **options))
    batches = iter(loader)
    next(batches), next(batches)
    state, generator = loader.state_dict(), random.getstate()
    rest = first_values(batches)
    random.setstate(generator)
    return state, rest


def continued(state: dict[str, Any], dataset: Rows, **options: Any) -> list[list[int]]:
    loader: Any = make_resumable(DataLoader(dataset, batch_size=3, **options))
    loader.load_state_dict(state)
    return first_values(loader)


def test_a_sampler_that_draws_as_it_goes_continues_where_nothing_draws_in_between() -> None:
    state, rest = after_two_batches(Rows(LENGTH), sampler=Popping())
    assert continued(state, Rows(LENGTH), sampler=Popping()) == rest


def test_a_sampler_that_gives_other_samples_when_it_is_repeated_is_an_error() -> None:
    state, _ = after_two_batches(Noisy(LENGTH), sampler=Popping())
    with pytest.raises(SetupError, match=r"first 2 batches are not those of the run that wrote the checkpoint"):
        continued(state, Noisy(LENGTH), sampler=Popping())


@pytest.mark.parametrize("batch_size", [3, None], ids=["batches", "samples"])
def test_a_dataset_of_another_length_is_an_error_where_its_order_differs(batch_size: int | None) -> None:
    torch.manual_seed(1)
    loader: Any = make_resumable(DataLoader(Rows(LENGTH), batch_size=batch_size, shuffle=True))
    batches = iter(loader)
    next(batches), next(batches)
    other: Any = make_resumable(DataLoader(Rows(LENGTH + 30), batch_size=batch_size, shuffle=True))
    other.load_state_dict(loader.state_dict())
    with pytest.raises(SetupError, match="Give the dataloader the same dataset"):
        next(iter(other))


def test_samples_that_were_added_at_the_end_are_given_too() -> None:
    state, rest = after_two_batches(Rows(LENGTH))
    assert continued(state, Rows(LENGTH + 3)) == [*rest, [12, 13, 14]]


def test_indices_that_are_no_integers_continue_without_a_checksum() -> None:
    class Named(Rows):
        def __getitem__(self, index: Any) -> Tensor:
            return super().__getitem__(int(index))

    names: Any = [str(index) for index in range(LENGTH)]
    state, rest = after_two_batches(Named(LENGTH), sampler=names)
    assert state["indices"] is None
    assert continued(state, Named(LENGTH), sampler=names) == rest
