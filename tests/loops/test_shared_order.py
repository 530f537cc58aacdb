"""An epoch that some ranks have begun is gone on with by others: each sample is trained once."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import lightning.pytorch as pl
import pytest
import torch
from lightning.pytorch.callbacks import Callback
from torch.utils.data import DataLoader, DistributedSampler

from lightning_pipe.loops import PipelineTrainingEpochLoop
from lightning_pipe.loops.shared_order import batches_left, of_other_ranks, order_of
from lightning_pipe.strategies.pipeline import PipelineStrategy
from tests.distributed import run_ranks
from tests.loops.models import Net, Rows, trainer

ROWS, BATCH = 48, 2


def loader(rank: int, world: int) -> DataLoader[torch.Tensor]:
    sampler: DistributedSampler[torch.Tensor] = DistributedSampler(Rows(ROWS), world, rank, seed=4)
    sampler.set_epoch(3)
    return DataLoader(sampler.dataset, BATCH, sampler=sampler)


@pytest.mark.parametrize("worlds", [(2, 3, 1), (3, 2, 4), (4, 1, 2)])
def test_what_is_left_is_shared_out_whole_twice_over(worlds: tuple[int, int, int]) -> None:
    first, second, third = worlds
    seen = [index for rank in range(first) for batch in list(loader(rank, first).batch_sampler)[:3] for index in batch]  # type: ignore[arg-type]
    state: Any = {"order": order_of(loader(0, first)), "given": 3}
    assert len(seen) == 3 * BATCH * first

    (moved,) = of_other_ranks([state], 0, second) or [None]
    assert moved is not None
    for rank in range(second):
        of_rank: list[Any] = batches_left(moved | {"rank": rank}, Rows(ROWS), BATCH)
        seen += [index for batch in of_rank[:2] for index in batch]
    state = moved | {"given": 2, "order": moved["left"] | {"batch": BATCH * second}}

    for rank in range(third):
        (again,) = of_other_ranks([state], rank, third) or [None]
        assert again is not None
        rest: list[Any] = batches_left(again, Rows(ROWS), BATCH)
        seen += [index for batch in rest for index in batch]
    assert sorted(seen) == list(range(ROWS))


def test_samplers_with_an_order_for_each_rank_cannot_be_gone_on_with_by_others() -> None:
    assert order_of(DataLoader(Rows(ROWS), BATCH, shuffle=True)) is None
    assert of_other_ranks([{"created": {}, "begun": None, "given": 3, "order": None}], 0, 2) is None
    assert of_other_ranks([None], 0, 2) is None
    assert of_other_ranks([{"ended": ["state"]}], 0, 2) == [{"ended": []}]


# ---------------------------------------------------------------------- trainers


class Save(Callback):
    def __init__(self, folder: Path, behind: int) -> None:
        self.folder, self.behind = folder, behind

    def on_train_batch_end(self, trainer: pl.Trainer, module: Any, outputs: Any, batch: Any, batch_idx: int) -> None:
        if batch_idx + 1 == self.behind and trainer.current_epoch == 1:
            trainer.save_checkpoint(self.folder / f"{trainer.world_size}.ckpt")


def fit(world: int, folder: Path, behind: int, ckpt_path: Path | None = None) -> dict[str, Any]:
    options: dict[str, Any] = {"strategy": "ddp", "devices": world} if world > 1 else {}
    used = trainer(callbacks=[Save(folder, behind)], max_epochs=3, limit_val_batches=0, **options)
    PipelineTrainingEpochLoop.install(used)
    module = Net(Rows(ROWS), batch_size=BATCH)
    used.fit(module, ckpt_path=ckpt_path, weights_only=None if ckpt_path is None else True)
    return {
        "trained": module.trained,
        "epochs": used.current_epoch,
        "batches": used.fit_loop.epoch_loop.batch_progress.current.completed,
    }


def begin(rank: int, world: int, folder: Path) -> dict[str, Any]:
    return fit(world, folder, 5)


def go_on(rank: int, world: int, folder: Path) -> dict[str, Any]:
    return fit(world, folder, 13, folder / "2.ckpt")


def rows(ranks: list[dict[str, Any]], batches: slice) -> list[float]:
    return [row for rank in ranks for batch in rank["trained"][batches] for row in batch]


def test_trainers_on_2_3_and_1_ranks_train_an_epoch_together(tmp_path: Path) -> None:
    two = run_ranks(begin, 2, tmp_path)
    in_epoch = ROWS // (2 * BATCH)
    by_two = rows(two, slice(in_epoch, in_epoch + 5))
    # The checkpoint was written behind 20 rows of the second epoch. Three ranks have 28 left: 5 batches of 3 ranks.
    three = run_ranks(go_on, 3, tmp_path)
    by_three = rows(three, slice(0, 5))
    assert sorted(by_two + by_three) == list(range(ROWS))
    # And the third epoch, whole.
    assert all(len(rank["trained"]) == 5 + ROWS // (3 * BATCH) for rank in three)
    assert all(rank["epochs"] == 3 and rank["batches"] == ROWS // (3 * BATCH) for rank in three)
    one = fit(1, tmp_path, 10**6, tmp_path / "2.ckpt")
    assert sorted(by_two + rows([one], slice(0, 14))) == list(range(ROWS))
    assert sorted(rows([one], slice(14, None))) == list(range(ROWS))


def test_samples_without_batches_are_shared_out_too() -> None:
    loader = DataLoader(Rows(ROWS), batch_size=None, sampler=DistributedSampler(Rows(ROWS), 2, 0, shuffle=True, seed=3))
    order = order_of(loader)
    assert order is not None
    assert order["batch"] == 2
    trained: list[Any] = list(DistributedSampler(Rows(ROWS), 1, 0, shuffle=True, seed=3))[: 2 * 3]
    left: list[Any] = []
    for rank in range(3):
        (state,) = of_other_ranks([{"given": 3, "order": order}], rank, 3) or [None]
        assert state is not None
        left += batches_left(state, Rows(ROWS), None)
    assert sorted(trained + left) == list(range(ROWS))


def test_ranks_that_read_the_same_go_on_on_any_number_of_them(tmp_path: Path) -> None:
    class OfOnePipeline(PipelineStrategy):
        ranks_share_data = True

    def run(strategy: Any, ckpt_path: Path | None = None, callbacks: Any = ()) -> Net:
        torch.manual_seed(3 if ckpt_path is None else 99)
        module = Net(Rows(ROWS), batch_size=BATCH)
        used = trainer(strategy=strategy, callbacks=list(callbacks), max_epochs=3, limit_val_batches=0)
        used.fit(module, ckpt_path=ckpt_path, weights_only=True)
        return module

    whole = run(OfOnePipeline(), callbacks=[Save(tmp_path, 5)])
    path = tmp_path / "1.ckpt"
    checkpoint = torch.load(path, weights_only=True)
    mine = checkpoint["loops"]["fit_loop"]["state_dict"]["lightning_pipe"]
    mine["ranks"] = mine["ranks"] * 4  # as four ranks of one pipeline write it
    torch.save(checkpoint, path)
    after = run(OfOnePipeline(), path)
    done = len(whole.trained) - len(after.trained)
    assert after.trained == whole.trained[done:]
    assert after.losses == whole.losses[done:]
    assert done == len(whole.trained) // 3 + 5
