"""Rows of dynamic tables that are committed and written while training goes on: those of the step of the checkpoint."""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any
from unittest import mock

import lightning.pytorch as pl
import pytest

from lightning_pipe.checkpoints.background_save import BackgroundSave
from lightning_pipe.engine import PipelineError
from lightning_pipe.recsys.dynamic.store.rocksdb_store import RocksDbStore
from lightning_pipe.recsys.dynamic.store.row_files import read_rows
from lightning_pipe.recsys.dynamic.tables.row_dump import RowDump
from tests.distributed import run_ranks
from tests.patience import HANG
from tests.recsys.dynamic.dynamic_cases import rows_of, same
from tests.scenarios.recommenders.test_dynamic_embeddings import Keeping, clicks, run
from tests.strategies.cases import ROW_WISE_ADAGRAD, loader, recsys, trainer

EVERY = 2
MODULES = {"network.bags": "people", "network.history": "past"}
BACKGROUND = {"async_checkpoints": True}


class Later(pl.Callback):
    """Lets commits go on once a step was trained after they began, or at the end."""

    def __init__(self) -> None:
        self.trained, self.waited = threading.Event(), 0

    def on_train_batch_end(self, *args: Any) -> None:
        self.trained.set()

    def on_train_end(self, *args: Any) -> None:
        self.trained.set()

    def on_exception(self, *args: Any) -> None:
        self.trained.set()

    @contextmanager
    def holding(self) -> Iterator[None]:
        add = BackgroundSave.add

        def later(saves: BackgroundSave, write: Callable[[], None]) -> Callable[[], None]:
            def work() -> None:
                assert self.trained.wait(HANG), "training waited for the commit"
                self.waited += 1
                write()

            self.trained.clear()
            return add(saves, work)

        with mock.patch.object(BackgroundSave, "add", later):
            yield


def rows_in(folder: Path) -> dict[Any, Any]:
    """Every row of a checkpoint, by module and id."""
    return {
        (module, number): (
            some.counts[row].item(),
            some.last_seen[row].item(),
            [one[row].tolist() for one in some.columns],
        )
        for module, table in MODULES.items()
        for some in read_rows(folder, table, module)
        for row, number in enumerate(some.ids.tolist())
    }


def both_ways(rank: int, world_size: int, path: Path) -> Any:
    options: dict[str, Any] = {"use_distributed_sampler": False, "enable_checkpointing": True}
    states, later = {}, Later()
    ways: dict[str, dict[str, Any]] = {"foreground": {}, "background": BACKGROUND}
    for name, strategy in ways.items():
        options["train"] = loader(48 * world_size, in_order=True, ids=400)
        callbacks = [later, Keeping(path / name, EVERY)]
        with later.holding():
            states[name] = run(
                path / f"store of {name}",
                "prefetch",
                **options,
                strategy=strategy,
                callbacks=callbacks,
                module={"cache_rows": 96 * world_size},
            )
    options["train"] = loader(48 * world_size, in_order=True, ids=400)
    losses, state = run(
        path / "store of background",
        "prefetch",
        **options,
        ckpt_path=path / "background" / f"step={EVERY}.ckpt",
        strategy=BACKGROUND,
        callbacks=[Keeping(path / "again", 100)],
        module={"cache_rows": 96 * world_size},
    )
    return states, (losses, state), later.waited


@pytest.mark.parametrize("world_size", [1, 2])
def test_checkpoints_hold_the_rows_of_their_steps_though_training_has_gone_on(world_size: int, tmp_path: Path) -> None:
    for states, (losses, state), waited in run_ranks(both_ways, world_size, tmp_path):
        whole = states["foreground"]
        assert waited >= 4
        assert states["background"][0] == whole[0]
        assert same(states["background"][1], whole[1])
        assert losses == whole[0][EVERY:]
        assert same(state, whole[1])
    steps = [f"step={step}.ckpt" for step in range(EVERY, 25, EVERY)]
    found = [rows_in(tmp_path / "background" / step) for step in steps]
    assert found == [rows_in(tmp_path / "foreground" / step) for step in steps]
    assert len(found[0]) < len(found[-1])


class Interrupting(pl.Callback):
    """Ends training with an error of the user in a step."""

    def __init__(self, step: int) -> None:
        self.step = step

    def on_train_batch_start(self, trainer: pl.Trainer, *args: Any) -> None:
        if trainer.global_step == self.step:
            raise ValueError("of the user")


def last_commit(store: Path) -> tuple[Any, dict[str, int]]:
    """Rows that a store opens with, and the number of their batches."""
    module = clicks(store, existing="keep")
    used = trainer(recsys("base", optimizer=ROW_WISE_ADAGRAD), limit_val_batches=0)
    used.validate(module, loader(8), verbose=False)
    sharded = used.strategy.sharded_model  # type: ignore[attr-defined]
    try:
        return rows_of(sharded), {name: rows.step for name, rows in sharded.dynamic_rows.items()}
    finally:
        sharded.close()


def test_automatic_commits_are_made_in_the_background_too(tmp_path: Path) -> None:
    found = {}
    ways: dict[str, dict[str, Any]] = {"foreground": {}, "background": BACKGROUND}
    for name, strategy in ways.items():
        later = Later()
        with later.holding(), pytest.raises(ValueError, match="of the user"):
            run(
                tmp_path / name,
                "prefetch",
                train=loader(64, in_order=True, ids=400),
                strategy=strategy,
                module={"commit_every": 2, "cache_rows": 96},
                callbacks=[later, Interrupting(5)],
            )
        assert (later.waited > 0) == (name == "background")
        found[name] = last_commit(tmp_path / name)
    (rows, steps), (others, other_steps) = found.values()
    assert steps == other_steps == {"network.bags": 4, "network.history": 4}
    assert same(rows, others)


def failing_store(rank: int, world_size: int, path: Path) -> str:
    """Message when rank 1 cannot write the rows of the second checkpoint, which the third one learns."""
    write = RocksDbStore.write
    commits: list[RowDump] = []

    def no_room(store: RocksDbStore, table: str, *args: Any) -> None:
        if rank == 1 and len(commits) > 2 and threading.current_thread() is not threading.main_thread():
            raise store._folder.unwritable("no room")
        write(store, table, *args)

    def counted(dump: RowDump, *args: Any, **options: Any) -> None:
        commits.append(dump)
        commit(dump, *args, **options)

    commit = RowDump.commit
    with (
        mock.patch.object(RocksDbStore, "write", no_room),
        mock.patch.object(RowDump, "commit", counted),
        pytest.raises(PipelineError) as raised,
    ):
        run(
            path / "store",
            "prefetch",
            train=loader(48 * world_size, in_order=True, ids=400),
            use_distributed_sampler=False,
            enable_checkpointing=True,
            strategy=BACKGROUND,
            callbacks=[Keeping(path / "kept", EVERY)],
        )
    return str(raised.value)


def test_a_store_that_fails_in_the_background_ends_training_on_all_ranks_at_the_last_commit(tmp_path: Path) -> None:
    for message in run_ranks(failing_store, 2, tmp_path):
        assert "no room" in message
        assert "The committed version is intact" in message
    assert [one.name for one in (tmp_path / "kept").glob("[!.]*")] == [f"step={EVERY}.ckpt"]
    for rank in range(2):
        store = tmp_path / "store" / "bags" / "ranks-2" / f"rank-{rank}"
        assert [one.name for one in store.glob("version.*")] == ["version.1"]
