"""Replicas of sharded tables under a Trainer: plans, validation, checkpoints on other numbers of replicas, refusals."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import lightning.pytorch as pl
import pytest
import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from lightning.pytorch.callbacks import Callback, ModelCheckpoint
from torch import Tensor
from torch.distributed.checkpoint.metadata import TensorStorageMetadata

from lightning_pipe.engine import SetupError
from tests.distributed import run_ranks
from tests.rounding import Reference
from tests.strategies.cases import (
    ADAGRAD,
    SGD,
    Clicks,
    Memory,
    Sequenced,
    difference,
    fit,
    is_table,
    loader,
    outcome,
    predictions,
    recsys,
    state_of,
    trainer,
)

KINDS = {"past": "row_wise", "people": "column_wise"}


class Equal(Callback):
    """Whether the tables of the first rank and the last are equal, whenever validation and a checkpoint begin."""

    def __init__(self) -> None:
        self.batches: list[bool] = []
        self.evaluations: list[bool] = []

    def on_train_batch_end(self, trainer: pl.Trainer, *args: Any) -> None:
        self.batches.append(same_on_all(trainer))

    def on_validation_batch_start(self, trainer: pl.Trainer, *args: Any) -> None:
        self.evaluations.append(same_on_all(trainer))


class Profile(Callback):
    """Profiles behind the second batch, which is between two averages."""

    def on_train_batch_end(self, trainer: pl.Trainer, module: Any, outputs: Any, batch: Any, batch_idx: int) -> None:
        if trainer.global_step == 2:
            strategy: Any = trainer.strategy
            with torch.random.fork_rng(devices=[]):  # a loader's iterator draws a seed
                data = iter(loader())
            self.result = strategy.profile([next(data), next(data)], rounds=2, iterations=2)


def same_on_all(used: pl.Trainer) -> bool:
    strategy: Any = used.strategy
    same = True
    for name in sorted(strategy.sharded_model.tables):
        table = strategy.sharded_model.full_table(name)
        tables = [torch.empty_like(table) for _ in range(dist.get_world_size())]
        dist.all_gather(tables, table)
        same &= torch.equal(tables[0], tables[-1])
    return same


def under(plan: Any, sync_every: int | None = None, optimizer: Any = ADAGRAD, **options: Any) -> dict[str, Any]:
    module, logger, equal = Clicks(Sequenced), Memory(), Equal()
    callbacks = [equal, *options.pop("callbacks", [])]
    strategy = recsys(plan, KINDS, optimizer, replicas=2, sync_every=sync_every)
    data = loader(24 * dist.get_world_size())
    used = fit(module, strategy, data, loader(16), logger=logger, callbacks=callbacks, **options)
    return {
        "state": state_of(used),
        "losses": module.losses,
        "lines": logger.lines,
        "in batches": equal.batches,
        "in evaluations": equal.evaluations,
    }


def plans(rank: int, world_size: int) -> dict[str, Any]:
    """With an average in every fourth step: where tables are equal, and what differs after a profile."""
    serial = under("serial", 4)
    profiled = under("prefetch", 4, callbacks=[profile := Profile()])
    return {
        "equal": (serial["in batches"], serial["in evaluations"]),
        "profiled": difference(profiled["state"], serial["state"]),
        "tasks": list(profile.result.tasks),
    }


@pytest.fixture(scope="module")
def trained() -> list[dict[str, Any]]:
    return run_ranks(plans, 2)


def test_replicas_are_equal_after_every_average_and_whenever_they_are_evaluated(trained: list[dict[str, Any]]) -> None:
    for found in trained:
        batches, evaluations = found["equal"]
        # Six batches an epoch: averaged behind the fourth, and behind the sixth for validation.
        assert batches == 2 * [False, False, False, True, False, False]
        assert all(evaluations)


def test_a_profile_between_two_averages_leaves_no_trace(trained: list[dict[str, Any]]) -> None:
    for found in trained:
        assert found["profiled"] == []
        assert "SyncReplicas" in found["tasks"]


# ---------------------------------------------------------------------- one model, however it is sharded


def sgd_of_all(module: Clicks) -> torch.optim.Optimizer:
    return torch.optim.SGD(module.parameters(), lr=0.5)  # the tables' rate


def as_sharded_over_all(rank: int, world_size: int) -> list[list[str]]:
    """By SGD, with an average in every step: what differs from DDP of the unsharded module by more than rounding."""

    def trained(strategy: Any) -> dict[str, Any]:
        module = Clicks(Sequenced, optimizers=sgd_of_all)
        return outcome(module, fit(module, strategy, loader(8 * world_size, in_order=True), max_epochs=1))

    expected = Reference.of(lambda: trained("ddp"))
    return [expected.differences(trained(recsys("prefetch", KINDS, SGD, replicas=count))) for count in (2, None)]


def test_sgd_trains_as_with_tables_sharded_over_all_ranks() -> None:
    assert run_ranks(as_sharded_over_all, 4) == [[[], []]] * 4


# ---------------------------------------------------------------------- checkpoints


def tables_of(state: dict[str, Tensor]) -> dict[str, Tensor]:
    return {name: value for name, value in state.items() if is_table(name)}


def checkpoints(rank: int, world_size: int, folder: Path) -> dict[str, Any]:
    """Resumes in mid-epoch between two averages; and reads the checkpoint into other numbers of replicas."""

    def strategy(plan: str = "prefetch", **options: Any) -> Any:
        return recsys(plan, KINDS, replicas=2, sync_every=3, **options)

    def keeping() -> dict[str, Any]:
        saving = ModelCheckpoint(folder, filename="{step}", every_n_train_steps=4, save_top_k=-1)
        return {"enable_checkpointing": True, "default_root_dir": folder, "callbacks": [saving], "max_epochs": 2}

    data = loader(24 * world_size)
    whole = Clicks(Sequenced)
    expected = state_of(fit(whole, strategy(async_checkpoints=True), data, **keeping()))
    path = folder / "step=4.ckpt"
    found: dict[str, Any] = {}
    for plan in ("prefetch", "serial"):
        second = Clicks(Sequenced)
        # It saves where the other one saved: that is where replicas are averaged beside every third step.
        used = fit(second, strategy(plan), data, ckpt_path=path, **keeping())
        found[f"resumed, {plan}"] = difference(state_of(used), expected), second.losses == whole.losses[4:]
    for table in KINDS:
        found[f"shards of {table}"] = [
            len(entry.chunks)
            for name, entry in sorted(dcp.FileSystemReader(path).read_metadata().state_dict_metadata.items())
            if f".{table}." in name and isinstance(entry, TensorStorageMetadata)
        ]
    rows = loader(16, in_order=True)
    wanted: list[Tensor] = []
    for replicas in (2, None):
        module = Clicks(Sequenced)
        reading = trainer(recsys("prefetch", KINDS, replicas=replicas))
        reading.predict(module, rows, ckpt_path=path)
        wanted.append(predictions(reading, module, rows))
        found[f"tables, {replicas}"] = tables_of(state_of(reading))
    unsharded = Clicks(Sequenced)
    unsharded.load_state_dict({name: state_of(reading)[name] for name in unsharded.state_dict()})
    alone = Reference.of(lambda: {"predictions": predictions(trainer("ddp"), unsharded, rows)})
    found["predictions"] = [alone.differences({"predictions": one}) for one in wanted]
    return found


@pytest.mark.parametrize("world_size", [4])
def test_a_checkpoint_is_of_the_average_and_of_any_number_of_replicas(world_size: int, tmp_path: Path) -> None:
    results = run_ranks(checkpoints, world_size, tmp_path)
    for found in results:
        assert found["resumed, prefetch"] == ([], True)
        assert found["resumed, serial"] == ([], True)
        # Of the table and its state: each shard of one replica, once.
        assert found["shards of past"] == [world_size // 2] * 2
        assert found["shards of people"] == [2] * 2
        assert found["predictions"] == [[], []]
        assert difference(found["tables, 2"], found["tables, None"]) == []
        assert difference(found["tables, 2"], results[0]["tables, 2"]) == []


# ---------------------------------------------------------------------- refusals


def refused(rank: int, world_size: int) -> dict[str, str]:
    found = {}
    with pytest.raises(SetupError) as caught:
        fit(Clicks(), recsys(optimizer=SGD, replicas=2), gradient_clip_val=1.0)
    found["clipped"] = str(caught.value)
    module = Clicks()
    fit(module, recsys(replicas=2), max_epochs=1)
    with pytest.raises(SetupError) as caught:
        fit(module, recsys(replicas=1), max_epochs=1)
    found["other"] = str(caught.value)
    again = fit(module, recsys(), max_epochs=1)
    found["left out"] = str(same_on_all(again))
    return found


def test_what_replicas_cannot_have_is_refused_on_every_rank() -> None:
    for found in run_ranks(refused, 2):
        assert "gradients cannot be clipped with 2 replicas of tables" in found["clipped"]
        assert "were sharded by an earlier strategy with replicas=2, but this one has replicas=1" in found["other"]
        assert found["left out"] == "True"
