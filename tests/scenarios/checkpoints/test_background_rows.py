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
from lightning_pipe.recsys.dynamic.tables.row_dump import RowCommit
from tests.distributed import run_ranks
from tests.patience import HANG
from tests.recsys.dynamic.dynamic_cases import same
from tests.scenarios.recommenders.test_dynamic_embeddings import Keeping, run
from tests.strategies.cases import loader

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


def test_checkpoints_hold_the_rows_of_their_steps_though_training_has_gone_on(tmp_path: Path) -> None:
    for states, (losses, state), waited in run_ranks(both_ways, 2, tmp_path):
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


def failing_store(rank: int, world_size: int, path: Path) -> str:
    """Message when rank 1 cannot write the rows of the second checkpoint, which the third one learns."""
    write = RocksDbStore.write
    commits: list[RowCommit] = []

    def no_room(store: RocksDbStore, table: str, *args: Any) -> None:
        if rank == 1 and len(commits) > 2 and threading.current_thread() is not threading.main_thread():
            raise store._folder.unwritable_error("no room")
        write(store, table, *args)

    def counted(dump: RowCommit, *args: Any, **options: Any) -> None:
        commits.append(dump)
        commit(dump, *args, **options)

    commit = RowCommit.commit
    with (
        mock.patch.object(RocksDbStore, "write", no_room),
        mock.patch.object(RowCommit, "commit", counted),
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
