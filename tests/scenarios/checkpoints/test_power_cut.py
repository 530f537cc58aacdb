"""After a power cut there is the old state or the new one, whole, and the new one once it was promised.

A replay cannot cut the power. It records what the code asks of the file system, and reads every state that a file
system may then have kept; see ``power_cuts``. Each sync that the code makes is needed by one of these replays.
"""

from __future__ import annotations

import os
import shutil
import tempfile
from collections.abc import Iterator
from concurrent import futures
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from lightning.pytorch.callbacks import ModelCheckpoint

from lightning_pipe.checkpoints import atomic_folder
from lightning_pipe.checkpoints.atomic_folder import (
    begin_folder,
    finish_folder,
    folder_to_write,
    remove_folder,
    restore_half_replaced_folder,
)
from lightning_pipe.checkpoints.background_save import BackgroundSave
from lightning_pipe.checkpoints.folder_reading import read_extra_state, read_full_state, read_metadata
from lightning_pipe.engine import PipelinePlan, PipelineTask, SetupError, TaskSchedule
from lightning_pipe.recsys.dynamic.store.rocksdb_store import RocksDbStore
from lightning_pipe.recsys.dynamic.store.row_files import StoredRows, read_rows, write_rows
from lightning_pipe.recsys.dynamic.store.row_store import RankStoreIdentity
from lightning_pipe.strategies.auto_plan_options import write_choice
from tests.scenarios.checkpoints.disk_recorder import Point, Recording, recorded
from tests.scenarios.checkpoints.power_cuts import Replay
from tests.scenarios.recommenders.test_dynamic_embeddings import clicks as dynamic_clicks
from tests.strategies import llm_cases
from tests.strategies.cases import ADAGRAD, Clicks, Sequenced, loader, recsys, trainer

# Some seconds of work each, which other work on the machine may make minutes: this is for hangs.
pytestmark = [pytest.mark.exhaustive, pytest.mark.timeout(1800)]

WIDTHS = {"a": 24, "b": 8}


@pytest.fixture
def place() -> Iterator[Path]:
    """An empty folder in memory, where a sync costs nothing; on the disk where there is no such place."""
    with tempfile.TemporaryDirectory(dir="/dev/shm" if os.access("/dev/shm", os.W_OK) else None) as folder:
        yield Path(folder)


def check(replay: Replay) -> list[str]:
    """Every state is promised.

    Returns:
        The syncs, innermost function first, without which every state would be promised, too.
    """
    broken = next(replay.broken(), None)
    assert broken is None, broken
    return [site for site, syncs in replay.sites.items() if not any(map(replay.without, syncs))]


# ---------------------------------------------------------------------- folders


def texts(folder: Path) -> Any:
    """What a folder and those in it hold, where it is there; one that was put aside is put back first."""
    restore_half_replaced_folder(folder)
    if not folder.exists():
        return None
    assert folder.is_dir()
    return {str(file.relative_to(folder)): file.read_text() for file in folder.rglob("*") if file.is_file()}


def write_texts(folder: Path, text: str) -> None:
    permissions = begin_folder(folder)
    (folder_to_write(folder) / "below" / "it").mkdir(parents=True)
    for name in ("one", "below/two", "below/it/three"):
        (folder_to_write(folder) / name).write_text(f"{text} {name}")
    finish_folder(folder, permissions)


@pytest.mark.parametrize("exchange", [True, False], ids=["in one step", "in two"])
def test_a_folder_is_as_it_was_or_as_it_was_written(
    exchange: bool, place: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    if not exchange:
        monkeypatch.setattr(atomic_folder, "_exchange_paths_atomically", lambda one, other: False)
    root, folder = place / "root", place / "root" / "made" / "by" / "it"
    root.mkdir()
    with recorded(root) as recording:
        recording.mark("nothing")
        for text in ("first", "second"):
            write_texts(folder, text)
            recording.mark(text)
        remove_folder(folder)
        recording.mark("removed")
    replay = Replay(recording, lambda state: texts(state / "made" / "by" / "it"), place / "state")
    assert replay.value("first") == {name: f"first {name}" for name in ("one", "below/two", "below/it/three")}
    assert (replay.value("nothing"), replay.value("removed")) == (None, None)
    assert check(replay) == []


# ---------------------------------------------------------------------- stores


def open_store(folder: Path) -> RocksDbStore:
    return RocksDbStore(folder, WIDTHS, {"a": {"dimension": 2}}, readers=1)


def read_store(folder: Path, version: int | None) -> Any:
    store = open_store(folder)
    try:
        state = store.current_state
        store.recover(state.committed if version is None else version)
        rows = {
            (table, key): record.tobytes()
            for table in WIDTHS
            for keys, records in store.scan(table)
            for key, record in zip(keys.tolist(), records, strict=True)
        }
        return state, store.notes(), rows
    finally:
        store.close()


def committed_and_prepared(root: Path) -> Any:
    folder, copy = root / "made" / "store", root.with_name("copy")
    shutil.rmtree(copy, ignore_errors=True)
    shutil.copytree(root, copy)
    found = read_store(folder, None)
    prepared = found[0].prepared
    return found, None if prepared is None else read_store(copy / "made" / "store", prepared)


def fill(store: RocksDbStore, version: int) -> None:
    for table, width in WIDTHS.items():
        store.write(table, np.arange(3) * version, np.full((3, width), version, np.uint8))
    store.erase("a", np.array([version]))


def of_engine(path: str) -> bool:
    """Where RocksDB makes and removes names by itself."""
    return "working/" in path or ".new/" in path or path.endswith(".new")


def has_synced(path: str) -> bool:
    """RocksDB syncs a file of records before anything else names it."""
    return path.endswith(".sst")


def test_a_store_is_at_the_version_before_or_at_the_next(place: Path) -> None:
    root = place / "root"
    root.mkdir()

    with recorded(root, of_engine, has_synced) as recording:
        store = open_store(root / "made" / "store")
        recording.mark("new")
        store.write_identity(RankStoreIdentity("abc", 0, 1))
        recording.mark("joined")
        store.recover(0)
        for version in (1, 2):
            fill(store, version)
            store.prepare_commit(version, {"step": str(version)})
            recording.mark(f"prepared {version}")
            store.commit(version)
            recording.mark(f"committed {version}")
        store.close()
        store = open_store(root / "made" / "store")
        store.recover(2)
        fill(store, 3)
        store.prepare_commit(3)
        recording.mark("prepared 3")
        store.close()
        store = open_store(root / "made" / "store")
        store.recover(3)
        recording.mark("settled at 3")
        store.close()
    check(Replay(recording, committed_and_prepared, place / "state", ignored={"working"}))


def test_a_version_that_is_abandoned_takes_nothing_with_it(place: Path) -> None:
    root = place / "root"
    root.mkdir()
    with recorded(root, of_engine, has_synced) as recording:
        recording.mark("nothing")
        store = open_store(root)
        store.recover(0)
        fill(store, 1)
        store.prepare_commit(1)
        store.commit(1)
        recording.mark("committed 1")
        fill(store, 2)
        store.prepare_commit(2)
        store.close()
        store = open_store(root)
        store.recover(1)
        fill(store, 3)
        store.prepare_commit(2)
        recording.mark("prepared again")
        store.commit(2)
        recording.mark("committed 2")
        store.close()

    def committed(state: Path) -> Any:
        found, notes, rows = read_store(state, None)
        return found.committed, notes, rows

    replay = Replay(recording, committed, place / "state", ignored={"working"})
    assert replay.value("committed 1") == replay.value("prepared again")
    check(replay)


# ---------------------------------------------------------------------- rows, checkpoints, exports, plans


def rows(first: int) -> StoredRows:
    ids = torch.arange(first, first + 3)
    return StoredRows(ids, ids + 1, ids + 2, [ids.float()[:, None].expand(-1, 2).contiguous()])


def read_all_rows(folder: Path, *modules: str) -> Any:
    """Every row of every module's table, by its id."""
    found = {}
    for module in modules:
        for some in read_rows(folder, "users", module):
            for row, number in enumerate(some.ids.tolist()):
                values = [column[row].tolist() for column in some.columns]
                found[module, number] = (some.counts[row].item(), some.last_seen[row].item(), values)
    return found


def test_rows_are_there_once_they_are_written(place: Path) -> None:
    root = place / "root"
    root.mkdir()
    with recorded(root) as recording:
        recording.mark("nothing")
        write_rows(root / "made" / "rows" / "bags", "users", 0, 1, iter([rows(0), rows(100)]))
        recording.mark("written")

    def read(state: Path) -> Any:
        try:
            return read_all_rows(state / "made", "bags")
        except SetupError:
            return "refused"  # as unfinished

    replay = Replay(recording, read, place / "state")
    assert (replay.value("nothing"), len(replay.value("written"))) == ("refused", 6)
    assert check(replay) == []


def plain(value: Any) -> Any:
    """A value of a checkpoint such that two can be compared."""
    if isinstance(value, torch.Tensor):
        return str(value.dtype), tuple(value.shape), value.numpy().tobytes()
    if isinstance(value, dict):
        return {key: plain(one) for key, one in value.items()}
    return [plain(one) for one in value] if isinstance(value, (list, tuple)) else value


def read_checkpoint(folder: Path) -> Any:
    """All that a checkpoint holds."""
    saved = read_metadata(folder, ("model", "state_dict"), "")
    beside = folder.with_name(f".{folder.name}.values")
    beside.mkdir()
    found = plain([read_full_state(folder, saved, None, None, beside), read_extra_state(folder, None)])
    tables = {(file.parent.name, file.name.partition(".rank-")[0]) for file in folder.glob("rows/*/*.pt")}
    return [found, {one: [plain(vars(some)) for some in read_rows(folder, one[1], one[0])] for one in tables}]


def read_checkpoints(folder: Path) -> Any:
    """All that checkpoints in a folder hold, by their names."""
    places = sorted({one.name for one in folder.glob("[!.]*")}) if folder.exists() else []
    return {name: read_checkpoint(folder / name) for name in places}


class Keeping(ModelCheckpoint):
    """Keeps the last, at every other step, and says what is promised when."""

    def __init__(self, folder: Path, recording: Recording, *, promises: bool) -> None:
        super().__init__(folder, filename="{step}", every_n_train_steps=2, save_top_k=1)
        self._recording, self._promises = recording, promises

    def _save_checkpoint(self, trainer: Any, filepath: str) -> None:
        super()._save_checkpoint(trainer, filepath)
        if self._promises:
            self._recording.mark(f"saved {Path(filepath).name}")

    def _remove_checkpoint(self, trainer: Any, filepath: str) -> None:
        super()._remove_checkpoint(trainer, filepath)
        if self._promises:
            self._recording.mark(f"removed {Path(filepath).name}")


def keep(kind: str, root: Path, store: Path, recording: Recording, monkeypatch: pytest.MonkeyPatch) -> None:
    """Train six steps, of which every other leaves a checkpoint in place of the one before."""
    in_background = "background" in kind
    options: dict[str, Any] = {
        "max_steps": 6,
        "enable_checkpointing": True,
        "callbacks": [Keeping(root / "made" / "kept", recording, promises=not in_background)],
    }
    if in_background:
        mark_waits(recording, monkeypatch)
    if "stages" in kind:
        strategy = llm_cases.llm(async_checkpoints=in_background)
        used = llm_cases.trainer(strategy, **options)
        used.fit(llm_cases.Tiny(2), llm_cases.loader(llm_cases.row_batches(6, rows=8)))
        return
    used = trainer(recsys("base", optimizer=ADAGRAD, async_checkpoints=in_background), **options)
    used.fit(dynamic_clicks(store) if "dynamic" in kind else Clicks(Sequenced), loader())
    used.strategy.sharded_model.close()  # type: ignore[attr-defined]


def mark_waits(recording: Recording, monkeypatch: pytest.MonkeyPatch) -> None:
    """A save in the background is promised when it was waited for, and only then what is removed after it is."""
    wait = BackgroundSave.wait

    def waits(saves: BackgroundSave) -> None:
        saving, number = list(saves._saving), len(recording.events)
        if saving:
            futures.wait(saving)
            recording.mark(f"saved {number}")
        wait(saves)
        if saving:
            recording.mark(f"removed {number}")

    monkeypatch.setattr(BackgroundSave, "wait", waits)


@pytest.mark.parametrize("kind", ["tables", "stages", "dynamic tables, in the background"])
def test_there_is_always_a_whole_checkpoint(kind: str, place: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    root = place / "root"
    root.mkdir()
    with recorded(root) as recording:
        recording.mark("nothing")
        keep(kind, root, place / "store", recording, monkeypatch)
    replay = Replay(recording, lambda state: read_checkpoints(state / "made" / "kept"), place / "state")
    found = [len(replay.value(event.name)) for event in recording.events if isinstance(event, Point)]
    assert found == ([0, 1, 1, 2, 1, 2, 1] if "background" in kind else [0, 1, 2, 1, 2, 1])
    unneeded = [site for site in check(replay) if not site.startswith("filesystem.")]
    # Rows are synced for themselves, and once more with their checkpoint.
    assert "dynamic" in kind or unneeded == []


def test_a_plan_is_as_it_was_or_as_it_was_written(place: Path) -> None:
    root = place / "root"
    root.mkdir()
    tasks = {name: PipelineTask(name, lambda ctx: None) for name in ("first", "second")}
    plans = {name: PipelinePlan({task: TaskSchedule()}) for name, task in tasks.items()}
    with recorded(root) as recording:
        recording.mark("nothing")
        for name, plan in plans.items():
            write_choice(plan.to_yaml, root / "made" / "plan.yaml", "the plan")
            recording.mark(name)

    def read(state: Path) -> Any:
        file = state / "made" / "plan.yaml"
        name = next(name for name in tasks if name in file.read_text()) if file.exists() else None
        return name and PipelinePlan.from_yaml(file.read_text(), [tasks[name]]).to_yaml()

    replay = Replay(recording, read, place / "state")
    assert [replay.value(name) for name in ("nothing", *plans)] == [None, *(plan.to_yaml() for plan in plans.values())]
    assert check(replay) == []
