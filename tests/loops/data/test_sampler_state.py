"""What samplers hold, put into those of another loader."""

from __future__ import annotations

import random
from collections.abc import Iterator
from typing import Any

import numpy
import pytest
import torch
from lightning.fabric.utilities.distributed import DistributedSamplerWrapper
from torch.utils.data import BatchSampler, DataLoader, DistributedSampler, RandomSampler, Sampler

from lightning_pipe.loops.data.sampler_state import SamplerState
from tests.loops.models import Rows


class Drawing(Sampler[int]):
    def __init__(self, generator: Any, draw: Any) -> None:
        self.generator, self.draw = generator, draw
        self.epoch = 0

    def __len__(self) -> int:
        return 24

    def __iter__(self) -> Iterator[int]:
        self.epoch += 1
        return iter([(self.epoch + int(self.draw(self.generator))) % 24 for _ in range(24)])


KINDS: dict[str, Any] = {
    "torch": lambda: Drawing(torch.Generator().manual_seed(1), lambda one: torch.randint(24, (), generator=one)),
    "python": lambda: Drawing(random.Random(1), lambda one: one.randrange(24)),
    "numpy": lambda: Drawing(numpy.random.default_rng(1), lambda one: one.integers(24)),
    "numpy, Philox": lambda: Drawing(numpy.random.Generator(numpy.random.Philox(1)), lambda one: one.integers(24)),
    "numpy, of old": lambda: Drawing(numpy.random.RandomState(1), lambda one: one.randint(24)),
}
WAYS: dict[str, Any] = {
    "sampler": lambda one: DataLoader(Rows(), 4, sampler=one),
    "batch sampler": lambda one: DataLoader(Rows(), batch_sampler=BatchSampler(one, 4, False)),
    "no batches": lambda one: DataLoader(Rows(), None, sampler=one),
    "shared out by Lightning": lambda one: DataLoader(
        Rows(), 4, sampler=DistributedSamplerWrapper(one, num_replicas=2, rank=1, shuffle=False)
    ),
}


def order(loader: Any) -> list[Any]:
    return list(loader.sampler if loader.batch_sampler is None else loader.batch_sampler)


@pytest.mark.parametrize(
    ("kind", "way"), [*((kind, "sampler") for kind in KINDS), *(("python", way) for way in WAYS if way != "sampler")]
)
def test_another_sampler_continues_where_one_was(kind: str, way: str) -> None:
    one, other = WAYS[way](KINDS[kind]()), WAYS[way](KINDS[kind]())
    of_one, of_other = SamplerState(one), SamplerState(other)
    order(one)
    state = of_one.get_state()
    expected = order(one), order(one)
    of_other.set_state(state)
    assert (order(other), order(other)) == expected
    # And the one itself goes back.
    of_one.set_state(state)
    assert (order(one), order(one)) == expected


def test_a_sampler_that_an_earlier_loader_has_used_keeps_what_that_one_changed() -> None:
    used, new = KINDS["python"](), KINDS["python"]()
    SamplerState(DataLoader(Rows(), sampler=used))
    order(DataLoader(Rows(), sampler=used))
    of_reloaded = SamplerState(DataLoader(Rows(), sampler=used))
    SamplerState(DataLoader(Rows(), sampler=new)).set_state(of_reloaded.get_state())
    assert new.epoch == used.epoch == 1


def test_a_sampler_that_is_told_its_epoch_is_not_put_back_to_the_one_that_is_over() -> None:
    one = DataLoader(Rows(), sampler=DistributedSampler(Rows(), 2, 0, shuffle=True))
    other = DataLoader(Rows(), sampler=DistributedSampler(Rows(), 2, 0, shuffle=True))
    state, of_other = SamplerState(one), SamplerState(other)
    one.sampler.set_epoch(1)  # type: ignore[attr-defined]
    ended = state.get_state(at_end=True)
    other.sampler.set_epoch(2)  # type: ignore[attr-defined]
    of_other.set_state(ended)
    assert other.sampler.epoch == 2  # type: ignore[attr-defined]


def test_loaders_share_what_is_in_the_same_objects() -> None:
    def loader(generator: torch.Generator) -> DataLoader[Any]:
        return DataLoader(Rows(), sampler=RandomSampler(Rows(), generator=generator))

    mine, sampler = torch.Generator(), KINDS["python"]()
    assert SamplerState(loader(mine)).shares_with(SamplerState(loader(mine)))
    assert not SamplerState(loader(mine)).shares_with(SamplerState(loader(torch.Generator())))
    assert SamplerState(DataLoader(Rows(), sampler=sampler)).shares_with(
        SamplerState(DataLoader(Rows(), sampler=sampler))
    )
    assert not SamplerState(WAYS["sampler"](sampler)).shares_with(SamplerState(WAYS["sampler"](KINDS["python"]())))


def test_counters_that_are_made_or_set_in_an_iteration_continue() -> None:
    class Lazy(Drawing):
        last: int | None = None
        share: float

        def __iter__(self) -> Iterator[int]:
            self.last, self.share, self.made = 3, 0.5, "late"
            return super().__iter__()

    def lazy() -> Lazy:
        made = Lazy(random.Random(1), lambda one: one.randrange(24))
        made.share = 0
        return made

    one, other = lazy(), lazy()
    loader = DataLoader(Rows(), sampler=one)
    state = SamplerState(loader)
    order(loader)
    SamplerState(DataLoader(Rows(), sampler=other)).set_state(state.get_state())
    assert (other.last, other.share, other.made) == (3, 0.5, "late")
