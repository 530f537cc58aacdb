"""An epoch that some ranks have begun is gone on with by others: each sample is trained once."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import lightning.pytorch as pl
import pytest
import torch
from lightning.pytorch.callbacks import Callback
from torch.utils.data import DataLoader, DistributedSampler, RandomSampler, SequentialSampler

from lightning_pipe.loops import PipelineTrainingEpochLoop
from lightning_pipe.loops.data.random_streams import get_rng_states, pack_rng_states
from lightning_pipe.loops.data.resumable_loader import loader_leaves_global_rng_unchanged, make_resumable
from lightning_pipe.loops.data.resume import are_equal
from lightning_pipe.loops.data.shared_order import (
    build_remaining_batches,
    get_distributed_sampler_state,
    reshard_loader_states,
)
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
    state: Any = {"order": get_distributed_sampler_state(loader(0, first)), "given": 3}
    assert len(seen) == 3 * BATCH * first

    (moved,) = reshard_loader_states([state], 0, second) or [None]
    assert moved is not None
    for rank in range(second):
        of_rank: list[Any] = build_remaining_batches(moved | {"rank": rank}, Rows(ROWS), BATCH)
        seen += [index for batch in of_rank[:2] for index in batch]
    state = moved | {"given": 2, "order": moved["left"] | {"batch": BATCH * second}}

    for rank in range(third):
        (again,) = reshard_loader_states([state], rank, third) or [None]
        assert again is not None
        rest: list[Any] = build_remaining_batches(again, Rows(ROWS), BATCH)
        seen += [index for batch in rest for index in batch]
    assert sorted(seen) == list(range(ROWS))


@pytest.mark.parametrize(
    ("world", "batch_size", "drop_last"), [(2, None, False), (3, 1, False), (5, 3, False), (2, 3, True), (5, 2, True)]
)
def test_no_rank_has_a_batch_more_than_another_and_loses_it(
    world: int, batch_size: int | None, drop_last: bool
) -> None:
    for trained in range(ROWS + 1):
        state: Any = {"order": get_distributed_sampler_state(loader(0, 1)) | {"trained": trained}, "given": 0}  # type: ignore[operator]
        (moved,) = reshard_loader_states([state], 0, world) or [None]
        assert moved is not None
        ranks = [
            build_remaining_batches(moved | {"rank": rank}, Rows(ROWS), batch_size, drop_last) for rank in range(world)
        ]
        assert len({len(batches) for batches in ranks}) == 1
        seen = [index for batches in ranks for batch in batches for index in ([batch] if batch_size is None else batch)]  # type: ignore[union-attr]
        left = ROWS - trained
        if drop_last and batch_size is not None:
            # Fewer are left out than the ranks' last batches would hold.
            assert left - batch_size * world < len(set(seen)) <= left + world
        else:
            order = [index for batch in loader(0, 1).batch_sampler for index in batch]  # type: ignore[union-attr]
            assert set(order[trained:]) <= set(seen)
            assert len(seen) < left + world


def test_samplers_with_an_order_for_each_rank_cannot_be_gone_on_with_by_others() -> None:
    assert get_distributed_sampler_state(DataLoader(Rows(ROWS), BATCH, shuffle=True)) is None
    assert reshard_loader_states([{"created": {}, "begun": None, "given": 3, "order": None}], 0, 2) is None
    assert reshard_loader_states([None], 0, 2) is None
    assert reshard_loader_states([{"ended": ["state"]}], 0, 2) == [{"ended": []}]


# ---------------------------------------------------------------------- trainers


class Save(Callback):
    """Writes a checkpoint in the second epoch, after a number of its batches; those of a run before count."""

    def __init__(self, path: Path, after: int) -> None:
        self.path, self.after = path, after

    def on_train_batch_end(self, trainer: pl.Trainer, module: Any, outputs: Any, batch: Any, batch_idx: int) -> None:
        if batch_idx + 1 == self.after and trainer.current_epoch == 1:
            trainer.save_checkpoint(self.path)


def fit(rank: int, world: int, read: Path | None, *saves: Save) -> dict[str, Any]:
    options: dict[str, Any] = {"strategy": "ddp", "devices": world} if world > 1 else {}
    used = trainer(callbacks=list(saves), max_epochs=3, limit_val_batches=0, **options)
    PipelineTrainingEpochLoop.install(used)
    module = Net(Rows(ROWS), batch_size=BATCH)
    used.fit(module, ckpt_path=read, weights_only=None if read is None else True)
    return {
        "trained": module.trained,
        "epochs": used.current_epoch,
        "batches": used.fit_loop.epoch_loop.batch_progress.current.completed,
    }


def three_times(rank: int, world: int, read: Path, first: Save, second: Save) -> list[dict[str, Any]]:
    return [
        fit(rank, world, read, first),
        fit(rank, world, first.path, second),
        fit(rank, world, second.path),
    ]


def rows(ranks: Sequence[dict[str, Any]], batches: slice) -> list[float]:
    return [row for rank in ranks for batch in rank["trained"][batches] for row in batch]


def test_trainers_on_2_3_and_1_ranks_train_an_epoch_together(tmp_path: Path) -> None:
    by_two, by_three, by_three_again = (tmp_path / f"{name}.ckpt" for name in ("two", "three", "three_again"))
    whole = ROWS // (3 * BATCH)  # batches of an epoch, by three
    two = run_ranks(fit, 2, None, Save(by_two, 5))
    in_epoch = ROWS // (2 * BATCH)
    trained = rows(two, slice(in_epoch, in_epoch + 5))
    # The checkpoint was written after 20 rows of the second epoch: three ranks have 28 left, in 5 batches. They write
    # one after 2 of the 5, continue from it, write one after 1 of the 3 that are left, and continue from that.
    saves = Save(by_three, whole - 3), Save(by_three_again, whole - 2)
    three, again, once_more = zip(*run_ranks(three_times, 3, by_two, *saves), strict=True)
    assert sorted(trained + rows(three, slice(0, 5))) == list(range(ROWS))
    # And the third epoch, whole.
    assert all(len(rank["trained"]) == 5 + whole for rank in three)
    assert all(rank["epochs"] == 3 and rank["batches"] == whole for rank in three)
    assert [rank["trained"] for rank in again] == [rank["trained"][2:] for rank in three]
    assert [rank["trained"] for rank in once_more] == [rank["trained"][3:] for rank in three]
    # One rank continues from any of them.
    for read, done in ((by_two, 0), (by_three, 2), (by_three_again, 3)):
        one = fit(0, 1, read)
        left = ROWS - len(trained) - 3 * BATCH * done
        by_all = trained + rows(three, slice(0, done)) + rows([one], slice(0, left // BATCH))
        assert sorted(by_all) == list(range(ROWS))
        assert sorted(rows([one], slice(left // BATCH, None))) == list(range(ROWS))


@pytest.mark.parametrize(("given", "batch_size"), [((0, 1, 1), BATCH), ((2, 0, 3), None), ((4, 0, 0), BATCH)])
def test_a_rank_continues_again_and_again_where_its_share_was_left(
    given: tuple[int, ...], batch_size: int | None
) -> None:
    def batches() -> DataLoader[Any]:
        sampler: DistributedSampler[torch.Tensor] = DistributedSampler(Rows(ROWS), 3, 1, seed=4)
        return make_resumable(DataLoader(sampler.dataset, batch_size, sampler=sampler))

    (state,) = reshard_loader_states([{"given": 3, "order": get_distributed_sampler_state(loader(0, 2))}], 1, 3) or [
        None
    ]
    expected: list[Any] = build_remaining_batches(state or {}, Rows(ROWS), batch_size)
    found: list[list[float]] = []
    for count in (*given, len(expected) - sum(given)):
        again: Any = batches()
        again.load_state_dict(state)
        iterator = iter(again)
        found += [next(iterator)[..., 0].tolist() for _ in range(count)]
        state = again.state_dict()
    assert found == expected
    assert next(iterator, None) is None


def test_ranks_that_read_the_same_go_on_on_any_number_of_them(tmp_path: Path) -> None:
    class OfOnePipeline(PipelineStrategy):
        all_ranks_share_data = True

    def run(strategy: Any, ckpt_path: Path | None = None, callbacks: Any = ()) -> Net:
        torch.manual_seed(3 if ckpt_path is None else 99)
        module = Net(Rows(ROWS), batch_size=BATCH)
        used = trainer(strategy=strategy, callbacks=list(callbacks), max_epochs=3, limit_val_batches=0)
        used.fit(module, ckpt_path=ckpt_path, weights_only=True)
        return module

    path = tmp_path / "whole.ckpt"
    whole = run(OfOnePipeline(), callbacks=[Save(path, 5)])
    checkpoint = torch.load(path, weights_only=True)
    mine = checkpoint["loops"]["fit_loop"]["state_dict"]["lightning_pipe"]
    mine["ranks"] = mine["ranks"] * 4  # as four ranks of one pipeline write it
    torch.save(checkpoint, path)
    after = run(OfOnePipeline(), path)
    done = len(whole.trained) - len(after.trained)
    assert after.trained == whole.trained[done:]
    assert after.losses == whole.losses[done:]
    assert done == len(whole.trained) // 3 + 5


class OwnSampler(SequentialSampler):
    pass


class OwnLoader(DataLoader[Any]):
    pass


SHARED: dict[str, Any] = {"replacement": True, "num_samples": 99, "generator": torch.default_generator}
WITH_WORKERS: dict[str, tuple[bool, Any]] = {
    "shuffled": (True, lambda: DataLoader(Rows(8), 2, shuffle=True, num_workers=1)),
    "a sampler": (False, lambda: DataLoader(Rows(8), 2, sampler=OwnSampler(Rows(8)), num_workers=1)),
    "the shared generator": (
        False,
        lambda: DataLoader(Rows(8), 2, sampler=RandomSampler(Rows(8), **SHARED), num_workers=1),
    ),
    "a loader": (False, lambda: OwnLoader(Rows(8), 2, num_workers=1)),
    "no workers": (False, lambda: DataLoader(Rows(8), 2)),
}


@pytest.mark.parametrize("which", WITH_WORKERS)
def test_a_loader_whose_workers_fetch_and_whose_sampler_draws_at_first_draws_nothing_more(which: str) -> None:
    draws_no_more, make = WITH_WORKERS[which]
    made = make_resumable(make())
    assert loader_leaves_global_rng_unchanged(made) == draws_no_more
    if draws_no_more:
        batches = iter(made)
        next(batches)
        before = pack_rng_states(get_rng_states(torch.device("cpu")))
        assert len(list(batches)) == 3
        assert are_equal(pack_rng_states(get_rng_states(torch.device("cpu"))), before)
