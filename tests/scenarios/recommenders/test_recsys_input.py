"""Whatever the first batch of training or of evaluation is like: ids reach their tables, or an error says why not."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from typing import Any

import pytest
from torchrec.sparse.jagged_tensor import KeyedJaggedTensor

from lightning_pipe.engine import InputError
from tests.strategies.cases import KEYS, SGD, Batch, Clicks, fit, loader, recsys

Change = Callable[[KeyedJaggedTensor], KeyedJaggedTensor]

TRAINING, SANITY_CHECK, VALIDATION = ("train",), ("sanity_check",), ("validate",)


class Changed(Clicks):
    """Changes the features of the batches of some stages."""

    def __init__(self, change: Change, stages: tuple[str, ...]) -> None:
        super().__init__()
        self.change = change
        self.stages = stages

    def on_after_batch_transfer(self, batch: Batch, dataloader_idx: int) -> Any:
        assert self.trainer.state.stage is not None
        if self.trainer.state.stage.value not in self.stages:
            return batch
        return dataclasses.replace(batch, sparse=self.change(batch.sparse))


def another_name(features: KeyedJaggedTensor) -> KeyedJaggedTensor:
    keys = ["usr" if key == "user" else key for key in KEYS]
    return KeyedJaggedTensor(keys, features.values(), lengths=features.lengths())


def not_integers(features: KeyedJaggedTensor) -> KeyedJaggedTensor:
    return KeyedJaggedTensor(features.keys(), features.values().float(), lengths=features.lengths())


@pytest.mark.parametrize("stages", [TRAINING, SANITY_CHECK], ids="+".join)
@pytest.mark.parametrize(
    ("change", "message"),
    [
        (another_name, r"'network\.bags' look up the features .*, but the batch has .*'usr'\]: missing \['user'\]"),
        (not_integers, r"'network\.bags' must be torch\.int64 or torch\.int32, got torch\.float32"),
    ],
    ids=["another name", "not integers"],
)
def test_a_first_batch_that_the_tables_cannot_use_is_refused(
    change: Change, message: str, stages: tuple[str, ...]
) -> None:
    with pytest.raises(InputError, match=message):
        fit(Changed(change, stages), recsys(optimizer=SGD), val=loader())


def test_other_keys_in_validation_than_in_training_are_refused() -> None:
    with pytest.raises(InputError, match=r"missing \['user'\], extra \['usr'\]"):
        fit(Changed(another_name, VALIDATION), recsys(optimizer=SGD), val=loader())
