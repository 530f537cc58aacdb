"""Caches of a sharded dynamic module on one rank, their store, and the rows that a batch pins in them."""

from __future__ import annotations

import reprlib
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from itertools import groupby
from operator import itemgetter
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torchrec.sparse.jagged_tensor import KeyedJaggedTensor

from lightning_pipe._compat.torchrec import copy_kjt_with_tensors
from lightning_pipe.checkpoints.background_save import BackgroundSave
from lightning_pipe.engine.common.errors import InputError, SetupError
from lightning_pipe.engine.ranks.object_collectives import all_gather_objects, run_on_all_ranks
from lightning_pipe.recsys.dynamic.cache.row_cache import RowCache
from lightning_pipe.recsys.dynamic.cache.ticket import PinnedCacheSlots
from lightning_pipe.recsys.dynamic.store.buffered_store import SharedStore
from lightning_pipe.recsys.dynamic.store.row_files import Columns, StoredRows, check_row_files, read_rows, write_rows
from lightning_pipe.recsys.dynamic.tables.batch_ids import copy_ids_to_host, prefetch_with_device_lookup
from lightning_pipe.recsys.dynamic.tables.id_mixing import get_owned_id_mask, mix_ids
from lightning_pipe.recsys.dynamic.tables.row_dump import RowCommit, restore_original_row_ids
from lightning_pipe.recsys.kernels.row_adam import RowAdam
from lightning_pipe.recsys.modules.dynamic_modules import ExistingRows


class BatchRows:
    """Rows pinned for a batch, and its features with slots instead of ids, or the error of the prefetch.

    The rows are released on garbage collection if an exception prevents :meth:`end`.
    """

    def __init__(
        self,
        features: KeyedJaggedTensor | None,
        tickets: Sequence[tuple[RowCache, PinnedCacheSlots]],
        tables: RowTables,
        error: Exception | None = None,
    ) -> None:
        self.features = features
        self.error = error
        self._tickets = list(tickets)
        self.tables = tables
        self._step = 0

    def begin_batch_and_count_ids(self) -> None:
        """Count the batch's ids, before its rows are looked up and trained."""
        self._step = self.tables.next_step()
        for cache, ticket in self._tickets:
            cache.begin_batch_and_count_ids(ticket, self._step)

    def reset_expired_rows(self) -> None:
        """Restart expired rows, before a lookup without training."""
        for cache, ticket in self._tickets:
            cache.reset_expired_rows(ticket, self.tables.trained_step)

    def release(self, trained: bool) -> None:
        """Release the rows after training, or because they will not be trained. A second call has no effect."""
        tickets, self._tickets = self._tickets, []
        for cache, ticket in tickets:
            if trained:
                cache.end_trained(ticket)
            else:
                cache.end_untrained(ticket)
        if tickets and trained:
            self.tables.trained_step = max(self.tables.trained_step, self._step)


def end_lookups(batches: Sequence[BatchRows], trained: bool) -> None:
    """End all lookups of one step, in which a module may have been called several times."""
    for rows in batches:
        rows.release(trained)
    if trained:
        for tables in {id(rows.tables): rows.tables for rows in batches}.values():
            tables.count_step_and_commit()


class RowTables:
    """Caches of all tables, with commits, checkpoints and exports of their rows."""

    def __init__(
        self,
        caches: Mapping[str, RowCache],
        tables_of_keys: Sequence[str],
        *,
        store: SharedStore,
        group: dist.ProcessGroup,
        description: Mapping[str, Any],
        row_optimizers: Sequence[RowAdam] = (),
        commit_every: int | None = None,
        seed: int = 0,
        reseed: Callable[[int], None] | None = None,
        existing_rows: ExistingRows = "keep",
    ) -> None:
        self.caches = dict(caches)
        self.group = group
        self.description = dict(description)
        self.saves: BackgroundSave | None = None  # writes automatic commits, if they are in the background
        self._store = store
        self._dump: RowCommit | None = None
        # True from the step after which an automatic commit is due until it begins.
        self._due = self._repeats_training = False
        self._wait_for_commit: Callable[[], None] = lambda: None
        self._ranks = group.size()
        self._row_optimizers = list(row_optimizers)
        self._commit_every = commit_every
        # Numbers of the last batch that has begun, which becomes ``last_seen`` of its rows, and the last trained one.
        self.step = self.trained_step = 0
        self._uncommitted = 0
        self._module_seed = self._seed = seed
        self._reseed = reseed
        self._existing_rows: ExistingRows = existing_rows if store.base.current_state.committed > 0 else "keep"
        # True if the store may differ from the last commit.
        self._changed = False
        # The keys of a table are adjacent, so its ids are one contiguous slice of the values.
        runs = [[position for position, _ in run] for _, run in groupby(enumerate(tables_of_keys), itemgetter(1))]
        self._runs = [(tables_of_keys[run[0]], run[0], run[-1] + 1) for run in runs]
        self._restore_training_progress(store.base.notes())

    # ------------------------------------------------------------------ batches

    def next_step(self) -> int:
        """Begin a batch and return its number."""
        self.step += 1
        self._changed = True
        return self.step

    def count_step_and_commit(self) -> None:
        """Count a training step. After every ``commit_every`` steps, commit on all ranks together.

        In the background, the commit begins with the next batch, because a checkpoint may come first.
        """
        if self._repeats_training:
            return
        self._uncommitted += 1
        if self._uncommitted == self._commit_every:
            self._due = True
            if self.saves is None:
                self.commit()

    def commit_if_due(self) -> None:
        """Begin an automatic commit that is due, unless a checkpoint has made it. Collective, before a batch begins."""
        saves = self.saves
        if not self._due or self._repeats_training:
            return
        if saves is None:
            self.commit()
            return
        self._wait_for_commit()
        dump = self.create_commit()
        self._run_on_all_ranks(dump.copy_changes)
        self._wait_for_commit = saves.add(lambda: dump.commit(saves.group))
        dump.mark_commit_queued()

    def prefetch(self, features: KeyedJaggedTensor, *, replay: bool = False) -> BatchRows:
        """Cache the rows of a batch and pin them until the batch ends. Does not communicate."""
        offsets = features.offset_per_key()
        tickets: list[tuple[RowCache, PinnedCacheSlots]] = []
        try:
            self._apply_existing_rows_option()
            self._changed = True
            # One copy of a batch in each direction, for all tables. Only this thread waits, and only for the copy.
            values = features.values()
            runs = [(self.caches[table], slice(offsets[begin], offsets[end])) for table, begin, end in self._runs]
            lookups = [(cache, cache.ids, values[where]) for cache, where in runs if cache.ids is not None]
            if self._repeats_training and not replay:
                for cache, where in runs:
                    cache.evict_before_repeated_prefetch(values[where])
            if lookups:
                on_device = torch.cat(prefetch_with_device_lookup(lookups, tickets))
            else:
                ids = copy_ids_to_host(values)
                slots = torch.empty_like(ids, pin_memory=values.is_cuda)
                for cache, where in runs:
                    ticket = cache.prefetch(ids[where])
                    tickets.append((cache, ticket))
                    slots[where] = ticket.slots
                on_device = slots.to(values.device, non_blocking=True)
        except Exception as error:
            for cache, ticket in tickets:
                cache.end_untrained(ticket)
            return BatchRows(None, (), self, error)
        return BatchRows(copy_kjt_with_tensors(features, values=on_device), tickets, self)

    def _apply_existing_rows_option(self) -> None:
        """Apply *existing_rows* to rows of an earlier run, before their first use and if no checkpoint was read."""
        self.check_no_existing_rows()
        if self._existing_rows == "forget":
            self.discard_all_rows()

    def check_no_existing_rows(self) -> None:
        """Raise SetupError if rows of an earlier run exist, *existing_rows* is ``refuse`` and no rows were read."""
        if self._existing_rows == "refuse":
            raise SetupError(
                f"the store of {', '.join(self.caches)} holds rows that an earlier run has trained in {self.step}"
                " batches, but no checkpoint was loaded. Resume from that run's checkpoint, use an empty folder, or"
                " give the module existing_rows='keep' to continue with the rows (and new dense parameters) or"
                " existing_rows='forget' to start without them"
            )

    # ------------------------------------------------------------------ repeated training

    @contextmanager
    def repeated_training(self) -> Iterator[None]:
        """Context in which the same batches may be trained repeatedly. Nothing is written to disk.

        The caller restores a :meth:`snapshot` before the end. Evicted rows take host memory.
        """
        self._wait_for_background_commit()
        for cache in self.caches.values():
            cache.set_repeated_training(True)
        self._store.buffer_writes()
        self._repeats_training = True
        try:
            yield
        finally:
            self._repeats_training = False
            for cache in self.caches.values():
                cache.set_repeated_training(False)
            self._store.discard_writes()

    def snapshot(self) -> tuple[Any, ...]:
        """Copy of all cached rows in host memory, and of the progress, in repeated training."""
        caches = [cache.snapshot() for cache in self.caches.values()]
        steps = [optimizer.steps for optimizer in self._row_optimizers]
        return caches, self._store.snapshot(), steps, self.step, self.trained_step

    def restore(self, snapshot: tuple[Any, ...]) -> None:
        """Restore a snapshot."""
        caches, pending, steps, self.step, self.trained_step = snapshot
        for cache, cache_snapshot in zip(self.caches.values(), caches, strict=True):
            cache.restore(cache_snapshot)
        self._store.restore(pending)
        for optimizer, number in zip(self._row_optimizers, steps, strict=True):
            optimizer.steps = number

    # ------------------------------------------------------------------ on disk

    @property
    def last_commit_id(self) -> str:
        """Name of the last commit: a unique text, the same on every rank."""
        return self._store.base.notes().get("version", "")

    def commit(self) -> str:
        """Commit the current rows, with which every rank reopens after a crash. Collective."""
        dump = self.create_commit()
        dump.commit(self.group)
        return self.last_commit_id

    def create_commit(self) -> RowCommit:
        """Prepare a commit and a checkpoint of the current rows. Collective. Waits for an earlier one."""
        self._run_on_all_ranks(self._wait_for_commit_and_flush_writes)
        self._uncommitted, self._due = 0, False
        self._dump = RowCommit(
            self.caches,
            self._store,
            self.group,
            self.description,
            self.get_training_progress(),
            self._set_all_rows_stored_flag,
        )
        return self._dump

    def _set_all_rows_stored_flag(self, complete: bool) -> None:
        """Called when rows are copied or flushed, and if they could not be written."""
        self._changed = not complete

    def _wait_for_background_commit(self) -> None:
        """Wait until no commit in the background uses the store. An error of it is raised where the save is awaited."""
        if self._dump is not None:
            self._dump.wait_or_abandon()
            self._dump = None

    def _wait_for_commit_and_flush_writes(self) -> None:
        """Wait for a commit, and write evictions that it has held back."""
        self._wait_for_background_commit()
        self._store.flush_writes()
        self._apply_existing_rows_option()

    def rows(self, table: str, since: int = 0) -> Iterator[StoredRows]:
        """Yield this rank's rows of a table in chunks, in any order, as of the last trained batch."""
        self._wait_for_commit_and_flush_writes()
        return map(restore_original_row_ids, self.caches[table].flush_and_scan_rows(since=since))

    def write_row_files(self, folder: Path, since: int = 0) -> None:
        """Write this rank's rows to files, which :meth:`replace_rows_from_files` reads."""
        for table in self.caches:
            write_rows(folder, table, self.group.rank(), self._ranks, self.rows(table, since))

    def get_training_progress(self) -> dict[str, str]:
        """Progress of training, stored together with written rows: step, seed and optimizer steps, as texts.

        As for the rows, batches that are looked up but not trained have not begun.
        """
        steps = ",".join(str(optimizer.steps) for optimizer in self._row_optimizers)
        step = min((begun - 1 for cache in self.caches.values() for begun in cache.begun_steps()), default=self.step)
        return {"step": str(step), "seed": str(self._seed), "optimizer_steps": steps}

    def replace_rows_from_files(
        self, folder: Path, progress: Mapping[str, str], *, version: str | None, with_states: bool
    ) -> None:
        """Replace all rows by those that any number of ranks has written, and commit them. Collective."""
        self._wait_for_background_commit()
        same = with_states and bool(version) and version == self.last_commit_id and not self._changed
        if not all(all_gather_objects(same, self.group)):
            # All files are checked before any row is discarded.
            columns: dict[str, Columns] = {
                table: cache.column_shapes_and_dtypes for table, cache in self.caches.items()
            }
            self._run_on_all_ranks(lambda: check_row_files(folder, columns))
            self._run_on_all_ranks(lambda: self._clear_and_load_row_files(folder, with_states))
        self._existing_rows = "keep"
        self._restore_training_progress(
            progress if with_states else {name: progress.get(name, "") for name in ("step", "seed")}
        )
        if self._changed:
            self.commit()

    def _clear_and_load_row_files(self, folder: Path, with_states: bool) -> None:
        self._changed = True
        self._store.discard_writes()
        for table, cache in self.caches.items():
            cache.clear_without_writing()
            self._erase_stored_table(table)
            for rows in read_rows(folder, table):
                self._store_rows_owned_by_rank(cache, rows, with_states)

    def _run_on_all_ranks(self, work: Callable[[], Any]) -> None:
        run_on_all_ranks(work, "rows cannot be read or written", self.group, InputError)

    def purge(self) -> int:
        """Erase expired rows and return their number. Scans the whole store."""
        self._wait_for_commit_and_flush_writes()
        self._changed = True
        return sum(cache.erase_expired_rows(self.step) for cache in self.caches.values())

    def discard_all_rows(self) -> None:
        """Discard all rows. Every rank calls it at the same point of training."""
        self._wait_for_background_commit()
        self._store.discard_writes()
        self._existing_rows = "keep"
        self._changed = True
        for table, cache in self.caches.items():
            cache.clear_without_writing()
            self._erase_stored_table(table)
        self._restore_training_progress({})

    def close(self) -> None:
        """Release the store; uncommitted changes are lost. Garbage collection of the module does the same."""
        self._wait_for_background_commit()
        self._store.base.close()

    def __del__(self) -> None:
        if "_dump" in self.__dict__:
            self.close()

    def _erase_stored_table(self, table: str) -> None:
        for keys, _ in self._store.base.scan(table):
            self._store.base.erase(table, keys)

    def _store_rows_owned_by_rank(self, cache: RowCache, rows: StoredRows, with_states: bool) -> None:
        mixed = mix_ids(rows.ids)
        local_rows = get_owned_id_mask(mixed, self._ranks, self.group.rank()).nonzero()[:, 0]
        if not len(local_rows):
            return
        weights, *states = (column[local_rows] for column in rows.columns)
        if not with_states:
            states = [torch.zeros_like(state) for state in states]
        headers = torch.stack([rows.counts[local_rows], rows.last_seen[local_rows]], dim=1)
        records = [part.reshape(len(local_rows), -1).view(torch.uint8) for part in (headers, weights, *states)]
        self._store.base.write(cache.table, mixed[local_rows].numpy(), torch.cat(records, dim=1).numpy())

    def _restore_training_progress(self, progress: Mapping[str, str]) -> None:
        optimizers = len(self._row_optimizers)
        step, seed, steps = _parse_training_progress(progress, self.caches, self._module_seed, optimizers)
        self.step = self.trained_step = step
        if self._reseed is not None:
            # New rows get the initial values that they would have had in the original run.
            self._seed = seed
            self._reseed(seed)
        self._uncommitted = 0
        for optimizer, number in zip(self._row_optimizers, steps, strict=True):
            optimizer.steps = number


def _parse_training_progress(
    progress: Mapping[str, str], tables: Iterable[str], seed: int, optimizers: int
) -> tuple[int, int, list[int]]:
    """Parse the result of ``RowTables.get_training_progress``."""
    try:
        step, saved_seed = int(progress.get("step", "0")), int(progress.get("seed") or seed)
        steps = [int(number) for number in progress.get("optimizer_steps", "").split(",") if number]
    except (AttributeError, TypeError, ValueError):
        step, saved_seed, steps = -1, 0, []
    if not all(0 <= number < 1 << 63 for number in [step, *steps]) or len(steps) not in (0, optimizers):
        raise SetupError(
            f"the rows of {', '.join(tables)} were written with the progress {reprlib.repr(progress)}; expected step,"
            f" seed and {optimizers} optimizer_steps, as texts of whole numbers. Restore the original file, or resume"
            " from another checkpoint"
        )
    return step, saved_seed, steps or [0] * optimizers
