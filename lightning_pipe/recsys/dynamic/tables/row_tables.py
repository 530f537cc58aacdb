"""The caches of one sharded dynamic module on one rank, and the store behind them."""

from __future__ import annotations

import reprlib
import secrets
from collections.abc import Callable, Iterator, Mapping, Sequence
from itertools import groupby
from operator import itemgetter
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torchrec.sparse.jagged_tensor import KeyedJaggedTensor

from lightning_pipe._compat.torchrec import with_tensors
from lightning_pipe.engine.common.errors import InputError, SetupError
from lightning_pipe.engine.ranks.together import gather, on_all_ranks
from lightning_pipe.recsys.dynamic.cache.row_cache import RowCache
from lightning_pipe.recsys.dynamic.cache.ticket import Ticket
from lightning_pipe.recsys.dynamic.store.commit import commit_together
from lightning_pipe.recsys.dynamic.store.row_files import Columns, StoredRows, check_rows, read_rows, write_rows
from lightning_pipe.recsys.dynamic.store.row_store import RowStore
from lightning_pipe.recsys.dynamic.tables.batch_rows import BatchRows
from lightning_pipe.recsys.dynamic.tables.id_mixing import mix, unmix
from lightning_pipe.recsys.kernels.row_adam import RowAdam
from lightning_pipe.recsys.modules.dynamic_modules import Existing

__all__ = ["RowTables"]


class RowTables:
    """Caches by table, and what brings them to disk.

    Args:
        caches: each table's.
        tables_of_keys: for each key of the distributed features, in order, the table that it is looked up in.
        store: this rank's, opened together with the other ranks'.
        group: the ranks that share the ids.
        description: of the tables, in plain types, the same on every rank.
        row_optimizers: what trains tables in place of fused kernels.
        commit_every: batches between two commits; None for none but those that are asked for.
        seed: of initial values, for rows that are made from nothing.
        reseed: has new rows made of another seed; None where the user has said which.
        existing: what becomes of the rows that the store was opened with, unless others are read: ``refuse`` to go on,
            ``keep`` them, or ``forget`` them.
    """

    def __init__(
        self,
        caches: Mapping[str, RowCache],
        tables_of_keys: Sequence[str],
        *,
        store: RowStore,
        group: dist.ProcessGroup,
        description: Mapping[str, Any],
        row_optimizers: Sequence[RowAdam] = (),
        commit_every: int | None = None,
        seed: int = 0,
        reseed: Callable[[int], None] | None = None,
        existing: Existing = "keep",
    ) -> None:
        self.caches = dict(caches)
        self.group = group
        self.description = dict(description)
        self._store = store
        self._ranks = group.size()
        self._row_optimizers = list(row_optimizers)
        self._commit_every = commit_every
        self._step = self._trained_step = self._uncommitted = 0
        self._own_seed = self._seed = seed
        self._reseed = reseed
        self._existing: Existing = existing if store.state.committed > 0 else "keep"
        # Whether the store may differ from what was committed last.
        self._changed = False
        # Keys of one table follow one another, so that its ids are one piece of the values.
        runs = [[position for position, _ in run] for _, run in groupby(enumerate(tables_of_keys), itemgetter(1))]
        self._runs = [(tables_of_keys[run[0]], run[0], run[-1] + 1) for run in runs]
        self._set_progress(store.notes())

    # ------------------------------------------------------------------ batches

    @property
    def step(self) -> int:
        """Number of the batch that has begun last: what rows are last seen in."""
        return self._step

    def next_step(self) -> int:
        """A batch begins."""
        self._step += 1
        return self._step

    @property
    def trained_step(self) -> int:
        """Number of the batch that has been trained last."""
        return self._trained_step

    def trained_up_to(self, step: int) -> None:
        """The batch of this number has been trained."""
        self._trained_step = max(self._trained_step, step)

    def step_ended(self) -> None:
        """Now and then all ranks commit the rows together."""
        self._uncommitted += 1
        if self._uncommitted == self._commit_every:
            self.commit()

    def prefetch(self, features: KeyedJaggedTensor) -> BatchRows:
        """Brings the rows of a batch into the caches, where they stay until it ends. Needs no other rank.

        Args:
            features: distributed ones, whose values are mixed ids that this rank owns.

        Returns:
            The rows; or, in them, what went wrong.
        """
        ids = features.values()
        offsets = features.offset_per_key()
        slots = torch.empty_like(ids, dtype=torch.int64)
        tickets: list[tuple[RowCache, Ticket]] = []
        try:
            self._settle_existing()
            self._changed = True
            for table, begin, end in self._runs:
                where = slice(offsets[begin], offsets[end])
                cache = self.caches[table]
                ticket = cache.prefetch(ids[where])
                tickets.append((cache, ticket))
                slots[where] = ticket.slots
        except Exception as error:
            for cache, ticket in tickets:
                cache.discard(ticket)
            return BatchRows(None, (), self, error)
        return BatchRows(with_tensors(features, values=slots), tickets, self)

    def _settle_existing(self) -> None:
        """Rows of an earlier run, now that they would be used, and no others were read."""
        self.refuse_existing()
        if self._existing == "forget":
            self.forget()

    def refuse_existing(self) -> None:
        """Raises SetupError for rows of an earlier run that nobody wants kept or forgotten, if no others were read."""
        if self._existing == "refuse":
            raise SetupError(
                f"the store of {', '.join(self.caches)} holds rows that an earlier run has trained, in {self._step}"
                " batches, and no checkpoint was loaded; needed is a store without rows, or the run's checkpoint:"
                " resume from that, name an empty folder, or give the module existing='keep' to go on from the rows"
                " (the dense parameters begin anew), or existing='forget' to begin without them"
            )

    # ------------------------------------------------------------------ on disk

    @property
    def version(self) -> str:
        """Of the rows that were committed last: a text of its own for each commit, the same on every rank."""
        return self._store.notes().get("version", "")

    def commit(self) -> str:
        """Makes the rows as they are now those that every rank opens with after a crash. All ranks call it together.

        Returns:
            its :attr:`version`.

        Raises:
            SetupError: on every rank, if any cannot write; the commit before is whole.
        """
        self._together(self._flush)
        version = gather(secrets.token_hex(8), self.group)[0]
        notes = {"version": version, **self.progress()}
        commit_together(self._store, self.group, self._store.state.committed + 1, notes)
        self._uncommitted = 0
        self._changed = False
        return version

    def _flush(self) -> None:
        self._settle_existing()
        for cache in self.caches.values():
            cache.flush()

    def rows(self, table: str, since: int = 0) -> Iterator[StoredRows]:
        """This rank's rows of a table, some at a time, in any order, as after the last trained batch.

        Args:
            since: only rows seen in a batch of at least this number.
        """
        self._settle_existing()
        for found in self.caches[table].rows(since=since):
            ids = unmix(torch.from_numpy(found.keys))
            yield StoredRows(ids, torch.tensor(found.counts), torch.tensor(found.last_seen), found.columns)

    def write(self, folder: Path, since: int = 0) -> None:
        """Writes this rank's rows; see ``rows``. What ``read`` needs beside them is in :meth:`progress`."""
        for table in self.caches:
            write_rows(folder, table, self.group.rank(), self._ranks, self.rows(table, since))

    def progress(self) -> dict[str, str]:
        """What belongs to rows that are written: how far training was."""
        steps = ",".join(str(one.steps) for one in self._row_optimizers)
        return {"step": str(self._step), "seed": str(self._seed), "optimizer_steps": steps}

    def read(self, folder: Path, progress: Mapping[str, str], *, version: str | None, with_states: bool) -> None:
        """Makes the rows those that any number of ranks have written, and commits them. All ranks call it together.

        Args:
            folder: of ``write``.
            progress: as :meth:`progress` was.
            version: the commit that was of the same rows: where the store is at it, nothing is read.
            with_states: whether to read the optimiser's states; without, they begin anew.

        Raises:
            SetupError: on every rank, if any cannot read or write.
        """
        same = with_states and bool(version) and version == self.version and not self._changed
        if not all(gather(same, self.group)):
            # Looked through before anything is forgotten.
            self._together(lambda: check_rows(folder, self._columns()))
            self._together(lambda: self._read(folder, with_states))
        self._existing = "keep"
        self._set_progress(progress if with_states else {name: progress.get(name, "") for name in ("step", "seed")})
        if self._changed:
            self.commit()

    def _columns(self) -> dict[str, Columns]:
        return {table: cache.columns for table, cache in self.caches.items()}

    def _read(self, folder: Path, with_states: bool) -> None:
        self._changed = True
        for table, cache in self.caches.items():
            cache.forget()
            self._erase(table)
            for rows in read_rows(folder, table):
                self._keep(cache, rows, with_states)

    def _together(self, work: Callable[[], Any]) -> None:
        on_all_ranks(work, "rows cannot be read or written", self.group, InputError)

    def purge(self) -> int:
        """Erases rows whose ``ttl`` is over; returns how many. Reads the store from end to end."""
        self._settle_existing()
        self._changed = True
        return sum(cache.purge(self._step) for cache in self.caches.values())

    def forget(self) -> None:
        """Rows of an earlier run are no more. All ranks do it at one point."""
        self._existing = "keep"
        self._changed = True
        for table, cache in self.caches.items():
            cache.forget()
            self._erase(table)
        self._set_progress({})

    def close(self) -> None:
        """Lets go of the store; what was not committed is lost. So does forgetting the module."""
        self._store.close()

    def __del__(self) -> None:
        store = self.__dict__.get("_store")
        if store is not None:
            store.close()

    def _erase(self, table: str) -> None:
        for keys, _ in self._store.scan(table):
            self._store.erase(table, keys)

    def _keep(self, cache: RowCache, rows: StoredRows, with_states: bool) -> None:
        mixed = mix(rows.ids)
        own = _owned(mixed, self._ranks, self.group.rank()).nonzero()[:, 0]
        if not len(own):
            return
        weights, *states = (column[own] for column in rows.columns)
        if not with_states:
            states = [torch.zeros_like(state) for state in states]
        headers = torch.stack([rows.counts[own], rows.last_seen[own]], dim=1)
        records = [part.reshape(len(own), -1).view(torch.uint8) for part in (headers, weights, *states)]
        self._store.write(cache.table, mixed[own].numpy(), torch.cat(records, dim=1).numpy())

    def _set_progress(self, progress: Mapping[str, str]) -> None:
        step, seed, steps = self._read_progress(progress)
        self._step = self._trained_step = step
        if self._reseed is not None:
            # Rows that come later are those that the run would have had.
            self._seed = seed
            self._reseed(seed)
        self._uncommitted = 0
        for optimizer, number in zip(self._row_optimizers, steps, strict=True):
            optimizer.steps = number

    def _read_progress(self, progress: Mapping[str, str]) -> tuple[int, int, list[int]]:
        """Step, seed, and the steps of each row optimiser, of what :meth:`progress` has returned."""
        try:
            step, seed = int(progress.get("step", "0")), int(progress.get("seed") or self._own_seed)
            steps = [int(number) for number in progress.get("optimizer_steps", "").split(",") if number]
        except (AttributeError, TypeError, ValueError):
            step, seed, steps = -1, 0, []
        numbers = [step, *steps]
        if not all(0 <= number < 1 << 63 for number in numbers) or len(steps) not in (0, len(self._row_optimizers)):
            raise SetupError(
                f"the rows of {', '.join(self.caches)} were written with the progress {reprlib.repr(progress)}; needed"
                f" are step, seed and optimizer_steps ({len(self._row_optimizers)}), texts of numbers: bring back the"
                " file as it was written, or go on from another checkpoint"
            )
        return step, seed, steps or [0] * len(self._row_optimizers)


def _owned(mixed: torch.Tensor, ranks: int, rank: int) -> torch.Tensor:
    """Whose number modulo *ranks*, unsigned, is *rank*: where FBGEMM sends an id."""
    # int64 has no unsigned remainder: that of the upper 63 bits, and of the lowest.
    upper = (mixed >> 1) & 0x7FFFFFFFFFFFFFFF
    return (upper.remainder(ranks) * 2 + (mixed & 1)).remainder(ranks) == rank
