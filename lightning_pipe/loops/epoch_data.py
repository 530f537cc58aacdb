"""Where the data of an epoch is: loaders, batches in flight, random streams, and where a run goes on from here.

The training loop says when; this says which batch, from where, and what a checkpoint has to know about it.

Tested in ``tests/loops/test_training_epoch_loop.py``.
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
from lightning_pipe.loops.data.batch_source import AgreedSource, BatchSource, Fetched, Source, Uneven
from lightning_pipe.loops.data.ledger import InFlightLedger
from lightning_pipe.loops.data.next_batch_status import StatusGroup
from lightning_pipe.loops.data.random_streams import RandomStreams, States, get_states, set_states
from lightning_pipe.loops.data.resumable_loader import State, draws_nothing, is_resumable, snapshot
from lightning_pipe.loops.data.resume import ResumePoint
from lightning_pipe.loops.data.stateful_loaders import (
    iterator_states,
    load_iterators,
    next_iterators,
    positions_after,
    positions_at_end,
)
from lightning_pipe.loops.data.termination import AgreedTermination
from lightning_pipe.loops.programs.batch_hooks import BatchHooks


class EpochData:
    """One rank's data while a trainer fits.

    Args:
        trainer: whose loaders, hooks and strategy they are.

    Attributes:
        ledger: of the present epoch; None where the user's step fetches for itself.
        resume_point: that a checkpoint held, until the epoch begins that goes on from it.
        fetch_seconds: that fetching has taken so far, without what ranks say to each other about batches.
    """

    def __init__(self, trainer: pl.Trainer) -> None:
        self._trainer = trainer
        self.ledger: InFlightLedger | None = None
        self.resume_point: ResumePoint | None = None
        self.fetch_seconds = 0.0
        self._fetcher: DataFetcher | None = None
        self._source: Source | None = None
        self._streams: RandomStreams | None = None
        self._statuses = StatusGroup()
        self._kept: list[Callable[[], Fetched]] = []
        self._is_cut = False
        self._initial: dict[str, Any] = {}
        self._beginning: dict[str, Any] | None = None
        self._resumed: ResumePoint | None = None
        self._iterators_due = False
        self._hooks: BatchHooks | None = None
        self._left: ResumePoint | None = None
        self._before_batch: dict[str, Any] | None = None
        self._draws = self._draws_again = True

    # ------------------------------------------------------------------ an epoch

    def put_generators(self, fetcher: DataFetcher) -> None:
        """Put the generators where a checkpoint says, before Lightning's loop begins."""
        self._resumed, self.resume_point = self.resume_point, None
        point = self._resumed
        if point is not None:
            # A new epoch makes its iterators when its first batch is due: a validation may come before.
            has_states = all(hasattr(one, "load_state_dict") for one in fetcher.combined_loader.flattened)
            has_states &= bool(point.loaders)  # none where it was written before the first epoch
            self._iterators_due = has_states and not point.in_mid_epoch
            if not self._iterators_due:
                set_states(point.common_behind_iterators, self._trainer.strategy.root_device)
        elif self._trainer.current_epoch > 0 and not self._trainer.fit_loop.is_resuming:
            ended = self._at_end(fetcher)
            if self._is_cut and fetcher is self._fetcher:
                # A loader with a state of its own may continue where its iterator was left.
                load_iterators(fetcher.combined_loader, ended.loaders, ended.iterators)
            # Lightning makes iterators next.
            self.note_beginning(fetcher.combined_loader, ended if any(ended.iterators) else None)

    def note_beginning(self, combined: CombinedLoader, point: ResumePoint | None = None) -> None:
        """Note where an epoch begins, before its iterators are made.

        Where it does not know the end, Lightning's fetcher then loads a batch at once: a run that goes on from within
        the first batch would leave that out. Loaders of :func:`resumable` know their length.

        Args:
            combined: that iterators are made of.
            point: that was loaded into it just now.
        """
        self._beginning = None
        loaders = combined.flattened
        is_ahead = any(sized_len(one) is None for one in loaders) and not any(map(is_resumable, loaders))
        if is_ahead or point is not None:
            after = next_iterators(combined) if point is None else point.positions()
            self._beginning = {**after, "fetch": get_states(self._trainer.strategy.root_device)}

    def begin(self, fetcher: DataFetcher) -> None:
        """Begin an epoch, or go on with one."""
        self._fetcher = fetcher
        if isinstance(fetcher, DataLoaderIterDataFetcher):
            self.ledger = None
            return
        if self._streams is None:
            self._streams = RandomStreams(self._trainer.strategy.root_device)
        self._streams.restart(None if self._resumed is None else self._resumed.streams_behind_iterators)
        self._hooks = BatchHooks(self._trainer, self._streams)
        loaders = fetcher.combined_loader.flattened
        # Samplers draw in the first fetch. Of several loaders, short ones begin again within an epoch.
        self._draws, self._draws_again = True, len(loaders) > 1 or not all(map(draws_nothing, loaders))
        self._initial = self._at_beginning(fetcher)
        if self._resumed is not None and (self._resumed.in_mid_epoch or self._iterators_due):
            # Until a batch is trained here, a run goes on from where this one did.
            self._initial = {**self._resumed.positions(), **self._resumed.streams}
        kept, self._kept = self._kept, []
        fetcher.fetched += len(kept)
        if kept and fetcher.done:
            kept[-1] = partial(_as_last, kept[-1])
        self._source = self._agreed(BatchSource(self._fetch, kept))
        self.ledger = InFlightLedger(self._source, holds=_goes_on(fetcher))

    def make_iterators(self, ready: int) -> None:
        """Make the iterators of an epoch that begins behind a checkpoint, where its first batch is due.

        Args:
            ready: batches of this epoch that are trained already, by other ranks.
        """
        if self._iterators_due and self._fetcher is not None:
            reloaded = getattr(self._trainer.fit_loop, "reloaded_since_resumption", False)
            if not reloaded:
                self._put_loaders_back(self._fetcher)
            self._iterators_due = False
            self.note_beginning(self._fetcher.combined_loader, None if reloaded else self._resumed)
            iter(self._fetcher)
            self._fetcher.fetched += ready
            self._initial = self._at_beginning(self._fetcher)

    @property
    def to_end(self) -> bool:
        """Whether a rank was told to end training; the same on all."""
        return isinstance(self._source, AgreedSource) and self._source.to_end

    def end(self) -> None:
        """End an epoch in which nothing was raised."""
        if isinstance(self._source, AgreedSource):
            self._source.close()
        if self._iterators_due and self._fetcher is not None:
            # The epoch had ended when the checkpoint was written, and has ended again without a batch.
            self._put_loaders_back(self._fetcher)

    def give_up(self) -> None:
        """Give up what is in flight, for the next epoch to begin with where that goes on with the same iterators."""
        if self.ledger is None or self._source is None or self._fetcher is None:
            return
        given_up = self.ledger.give_up() + self._source.unread()
        given_up += [partial(self._read_before, one) for one, _, _ in _ahead(self._fetcher)]
        self._kept = given_up if _goes_on(self._fetcher) else []
        self._is_cut = bool(given_up) and not self._kept

    def close(self, point: ResumePoint | None) -> None:
        """End training; a checkpoint that is still written goes on from *point*."""
        self._left = point
        self.ledger = self._fetcher = self._source = None
        self._kept = []
        self._statuses.close()

    def period_begins(self) -> None:
        """Before anything is fetched beside a batch."""
        if self._streams is not None:
            self._streams.common = None

    def batch_begins(self) -> None:
        """Note where the generators are before anything of a batch has drawn."""
        # Where a fetch of this period has found them they are still: what ran since draws from streams of its own.
        found = None if self._streams is None else self._streams.common
        self._before_batch = get_states(self._trainer.strategy.root_device) if found is None else found

    def point(self, *, at_end: bool, in_batch: bool = False) -> ResumePoint | None:
        """Where a run goes on that is taken up from a checkpoint written now; None before any data was read.

        Args:
            at_end: whether the epoch is over, or none has begun.
            in_batch: whether a batch has begun that is not trained yet: it will be trained again.
        """
        if self._fetcher is None:
            # Loaded and not gone on from yet; or training is over, and a checkpoint is written of it.
            return self.resume_point or self._left
        common = self._before_batch if in_batch else None
        common = common or get_states(self._trainer.strategy.root_device)
        # Loaders that are reloaded for the next epoch have a fetcher of their own before that begins.
        fetcher = self._trainer.fit_loop._data_fetcher if at_end else None
        fetcher = self._fetcher if fetcher is None else fetcher
        if at_end:
            ended = self._at_end(fetcher)
            return ResumePoint(ended.loaders, common, iterators=ended.iterators)
        last = None if self.ledger is None else self.ledger.last_done
        after = self._initial if last is None else last.after
        if self.ledger is None:  # the user's step fetches for itself
            after = self._now()
        streams = {name: value for name, value in after.items() if name not in ("loaders", "iterators")}
        return ResumePoint(_called(after["loaders"]), common, streams, after["iterators"])

    # ------------------------------------------------------------------ a batch

    def transfer(self, batch: Any) -> Any:
        """Move a batch to the device through the user's hooks; batches come in their order."""
        assert self.ledger is not None and self._streams is not None and self._hooks is not None
        moved = self._hooks.move(batch)
        if (entry := self.ledger.next_transferred()) is not None:
            entry.after["transfer"] = self._streams.states("transfer")
        return moved

    def _fetch(self) -> Fetched:
        fetcher, streams, hooks = self._fetcher, self._streams, self._hooks
        assert fetcher is not None and streams is not None and hooks is not None
        begun = time.perf_counter()
        # Where it does not know the end, Lightning's fetcher is one batch ahead: what it loads now is the next one, and
        # a run that goes on behind this batch loads that again.
        ahead = bool(_ahead(fetcher))
        held = streams.held("fetch")

        def read() -> tuple[dict[str, Any] | None, Any, bool]:
            before = self._now(held) if ahead else None
            batch, _, _ = next(fetcher)
            return before, batch, fetcher.done

        before, batch, is_last = streams.draw("fetch", read) if self._draws else read()
        self._draws = self._draws_again
        after = before or {**_snapshots(fetcher.combined_loader), "fetch": streams.states("fetch")}
        batch = hooks.prepare(batch)
        after["prepare"] = streams.states("prepare")
        self.fetch_seconds += time.perf_counter() - begun
        return batch, is_last, after

    def _read_before(self, batch: Any) -> Fetched:
        """What Lightning's fetcher read ahead of an iterator in the epoch before."""
        assert self._hooks is not None
        return self._hooks.prepare(batch), False, {"loaders": [], "iterators": []}

    # ------------------------------------------------------------------ what it stands on

    def _agreed(self, source: Source) -> Source:
        """Batches that all ranks have, where there are several."""
        strategy, fetcher = self._trainer.strategy, self._fetcher
        if self._trainer.world_size == 1 or not dist.is_initialized() or fetcher is None:
            return source
        group, statuses = self._statuses.open(getattr(strategy, "_timeout", None))
        uneven: Uneven = getattr(strategy, "uneven_batches", "shortest")
        termination = AgreedTermination.install(self._trainer)
        termination.agreed = True
        remaining = partial(_remaining, fetcher)
        return AgreedSource(source, group, statuses, remaining, uneven, lambda: termination.told)

    def _at_end(self, fetcher: DataFetcher) -> ResumePoint:
        """Where loaders and iterators are that the next epoch replaces."""
        combined, ledger = fetcher.combined_loader, self.ledger
        last = None if ledger is None or fetcher is not self._fetcher else ledger.last_done
        if ledger is not None and last is not None:
            before = self._initial if ledger.done_before is None else ledger.done_before.after
            loaders, iterators = positions_after(combined, last.after, before, cut=not last.is_last)
        elif self._beginning is not None and _ahead(fetcher):  # reloaded
            loaders, iterators = positions_after(combined, _snapshots(combined), self._beginning, cut=False)
        else:
            loaders, iterators = positions_at_end(combined)
        return ResumePoint(loaders, {}, iterators=iterators)

    def _put_loaders_back(self, fetcher: DataFetcher) -> None:
        """Let the next iterators be made as if none had been made since the checkpoint."""
        assert self._resumed is not None
        self._resumed.load(fetcher.combined_loader)
        self._iterators_due = False

    def _at_beginning(self, fetcher: DataFetcher) -> dict[str, Any]:
        """Where loaders and generators are before the first batch."""
        noted, self._beginning = self._beginning, None
        use = noted is not None and (_ahead(fetcher) or any(noted["iterators"])) and not self._kept
        return noted if use and noted is not None else self._now()

    def _now(self, states: States | None = None) -> dict[str, Any]:
        """Where loaders and generators are; the latter are read where *states* does not say."""
        assert self._fetcher is not None
        states = get_states(self._trainer.strategy.root_device) if states is None else states
        return {**_snapshots(self._fetcher.combined_loader), "fetch": states}


def _as_last(fetch: Callable[[], Fetched]) -> Fetched:
    batch, _, after = fetch()
    return batch, True, after


def _called(states: list[Callable[[], State] | None]) -> list[State | None]:
    return [None if state is None else state() for state in states]


def _snapshots(combined: CombinedLoader) -> dict[str, Any]:
    """Where each loader and its iterator are, None for one without a state."""
    loaders = [snapshot(one) if hasattr(one, "state_dict") else None for one in combined.flattened]
    return {"loaders": loaders, "iterators": iterator_states(combined)}


def _ahead(fetcher: DataFetcher) -> list[Any]:
    """What Lightning's fetcher has read ahead, where it does not know the end."""
    found: list[Any] = getattr(fetcher, "batches", [])
    return found


def _remaining(fetcher: DataFetcher) -> int | None:
    """How many batches its loaders have not been asked for, if they know."""
    return None if fetcher.length is None else max(0, fetcher.length - fetcher.fetched)


def _goes_on(fetcher: DataFetcher) -> bool:
    """Whether the next epoch goes on with the same iterators, so that what is not trained in this one must be kept."""
    return all(isinstance(one, Iterator) for one in fetcher.combined_loader.flattened)
