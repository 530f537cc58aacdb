"""Data of an epoch: loaders, batches in flight, random streams, and the point at which a run resumes.

The training loop decides when batches are trained. This module decides which batch comes next, where it comes from, and
which state of the data a checkpoint contains.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from functools import partial
from typing import Any

import lightning.pytorch as pl
import torch.distributed as dist
from lightning.fabric.utilities.data import sized_len
from lightning.pytorch.utilities.combined_loader import CombinedLoader

from lightning_pipe._compat.lightning import DataFetcher, DataLoaderIterDataFetcher
from lightning_pipe.engine.ranks.batch_status import BatchStatusExchange
from lightning_pipe.loops.data.batch_source import BatchSource, Fetched, SynchronizedBatchSource, UnevenPolicy
from lightning_pipe.loops.data.ledger import InFlightLedger
from lightning_pipe.loops.data.random_streams import RandomStreams, get_rng_states, set_rng_states
from lightning_pipe.loops.data.resumable_loader import (
    LoaderState,
    loader_leaves_global_rng_unchanged,
    was_made_resumable,
)
from lightning_pipe.loops.data.resume import ResumePoint
from lightning_pipe.loops.data.stateful_loaders import (
    get_positions_after_last_batch,
    get_states_of_next_iterators,
    iterator_states,
    load_iterator_states,
    loader_states,
    positions_at_end,
)
from lightning_pipe.loops.data.termination import SynchronizedTermination
from lightning_pipe.loops.programs.batch_hooks import BatchTransferHooks


class EpochData:
    """One rank's data while a trainer fits.

    Attributes:
        statuses: exchange of the status of each rank's next batch.
    """

    def __init__(self, trainer: pl.Trainer) -> None:
        self._trainer = trainer
        self.ledger: InFlightLedger | None = None
        self.resume_point: ResumePoint | None = None
        self.fetch_seconds = 0.0
        self._fetcher: DataFetcher | None = None
        self._source: BatchSource | None = None
        self._streams: RandomStreams | None = None
        self.statuses = BatchStatusExchange()
        self._unread: list[Callable[[], Fetched]] = []
        self._is_cut = False
        self._initial: dict[str, Any] = {}
        self._beginning: dict[str, Any] | None = None
        self._resumed: ResumePoint | None = None
        self._iterators_due = False
        self._hooks: BatchTransferHooks | None = None
        self._left: ResumePoint | None = None
        self._before_batch: dict[str, Any] | None = None
        self._draws = self._draws_again = True

    # ------------------------------------------------------------------ an epoch

    def restore_generators(self, fetcher: DataFetcher) -> None:
        """Restore the random generators from a checkpoint, before Lightning's loop begins."""
        self._resumed, self.resume_point = self.resume_point, None
        point = self._resumed
        if point is not None:
            # A new epoch makes its iterators when its first batch is due, because a validation may run first.
            has_states = all(hasattr(loader, "load_state_dict") for loader in fetcher.combined_loader.flattened)
            has_states &= bool(point.loaders)  # empty if the checkpoint was written before the first epoch
            self._iterators_due = has_states and not point.in_mid_epoch
            if not self._iterators_due:
                set_rng_states(point.common_after_iterators, self._trainer.strategy.root_device)
        elif self._trainer.current_epoch > 0 and not self._trainer.fit_loop.is_resuming:
            ended = self._get_epoch_end_positions(fetcher)
            if self._is_cut and fetcher is self._fetcher:
                # A stateful loader may continue from the position of its last iterator.
                load_iterator_states(fetcher.combined_loader, ended.loaders, ended.iterators)
            # Lightning makes the iterators after this call.
            self.record_epoch_start(fetcher.combined_loader, ended if any(ended.iterators) else None)

    def record_epoch_start(self, combined: CombinedLoader | None, point: ResumePoint | None = None) -> None:
        """Record the positions at the beginning of an epoch, before its iterators are made.

        If Lightning's fetcher does not know the number of batches, it loads a batch as soon as the iterators are made.
        Without the recorded positions, a run that resumes within the first batch would skip that batch. Loaders of
        :func:`make_resumable` know their length.
        """
        self._beginning = None
        if combined is None:
            return
        loaders = combined.flattened
        is_ahead = any(sized_len(loader) is None for loader in loaders) and not any(map(was_made_resumable, loaders))
        if is_ahead or point is not None:
            after = get_states_of_next_iterators(combined) if point is None else point.positions()
            self._beginning = {**after, "fetch": get_rng_states(self._trainer.strategy.root_device)}

    def begin(self, fetcher: DataFetcher) -> None:
        """Begin an epoch, or continue one."""
        self._fetcher = fetcher
        self._device = self._trainer.strategy.root_device
        if isinstance(fetcher, DataLoaderIterDataFetcher):
            self.ledger = None
            return
        if self._streams is None:
            self._streams = RandomStreams(self._device)
        self._streams.restart(None if self._resumed is None else self._resumed.streams_after_iterators)
        self._hooks = BatchTransferHooks(self._trainer, self._streams)
        loaders = fetcher.combined_loader.flattened
        # Samplers draw in the first fetch. With several loaders, short ones restart within an epoch.
        self._draws, self._draws_again = (
            True,
            len(loaders) > 1 or not all(map(loader_leaves_global_rng_unchanged, loaders)),
        )
        self._initial = self._get_epoch_start_positions(fetcher)
        if self._resumed is not None and (self._resumed.in_mid_epoch or self._iterators_due):
            # Until a batch is trained, a checkpoint contains the positions from which this run was resumed.
            self._initial = {**self._resumed.positions(), **self._resumed.streams}
        unread, self._unread = self._unread, []
        fetcher.fetched += len(unread)
        if unread and fetcher.done:
            unread[-1] = partial(_fetch_as_last_batch, unread[-1])
        self._source = self._make_batch_source(fetcher, unread)
        self.ledger = InFlightLedger(self._source, keeps_batches=_continues_iterators(fetcher))

    def make_iterators(self, ready: int) -> None:
        """Make the iterators of an epoch that begins after a checkpoint, when its first batch is due."""
        if self._iterators_due and self._fetcher is not None:
            reloaded = getattr(self._trainer.fit_loop, "reloaded_since_resumption", False)
            if not reloaded:
                self._restore_loader_states(self._fetcher)
            self._iterators_due = False
            self.record_epoch_start(self._fetcher.combined_loader, None if reloaded else self._resumed)
            iter(self._fetcher)
            self._fetcher.fetched += ready
            self._initial = self._get_epoch_start_positions(self._fetcher)

    @property
    def termination_due(self) -> bool:
        """True if a rank was told to end training; the same on all ranks."""
        return self._source is not None and self._source.termination_due

    def end(self) -> None:
        """End an epoch that raised no exception."""
        if self._source is not None:
            self._source.close()
        if self._iterators_due and self._fetcher is not None:
            # The epoch had ended before the checkpoint was written, and has now ended again without a batch.
            self._restore_loader_states(self._fetcher)

    def abandon(self) -> None:
        """Abandon the batches in flight. The next epoch starts with them if it continues the same iterators."""
        if self.ledger is None or self._source is None or self._fetcher is None:
            return
        abandoned = self.ledger.abandon() + self._source.get_undelivered_batches()
        abandoned += [
            partial(self._prepare_prefetched_batch, batch) for batch, _, _ in _get_prefetched_batches(self._fetcher)
        ]
        self._unread = abandoned if _continues_iterators(self._fetcher) else []
        self._is_cut = bool(abandoned) and not self._unread

    def close(self, point: ResumePoint | None) -> None:
        """End training. A checkpoint that is written afterwards contains *point*."""
        self._left = point
        self.ledger = self._fetcher = self._source = None
        self._unread = []
        self.statuses.close()

    def discard_fetch_rng_states(self) -> None:
        """Begin a period: discard the common generator states of the previous period's fetch."""
        if self._streams is not None:
            self._streams.common = None

    def record_generator_states(self) -> None:
        """Record the states of the generators before a batch draws from them."""
        # States read by a fetch of this period are still valid: all tasks since then draw from separate streams.
        common = None if self._streams is None else self._streams.common
        self._before_batch = get_rng_states(self._device) if common is None else common

    def make_resume_point(self, *, at_end: bool, in_batch: bool = False) -> ResumePoint | None:
        """Return the resume point of a checkpoint that is written now; None before any data was read."""
        if self._fetcher is None:
            # Either a loaded resume point is not used yet, or training is over.
            return self.resume_point or self._left
        common = self._before_batch if in_batch else None
        common = common or get_rng_states(self._trainer.strategy.root_device)
        # Loaders that are reloaded for the next epoch already have a new fetcher before that epoch begins.
        fetcher = self._trainer.fit_loop._data_fetcher if at_end else None
        fetcher = self._fetcher if fetcher is None else fetcher
        if at_end:
            ended = self._get_epoch_end_positions(fetcher)
            return ResumePoint(ended.loaders, common, iterators=ended.iterators)
        last = None if self.ledger is None else self.ledger.last_done
        after = self._initial if last is None else last.after
        if self.ledger is None:  # the user's step fetches batches itself
            after = self._get_current_positions()
        streams = {name: value for name, value in after.items() if name not in ("loaders", "iterators")}
        return ResumePoint(_call_state_getters(after["loaders"]), common, streams, after["iterators"])

    # ------------------------------------------------------------------ a batch

    def move_batch_to_device(self, batch: Any) -> Any:
        """Move a batch to the device through the user's hooks. Called for batches in order."""
        assert self.ledger is not None and self._streams is not None and self._hooks is not None
        moved = self._hooks.move(batch)
        if (entry := self.ledger.pop_next_transfer()) is not None:
            entry.after["transfer"] = self._streams.get_stream_state("transfer")
        return moved

    def _fetch(self) -> Fetched:
        fetcher, streams, hooks = self._fetcher, self._streams, self._hooks
        assert fetcher is not None and streams is not None and hooks is not None
        begun = time.perf_counter()
        # If Lightning's fetcher does not know the number of batches, it reads one batch ahead. It now loads the batch
        # after this one, which a run that resumes after this batch must load again.
        ahead = bool(_get_prefetched_batches(fetcher))

        def read() -> tuple[dict[str, Any] | None, Any, bool]:
            before = (
                {**_snapshot_loader_positions(fetcher.combined_loader), "fetch": streams.get_stream_state("fetch")}
                if ahead
                else None
            )
            batch, _, _ = next(fetcher)
            return before, batch, fetcher.done

        before, batch, is_last = streams.run_with_stream("fetch", read) if self._draws else read()
        self._draws = self._draws_again
        after = before or {
            **_snapshot_loader_positions(fetcher.combined_loader),
            "fetch": streams.get_stream_state("fetch"),
        }
        batch = hooks.prepare_batch_for_transfer(batch)
        after["prepare"] = streams.get_stream_state("prepare")
        self.fetch_seconds += time.perf_counter() - begun
        return batch, is_last, after

    def _prepare_prefetched_batch(self, batch: Any) -> Fetched:
        """Return a batch that Lightning's fetcher has read ahead in the previous epoch."""
        assert self._hooks is not None
        return self._hooks.prepare_batch_for_transfer(batch), False, {"loaders": [], "iterators": []}

    # ------------------------------------------------------------------ helpers

    def _make_batch_source(self, fetcher: DataFetcher, unread: list[Callable[[], Fetched]]) -> BatchSource:
        """Return the source of an epoch. If the trainer has several ranks, all ranks agree on each batch."""
        if self._trainer.world_size == 1 or not dist.is_initialized():
            return BatchSource(self._fetch, unread)
        uneven: UnevenPolicy = getattr(self._trainer.strategy, "uneven_batches", "shortest")
        termination = SynchronizedTermination.install_in_trainer(self._trainer)
        termination.syncs_every_batch = True
        remaining = partial(_count_remaining_batches, fetcher)
        return SynchronizedBatchSource(
            self._fetch, unread, self.statuses, remaining, uneven, termination.has_local_signal
        )

    def _get_epoch_end_positions(self, fetcher: DataFetcher) -> ResumePoint:
        """Return the positions of loaders and iterators at the end of an epoch, before the next epoch replaces them."""
        combined, ledger = fetcher.combined_loader, self.ledger
        last = None if ledger is None or fetcher is not self._fetcher else ledger.last_done
        if ledger is not None and last is not None:
            before = self._initial if ledger.done_before is None else ledger.done_before.after
            loaders, iterators = get_positions_after_last_batch(combined, last.after, before, cut=not last.is_last)
        elif self._beginning is not None and _get_prefetched_batches(fetcher):  # reloaded
            loaders, iterators = get_positions_after_last_batch(
                combined, _snapshot_loader_positions(combined), self._beginning, cut=False
            )
        else:
            loaders, iterators = positions_at_end(combined)
        return ResumePoint(loaders, {}, iterators=iterators)

    def _restore_loader_states(self, fetcher: DataFetcher) -> None:
        """Reload the loaders' states, as if no iterators had been made since the checkpoint."""
        assert self._resumed is not None
        self._resumed.load_into_loaders(fetcher.combined_loader)
        self._iterators_due = False

    def _get_epoch_start_positions(self, fetcher: DataFetcher) -> dict[str, Any]:
        """Return the positions of loaders and generators before the first batch."""
        noted, self._beginning = self._beginning, None
        use = noted is not None and (_get_prefetched_batches(fetcher) or any(noted["iterators"])) and not self._unread
        return noted if use and noted is not None else self._get_current_positions()

    def _get_current_positions(self) -> dict[str, Any]:
        """Return the present positions of loaders and states of the generators."""
        assert self._fetcher is not None
        return {
            **_snapshot_loader_positions(self._fetcher.combined_loader),
            "fetch": get_rng_states(self._device),
        }


def _fetch_as_last_batch(fetch: Callable[[], Fetched]) -> Fetched:
    batch, _, after = fetch()
    return batch, True, after


def _call_state_getters(states: list[Callable[[], LoaderState] | None]) -> list[LoaderState | None]:
    return [None if state is None else state() for state in states]


def _snapshot_loader_positions(combined: CombinedLoader) -> dict[str, Any]:
    """Return the state of each loader and its iterator; None for a loader without a state."""
    return {"loaders": loader_states(combined), "iterators": iterator_states(combined)}


def _get_prefetched_batches(fetcher: DataFetcher) -> list[Any]:
    """Return the batches that Lightning's fetcher has read ahead, because it does not know the number of batches."""
    batches: list[Any] = getattr(fetcher, "batches", [])
    return batches


def _count_remaining_batches(fetcher: DataFetcher) -> int | None:
    """Return the number of batches that are not fetched yet; None if it is unknown."""
    return None if fetcher.length is None else max(0, fetcher.length - fetcher.fetched)


def _continues_iterators(fetcher: DataFetcher) -> bool:
    """Return True if the next epoch continues the same iterators, so that untrained batches must be kept."""
    return all(isinstance(loader, Iterator) for loader in fetcher.combined_loader.flattened)
