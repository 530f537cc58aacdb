"""Batches of an evaluation: moved to the device, and preprocessed, while earlier batches are evaluated.

Each dataloader has its own program, because batches of different dataloaders may have different structures::

    dataloader       0       0       0       1       1
    step           | b0    | b1    | b2    | b0    | b1
    ahead    b0    | b1    | b2    |    b0 | b1    |
                                        (another program)

If ranks have uneven numbers of batches, the batches that all ranks have are evaluated this way. Ranks with more batches
then continue batch by batch, and the other ranks join them (:mod:`lightning_pipe.loops.uneven_evaluation`). Each row is
evaluated once.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager, suppress
from dataclasses import dataclass
from functools import partial
from math import inf
from typing import Any

import lightning.pytorch as pl
import torch.distributed as dist
from lightning.fabric.utilities.data import sized_len
from lightning.pytorch.utilities import CombinedLoader
from torch.utils.data import IterableDataset

from lightning_pipe._compat.lightning import DataFetcher
from lightning_pipe.engine import InputError, TaskError
from lightning_pipe.engine.ranks.batch_status import BatchStatusExchange
from lightning_pipe.engine.ranks.object_collectives import all_gather_or_raise
from lightning_pipe.loops.data.batch_source import BatchSource, Fetched, SynchronizedBatchSource
from lightning_pipe.loops.data.peekable_source import PeekableBatchSource, SingleDataloaderIterator, get_dataloader_idx
from lightning_pipe.loops.data.random_streams import RandomStreams
from lightning_pipe.loops.programs.batch_hooks import BatchTransferHooks
from lightning_pipe.loops.programs.default_program import build_default_evaluation_program
from lightning_pipe.loops.programs.program import EvaluationProgram
from lightning_pipe.loops.programs.user_errors import add_lost_rank_note, unwrap_task_error
from lightning_pipe.loops.uneven_evaluation import (
    LoggedValue,
    UnevenBatchCoordinator,
    record_logged_values,
    register_remote_logged_values,
)

_ADVICE = (
    "All ranks work together on every batch. Let ranks without a batch join the other ranks"
    " (uneven_evaluation='join'), or give all ranks the same number of batches, with a sampler that pads or with"
    " drop_last=True"
)


@dataclass(frozen=True)
class _InFlightBatch:
    """A batch in flight; *is_last* is True for this rank's last batch."""

    batch_idx: int
    dataloader_idx: int
    is_last: bool


class EvaluationData(Iterator[Any]):
    """One rank's data in an evaluation loop; replaces Lightning's fetcher.

    Attributes:
        uneven: True if ranks have, or may have, different numbers of batches.
    """

    def __init__(self, trainer: pl.Trainer, phase: str, ended: Callable[[int], None] | None = None) -> None:
        self._trainer = trainer
        self._phase = phase
        # Result of the comparison of ranks: an uneven number that is found later is an error; no rank has a batch.
        self.uneven = self._refuses = False
        self._all_are_empty: bool | None = None
        self._fetcher: DataFetcher | None = None
        self._step = ""
        self._ended = ended
        self._streams: RandomStreams | None = None
        self._hooks: BatchTransferHooks | None = None
        self._source: PeekableBatchSource | None = None
        self._programs: dict[tuple[str, int | None], EvaluationProgram] = {}
        self._program: EvaluationProgram | None = None
        self._inside = ExitStack()
        self._of_loader: Iterator[Any] = iter(())
        self._in_flight: deque[_InFlightBatch] = deque()
        self._to_move: deque[_InFlightBatch] = deque()
        self._statuses = BatchStatusExchange()
        self._batches_of: list[int | float] = []
        # State of uneven ranks: the current dataloader of all ranks, True if this rank has had one of its batches, the
        # batches that are left here while other ranks have none, and the batch that other ranks join.
        self._loader: int | None = None
        self._had_batches = False
        self._remaining: PeekableBatchSource | None = None
        self._coordinator: UnevenBatchCoordinator | None = None
        self._logged: list[LoggedValue] = []

    # ------------------------------------------------------------------ a run

    def compare_batch_counts(
        self, loader: CombinedLoader, batches: Sequence[int | float], failed: Sequence[Exception], *, predicting: bool
    ) -> None:
        """Compare the numbers of batches of all ranks. Every rank calls this after its loaders are set up."""
        strategy = self._trainer.strategy
        refuses = getattr(strategy, "uneven_evaluation", "error") == "error"
        self.uneven, self._refuses, self._all_are_empty = False, False, None
        if self._trainer.world_size == 1 or (refuses and not getattr(strategy, "evaluates_together", False)):
            return
        # Neither a limit on batches nor the length of an iterable dataset determines the number of batches.
        batch_counts = [
            count if _knows_length(dataloader) else inf
            for dataloader, count in zip(loader.flattened, batches, strict=True)
        ]
        if loader._mode != "sequential":
            batch_counts = [min(batch_counts) if loader._mode == "min_size" else max(batch_counts)]
        error = failed[0] if failed else None
        ranks = all_gather_or_raise(
            batch_counts, error, f"loaders of {self._phase} cannot be used", dist.group.WORLD, InputError
        )
        even = all(of_rank == batch_counts for of_rank in ranks)
        self._refuses = refuses and not predicting
        if not even and (self._refuses or len(set(map(len, ranks))) > 1):
            counts = ", ".join(f"{of_rank} on rank {rank}" for rank, of_rank in enumerate(ranks))
            raise InputError(
                f"ranks have uneven numbers of batches in {self._phase}, for each dataloader: {counts}. {_ADVICE}"
            )
        self.uneven = not even or any(inf in of_rank for of_rank in ranks)
        self._all_are_empty = not any(map(any, ranks))

    def is_empty_on_all_ranks(self, otherwise: bool) -> bool:
        """Return True if no rank has a batch; *otherwise* if ranks have not been compared."""
        return otherwise if self._all_are_empty is None else self._all_are_empty

    def begin(self, fetcher: DataFetcher, batches: Sequence[int | float], step: str) -> None:
        """Begin a run. Reads no batch yet."""
        if self._streams is None:
            self._streams = RandomStreams(self._trainer.strategy.root_device)
        self._hooks = BatchTransferHooks(self._trainer, self._streams)
        self._fetcher, self._step = fetcher, step
        self._batches_of = list(batches)
        self._source = self._loader = self._remaining = None

    def __next__(self) -> tuple[Any, int, int]:
        """Return the next batch on the device, its index, and the index of its dataloader."""
        self._end_uneven_batch()
        while True:
            program = self._program or self._enter_program_of_next_batch()
            try:
                batch = program.begin_next_batch(self._of_loader).batch
            except StopIteration:
                self._leave_program()
                continue
            except TaskError as error:
                raised = unwrap_task_error(error)
                add_lost_rank_note(raised, self._trainer.world_size)
                raise raised from raised.__cause__
            entry = self._in_flight[0]
            self._had_batches = True
            return batch, entry.batch_idx, entry.dataloader_idx

    @property
    def done(self) -> bool:
        """True if the current batch is the last one, as far as the loaders know."""
        return self._in_flight[0].is_last

    def run_step(self, step: Callable[[], Any]) -> Any:
        """Evaluate the current batch with *step*, a call of the strategy, release the batch, and return the result."""
        program = self._program
        assert program is not None
        try:
            if program.trains_in_one_task:
                program.begin_step_task()
            output = step()
            if program.trains_in_one_task:
                program.end_step_task()
        except TaskError as error:
            raised = unwrap_task_error(error)
            raise raised from raised.__cause__
        program.finish_batch()
        self._in_flight.popleft()
        return output

    @contextmanager
    def run_context(self) -> Iterator[None]:
        """Context of a run. Releases the batches in flight at the end, also after an error."""
        try:
            yield
            if self._source is not None:
                # Receives the other ranks' end of data. Not after an error, when they may not send it.
                self._source.close()
        except Exception as error:
            if self._coordinator is not None:
                with suppress(RuntimeError):  # another rank has ended
                    self._coordinator.fail(error)
            add_lost_rank_note(error, self._trainer.world_size)
            raise
        finally:
            self._source = self._remaining = self._coordinator = None
            self._leave_program()
            for key in [key for key, program in self._programs.items() if program.pipeline.failed]:
                self._programs.pop(key).close()

    def teardown(self) -> None:
        """Tear down Lightning's fetcher, whose interface this class implements."""
        if self._fetcher is not None:
            self._fetcher.teardown()
            self._fetcher = None

    def close_programs(self) -> None:
        """Close all programs and process groups."""
        for program in self._programs.values():
            program.close()
        self._programs.clear()
        self._statuses.close()

    # ------------------------------------------------------------------ a dataloader

    def _enter_program_of_next_batch(self) -> EvaluationProgram:
        """Enter the program of the dataloader with the next batch."""
        assert self._streams is not None
        if self._source is None:
            self._source = PeekableBatchSource(self._make_batch_source())
        if not self._source.knows_next:
            # As in Lightning's loop, the iterator is made and its sampler seeded here, between two batches.
            self._streams.restart()
        try:
            loader = self._source.peek_dataloader_idx()
        except StopIteration:
            if not self.uneven or self._refuses:
                raise
            return self._enter_uneven_batch()
        self._switch_to_dataloader(loader)
        program = self._enter_program(
            loader, getattr(self._trainer.strategy, "evaluation_program", build_default_evaluation_program)
        )
        assert self._fetcher is not None
        batch_counts = self._batches_of
        in_sequence = self._fetcher.combined_loader._mode == "sequential" and len(batch_counts) > 1 and not self.uneven
        self._of_loader = SingleDataloaderIterator(
            self._source, loader, batch_counts[loader] if in_sequence else None, self._record_in_flight_batch
        )
        return program

    def _enter_program(self, loader: int | None, build: Callable[..., EvaluationProgram]) -> EvaluationProgram:
        key = self._step, loader
        if key not in self._programs:
            self._programs[key] = build(self._trainer, self._move, self._step)
        program = self._program = self._programs[key]
        self._inside.enter_context(program.evaluation_context())
        return program

    def _leave_program(self) -> None:
        program, self._program = self._program, None
        try:
            if program is not None:
                program.abandon_batches()
        finally:
            self._inside.close()
            self._in_flight.clear()
            self._to_move.clear()

    def _record_in_flight_batch(self, fetched: Fetched) -> Any:
        batch, _, where = fetched
        entry = _InFlightBatch(**where)
        self._in_flight.append(entry)
        self._to_move.append(entry)
        return batch

    def _move(self, batch: Any) -> Any:
        assert self._hooks is not None
        return self._hooks.move(batch, self._to_move.popleft().dataloader_idx)

    # ------------------------------------------------------------------ uneven ranks

    def _switch_to_dataloader(self, loader: int | None) -> None:
        """Record that all ranks have reached a dataloader; None for the end."""
        before, self._loader = self._loader, loader
        if loader == before:
            return
        if before is not None and self.uneven and self._ended is not None:
            self._ended(before)
        self._had_batches = False

    def _enter_uneven_batch(self) -> EvaluationProgram:
        """Start a batch that only some ranks have, joining the other ranks until this rank has one."""
        strategy: Any = self._trainer.strategy
        results = self._trainer._results
        while (have := self._gather_ranks_with_batch()) is not None:
            if all(have):
                # All ranks have a batch again, for example of the next dataloader: pipelined evaluation resumes.
                self._source = None
                return self._enter_program_of_next_batch()
            coordinator = UnevenBatchCoordinator(
                self._statuses.group, have, f"a batch of dataloader {self._loader} in {self._phase}"
            )
            if coordinator.rank_has_batch:
                self._coordinator, self._logged = coordinator, []
                self._inside.enter_context(strategy.announce_collectives_to_ranks(coordinator, self._step))
                if results is not None:
                    self._inside.enter_context(
                        record_logged_values(results, self._logged, coordinator.equals_shared_result)
                    )
                assert self._remaining is not None
                self._of_loader = map(self._record_in_flight_batch, [self._remaining.take()])
                return self._enter_program(None, partial(build_default_evaluation_program, ahead=0))
            if results is not None and self._fetcher is not None:
                in_sequence = self._fetcher.combined_loader._mode == "sequential" and len(self._batches_of) > 1
                results.dataloader_idx = self._loader if in_sequence else None
            with strategy.announce_collectives_to_ranks(coordinator, self._step):
                logged = coordinator.join_collectives_of_other_ranks(strategy.join_collective_of_other_rank)
            if results is not None:
                # An unsynced value belongs to this rank. Without own batches, take the other rank's value.
                register_remote_logged_values(
                    self._trainer, results, logged, strategy.logs_for_all or not self._had_batches
                )
        self._switch_to_dataloader(None)
        raise StopIteration

    def _end_uneven_batch(self) -> None:
        coordinator, self._coordinator = self._coordinator, None
        if coordinator is not None:
            coordinator.announce_batch_end(self._logged)

    def _gather_ranks_with_batch(self) -> list[bool] | None:
        """Fetch a batch and gather which ranks have one."""
        assert self._source is not None
        if self._remaining is None:
            self._remaining = PeekableBatchSource(BatchSource(self._fetch, self._source.get_undelivered_batches()))
        error: Exception | None = None
        loader_index: int | None = None
        try:
            loader_index = self._remaining.peek_dataloader_idx()
        except StopIteration:
            pass
        except Exception as caught:  # any class: the other ranks wait for this rank's answer
            error = caught
        failed = f"a batch of {self._phase} could not be fetched"
        ranks = all_gather_or_raise(loader_index, error, failed, self._statuses.group, InputError)
        loaders = [loader for loader in ranks if loader is not None]
        if not loaders:
            return None
        have = [loader == min(loaders) for loader in ranks]
        for group in getattr(self._trainer.strategy, "same_batch_rank_groups", None) or ():
            if len({have[rank] for rank in group}) > 1:
                without = ", ".join(str(rank) for rank in group if not have[rank])
                raise InputError(
                    f"rank(s) {without} have no more batches in {self._phase}, but other ranks of {list(group)} do,"
                    " although these ranks work on the same batches. Give them the same data, or let Lightning insert"
                    " its distributed sampler"
                )
        self._switch_to_dataloader(min(loaders))
        return have

    # ------------------------------------------------------------------ sources of batches

    def _make_batch_source(self) -> BatchSource:
        unread = [] if self._remaining is None else self._remaining.get_undelivered_batches()
        self._remaining = None
        if not self.uneven:
            return BatchSource(self._fetch, unread)
        return SynchronizedBatchSource(
            self._fetch,
            unread,
            self._statuses,
            lambda: None,
            "error" if self._refuses else None,
            kind=get_dataloader_idx,
            phase=self._phase,
            advice=_ADVICE,
        )

    def _fetch(self) -> Fetched:
        assert self._fetcher is not None and self._streams is not None and self._hooks is not None
        batch, batch_idx, dataloader_idx = self._streams.run_with_stream("fetch", self._fetcher.__next__)
        is_last = self._fetcher.done
        batch = self._hooks.prepare_batch_for_transfer(batch, dataloader_idx)
        return batch, is_last, {"batch_idx": batch_idx, "dataloader_idx": dataloader_idx, "is_last": is_last}


def _knows_length(loader: Any) -> bool:
    return sized_len(loader) is not None and not isinstance(getattr(loader, "dataset", None), IterableDataset)
