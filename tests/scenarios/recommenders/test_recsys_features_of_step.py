"""A step that makes its KeyedJaggedTensor itself, of a tensor or a list, is trained, and a warning names the module."""

from __future__ import annotations

import warnings
from typing import Any

import lightning.pytorch as pl
import torch
from torch import Tensor, nn
from torch.utils.data import DataLoader
from torchrec.modules.embedding_configs import EmbeddingConfig
from torchrec.modules.embedding_modules import EmbeddingCollection
from torchrec.sparse.jagged_tensor import JaggedTensor, KeyedJaggedTensor

from tests.distributed import run_ranks
from tests.strategies.cases import PLANS, SGD, recsys, trainer

ROWS = [torch.randint(50, (3,), generator=torch.Generator().manual_seed(row)) for row in range(48)]


def of_lists(rows: Tensor) -> KeyedJaggedTensor:
    return KeyedJaggedTensor.from_jt_dict({"item": JaggedTensor.from_dense(list(rows))})


def of_tensor(rows: Tensor) -> KeyedJaggedTensor:
    return KeyedJaggedTensor(["item"], rows.flatten(), lengths=torch.full((len(rows),), rows.shape[1]))


class Sequences(pl.LightningModule):
    """The features are made by *make*, or in the batch where there is none."""

    def __init__(self, make: Any = None) -> None:
        super().__init__()
        torch.manual_seed(5)
        config = EmbeddingConfig(name="item", num_embeddings=50, embedding_dim=8, feature_names=["item"])
        self.tables = EmbeddingCollection(tables=[config])
        self.top = nn.Linear(8, 1)
        self.make = make
        self.losses: list[float] = []

    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        features = batch["items"] if self.make is None else self.make(batch["items"])
        loss: Tensor = self.top(self.tables(features)["item"].values()).square().mean()
        self.losses.append(loss.item())
        return loss

    def configure_optimizers(self) -> Any:
        return torch.optim.SGD(self.top.parameters(), lr=0.1)


def losses(plan: str, make: Any = None) -> tuple[list[float], list[str]]:
    module = Sequences(make)

    def collate(rows: list[Tensor]) -> Any:
        stacked = torch.stack(rows)
        return {"items": stacked if make is not None else of_tensor(stacked)}

    used = trainer(recsys(plan, {"item": "table_wise"}, SGD), max_epochs=1)
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        torch.manual_seed(3)
        used.fit(module, DataLoader(ROWS, 4, collate_fn=collate))  # type: ignore[arg-type]
    return module.losses, [str(one.message) for one in caught if "not pipelined" in str(one.message)]


def by_plan(rank: int, world: int) -> list[str]:
    expected, said = losses("serial")
    problems = [f"the batch's own features: {said}"] if said else []
    for plan in PLANS:
        for make in (of_lists, of_tensor):
            found, said = losses(plan, make)
            if found != expected:
                problems.append(f"{plan}, {make.__name__}: {found}, expected {expected}")
            if (len(said) == 1 and "'tables'" in said[0] and "on_after_batch_transfer" in said[0]) != (rank == 0):
                problems.append(f"{plan}, {make.__name__}: said {said}")
    return problems


def test_it_is_trained_as_if_the_batch_had_it_and_named() -> None:
    assert run_ranks(by_plan, 2) == [[]] * 2
