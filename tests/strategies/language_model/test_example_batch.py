"""A batch to measure with, of whatever data there are, or the reason why there is none."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.utils.data import DataLoader, Dataset, IterableDataset, RandomSampler

from lightning_pipe.engine import SetupError
from lightning_pipe.strategies.language_model.example_batch import example_batch
from tests.strategies.llm_cases import Tiny, loader, packed_batches, row_batches


class Rows(Dataset[dict[str, Tensor]]):
    def __init__(self, count: int = 10) -> None:
        self.count = count
        self.asked: list[int] = []

    def __len__(self) -> int:
        return self.count

    def __getitem__(self, index: int) -> dict[str, Tensor]:
        self.asked.append(index)
        return {"input_ids": torch.full((3,), index), "labels": torch.full((3,), index)}


class Stream(IterableDataset[dict[str, Tensor]]):
    def __iter__(self) -> Iterator[dict[str, Tensor]]:
        raise AssertionError("a row was taken")


class WithExample(Tiny):
    def example_micro_batch(self) -> dict[str, Any]:
        tokens = torch.arange(6).view(2, 3)
        return {"input_ids": tokens, "labels": tokens, "scale": 2.0}


class Moving(Tiny):
    def on_after_batch_transfer(self, batch: Any, dataloader_idx: int) -> Any:
        return {key: value + 100 for key, value in batch.items()}


def test_rows_come_from_the_dataset_past_its_sampler() -> None:
    rows = Rows()
    sampler = RandomSampler(rows, generator=torch.Generator().manual_seed(1))
    assert sampler.generator is not None
    state = sampler.generator.get_state()
    found = example_batch(Tiny(), DataLoader(rows, 4, sampler=sampler), None)
    assert found["input_ids"][:, 0].tolist() == [0, 1, 2, 3]
    assert rows.asked == [0, 1, 2, 3]
    assert torch.equal(sampler.generator.get_state(), state)


def test_a_dataset_of_batches_gives_its_first() -> None:
    batches = row_batches(2)
    assert torch.equal(example_batch(Tiny(), loader(batches), None)["input_ids"], batches[0]["input_ids"])
    packed = example_batch(Tiny(), loader(packed_batches(4, 2)), None)
    assert len(packed) == 4


def test_a_batch_goes_through_the_hooks_of_its_transfer() -> None:
    assert example_batch(Moving(), DataLoader(Rows(), 2), None)["labels"].tolist() == [[100] * 3, [101] * 3]


@pytest.mark.parametrize(("given", "rows"), [(None, 5), (7, 7)])
def test_the_modules_example_is_repeated_to_as_many_rows_as_a_batch_has(given: int | None, rows: int) -> None:
    dataset = Rows()
    found = example_batch(WithExample(), DataLoader(dataset, 5), given)
    assert found["input_ids"][:, 0].tolist() == [0, 3, 0, 3, 0, 3, 0][:rows]
    assert found["scale"] == 2.0
    assert dataset.asked == []


@pytest.mark.parametrize(
    ("module", "given", "says"),
    [
        (
            Tiny(),
            DataLoader(Stream(), 4),
            "No batch can be read in advance from DataLoader of Stream, since training would miss it",
        ),
        (Tiny(), iter([1]), "No batch can be read in advance from .*list_iterator.*, since training would miss it"),
        (WithExample(), iter([1]), "The number of rows in a batch is unknown for a list_iterator"),
        (Tiny(), DataLoader(Rows(), batch_sampler=[[1, 2]]), "DataLoader of Rows with a batch sampler"),
    ],
    ids=["stream", "iterator", "example of an iterator", "sampler"],
)
def test_without_a_batch_it_is_said_what_is_needed(module: Tiny, given: Any, says: str) -> None:
    with pytest.raises(SetupError, match=f"{says}.* Use a DataLoader over a map-style dataset, or"):
        example_batch(module, given, None)
