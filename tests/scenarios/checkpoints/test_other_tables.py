"""Checkpoints of a module with fewer or more tables: old tables continue, new ones begin, other sizes are refused."""

from __future__ import annotations

import logging
from pathlib import Path
from typing import Any

import lightning.pytorch as pl
import pytest
import torch
from lightning.pytorch.callbacks import ModelCheckpoint
from torch import Tensor, nn
from torchrec.modules.embedding_configs import EmbeddingBagConfig
from torchrec.modules.embedding_modules import EmbeddingBagCollection

from lightning_pipe.engine.common.errors import SetupError
from tests.distributed import run_ranks
from tests.strategies import cases


class Sums(pl.LightningModule):
    """Adds the vectors of its tables, and remembers its losses and the values that it begins with."""

    def __init__(self, keys: list[str], strict: bool = True, rows: int = cases.IDS) -> None:
        super().__init__()
        self.strict_loading = strict
        tables = [
            EmbeddingBagConfig(name=key, num_embeddings=rows, embedding_dim=cases.WIDTH, feature_names=[key])
            for key in keys
        ]
        self.tables, self.top = EmbeddingBagCollection(tables), nn.Linear(cases.WIDTH, 1)
        self.losses: list[float] = []
        self.begins: dict[str, Tensor] = {}
        self.fused: dict[str, Tensor] = {}

    def on_train_start(self) -> None:
        strategy: Any = self.trainer.strategy
        self.begins = _own(strategy.lightning_module_state_dict())
        states = strategy.sharded_model.fused_optimizer.state_dict()["state"]
        self.fused = _own({key: value for of_table in states.values() for key, value in of_table.items()})

    def training_step(self, batch: cases.Batch, batch_idx: int) -> Tensor:
        vectors = self.tables(batch.sparse).to_dict()
        logits = self.top(torch.stack(list(vectors.values())).sum(0)).squeeze(1)
        loss = nn.functional.binary_cross_entropy_with_logits(logits, batch.label)
        self.losses.append(loss.item())
        return loss

    def configure_optimizers(self) -> torch.optim.Optimizer:
        return torch.optim.AdamW(self.top.parameters(), lr=0.1)

    def train_dataloader(self) -> Any:
        return cases.loader(24)


def _own(state: dict[str, Any]) -> dict[str, Tensor]:
    """Values that this rank has, of tensors and of shards."""
    found = {}
    for name, value in state.items():
        shards = value.local_shards() if hasattr(value, "local_shards") else None
        if shards is None:
            found[name] = value.detach().clone()
        elif shards:
            found[name] = shards[0].tensor.detach().clone()
    return found


def fit(module: Sums, folder: Path, checkpoint: str | None, name: str | None = None) -> Sums:
    """Train one epoch, from a checkpoint on; *name* gives its own checkpoints their names."""
    pl.seed_everything(1)
    saves = ModelCheckpoint(folder, f"{name}-{{step}}", every_n_train_steps=1, save_top_k=-1)
    callbacks = [] if name is None else [saves]
    # Each rank has rows of each table, whatever tables there are.
    kinds = dict.fromkeys(module.tables.embedding_bags, "row_wise")
    strategy = cases.recsys(optimizer=cases.ROW_WISE_ADAGRAD, kinds=kinds)
    used = cases.trainer(strategy, callbacks=callbacks, enable_checkpointing=name is not None, max_epochs=1)
    used.fit(module, ckpt_path=None if checkpoint is None else folder / f"{checkpoint}.ckpt")
    return module


def other_tables(rank: int, size: int, folder: Path) -> Any:
    fit(Sums(["friend", "item"]), folder, None, "two")
    found: dict[str, Any] = {"same": fit(Sums(["friend", "item"]), folder, "two-step=2")}
    found["more"] = fit(Sums(["friend", "item", "user"], strict=False), folder, "two-step=2", "three")
    found["fewer"] = fit(Sums(["item"], strict=False), folder, "two-step=2")
    found["again"] = fit(Sums(["friend", "item", "user"]), folder, "three-step=3")
    refused = {}
    for name, module in {
        "more": Sums(["friend", "item", "user"]),
        "fewer": Sums(["item"]),
        "larger": Sums(["friend", "item"], strict=False, rows=cases.IDS + 8),
    }.items():
        with pytest.raises(SetupError) as caught:
            fit(module, folder, "two-step=2")
        refused[name] = str(caught.value)
    return {name: (one.losses, one.begins, one.fused) for name, one in found.items()}, refused


@pytest.mark.parametrize("size", [1, pytest.param(2, marks=pytest.mark.exhaustive)])
def test_other_tables_continue_and_new_ones_begin_if_loading_is_not_strict(size: int, tmp_path: Path) -> None:
    steps = 24 // 4 // size
    for found, refused in run_ranks(other_tables, size, tmp_path):
        _, begins, fused = found["same"]
        assert len(begins) == 4
        assert len(fused) == 2
        for name, common in (("more", 4), ("fewer", 3)):
            losses, other_begins, other_fused = found[name]
            assert len(losses) == steps - 2
            assert len(begins.keys() & other_begins.keys()) == common
            for one, other in ((begins, other_begins), (fused, other_fused)):
                for key in one.keys() & other.keys():
                    assert torch.equal(one[key], other[key]), (name, key)
        more_losses, more, more_fused = found["more"]
        assert more["tables.embedding_bags.user.weight"].any()
        (state,) = (more_fused[key] for key in more_fused.keys() - fused.keys())
        assert not state.any()
        # From a checkpoint that has the new table, loading is strict, and the run is the same to the bit.
        assert found["again"][0] == more_losses[1:]
        assert "missing in it: " in refused["more"]
        assert "tables.embedding_bags.user.weight" in refused["more"]
        assert "unexpected in it: " in refused["fewer"]
        assert "tables.embedding_bags.friend.weight" in refused["fewer"]
        assert "of another size: " in refused["larger"]


def test_a_log_line_lists_what_is_not_read(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    fit(Sums(["friend", "item"]), tmp_path, None, "two")
    with caplog.at_level(logging.INFO, "lightning.pytorch.utilities.rank_zero"):
        fit(Sums(["item", "user"], strict=False), tmp_path, "two-step=2")
    (line,) = [text for text in caplog.messages if "strict_loading is False" in text]
    missing, _, unexpected = line.partition("unexpected in it: ")
    assert "tables.embedding_bags.user.weight" in missing
    assert "tables.embedding_bags.friend.weight" in unexpected
