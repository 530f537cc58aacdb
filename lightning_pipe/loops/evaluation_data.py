"""The batches of an evaluation: moved to the device, and worked on, while earlier ones are evaluated.

Each dataloader has a program of its own, since what feeds a model may look different in each::

    dataloader       0       0       0       1       1
    step           | b0    | b1    | b2    | b0    | b1
    ahead    b0    | b1    | b2    |    b0 | b1    |
                                        (another program)

Where ranks work together in every batch, they must evaluate as many. Numbers that are known are compared before
anything is run; others are agreed on batch by batch. Predictions alone may be uneven, since Lightning gives ranks
uneven numbers so that no row is predicted twice: a rank that has fewer takes part in the others' with its last batch
again, whose predictions are thrown away.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from functools import partial
from math import inf
from typing import Any, Protocol, runtime_checkable

import lightning.pytorch as pl
import torch.distributed as dist
from lightning.fabric.utilities.data import sized_len
from lightning.pytorch.loops.fetchers import _DataFetcher
from lightning.pytorch.utilities import CombinedLoader
from torch.utils.data import IterableDataset

from lightning_pipe.engine import InputError, TaskError
from lightning_pipe.engine.captured import Captured, capture
from lightning_pipe.loops.batch_hooks import BatchHooks
from lightning_pipe.loops.batch_source import AgreedSource, BatchSource, Fetched
from lightning_pipe.loops.default_program import default_evaluation
from lightning_pipe.loops.program import EvaluationProgram
from lightning_pipe.loops.random_streams import RandomStreams
from lightning_pipe.loops.statuses import StatusGroup
from lightning_pipe.loops.user_errors import note_lost_rank, user_error

__all__ = ["BringsEvaluation", "EvaluationData"]

Transfer = Callable[[Any], Any]
# Evaluates a batch for other ranks' sake: the batch on the device, its index, its dataloader's.
Fill = Callable[[Any, int, int], None]

_ADVICE = "In every batch all ranks work together: give them as many, by a sampler that fills up or by drop_last=True"


@runtime_checkable
class BringsEvaluation(Protocol):
    """A strategy that evaluates in a plan of its own."""

    def evaluation_program(self, trainer: pl.Trainer, transfer: Transfer, step: str) -> EvaluationProgram:
        """Build the program of one dataloader.

        Args:
            trainer: whose module is evaluated.
            transfer: moves a batch to the device through the user's hooks, on the main thread.
            step: the module's method: ``validation_step``, ``test_step`` or ``predict_step``.
        """
        ...


@dataclass(frozen=True)
class _Entry:
    """A batch in flight: whether it is the last one, and whether it is there for other ranks only."""

    batch_idx: int
    dataloader_idx: int
    is_last: bool
    fills: bool = False


class EvaluationData(Iterator[Any]):
    """One rank's data in an evaluation loop, in the place of Lightning's fetcher.

    Args:
        trainer: whose loaders, hooks and strategy they are.
        what: is evaluated, in errors: ``validation``, ``test``, ``prediction``.
    """

    def __init__(self, trainer: pl.Trainer, what: str) -> None:
        self._trainer = trainer
        self._what = what
        self._fetcher: _DataFetcher | None = None
        self._step = ""
        self._fill: Fill | None = None
        self._streams: RandomStreams | None = None
        self._hooks: BatchHooks | None = None
        self._source: _Peeking | None = None
        self._programs: dict[tuple[str, int], EvaluationProgram] = {}
        self._program: EvaluationProgram | None = None
        self._inside = ExitStack()
        self._of_loader: Iterator[Any] = iter(())
        self._in_flight: deque[_Entry] = deque()
        self._to_move: deque[_Entry] = deque()
        self._last_moved: Captured | None = None
        self._statuses = StatusGroup()
        self._batches_of: list[int | float] = []
        self._unknown = False
        self._wanted: list[int] | None = None

    # ------------------------------------------------------------------ a run

    def agree(self, loader: CombinedLoader, batches: Sequence[int | float], *, predicting: bool) -> None:
        """See that all ranks evaluate as many batches; every rank calls this when its loaders are made.

        Args:
            loader: of this rank.
            batches: of each dataloader, by its length and the trainer's limits.
            predicting: whether they may be uneven.

        Raises:
            InputError: on every rank: some have fewer, and the others would wait for them.
        """
        self._unknown, self._wanted = False, None
        if not getattr(self._trainer.strategy, "evaluates_together", False) or self._trainer.world_size == 1:
            return
        # A limit says nothing of how many batches a loader has, nor does what an iterable dataset says of its length.
        own = [many if _knows_length(one) else inf for one, many in zip(loader.flattened, batches, strict=True)]
        if loader._mode != "sequential":
            own = [min(own) if loader._mode == "min_size" else max(own)]
        ranks = [own] * self._trainer.world_size
        dist.all_gather_object(ranks, own)
        self._unknown = any(inf in of_rank for of_rank in ranks)
        if all(of_rank == own for of_rank in ranks):
            return
        counts = ", ".join(f"{of_rank} on rank {rank}" for rank, of_rank in enumerate(ranks))
        if not predicting or self._unknown or len({len(of_rank) for of_rank in ranks}) > 1:
            raise InputError(
                f"ranks have uneven numbers of batches in {self._what}, for each dataloader: {counts}. {_ADVICE}"
            )
        wanted = [int(max(of_loader)) for of_loader in zip(*ranks, strict=True)]
        if any(most and not min(of_loader) for most, of_loader in zip(wanted, zip(*ranks, strict=True), strict=True)):
            raise InputError(
                f"a rank has no batch to predict where others have, for each dataloader: {counts}; needed is one for"
                " each: predict on fewer devices, or in smaller batches"
            )
        self._wanted = wanted

    def begin(self, fetcher: _DataFetcher, batches: Sequence[int | float], step: str, fill: Fill | None = None) -> None:
        """Begin a run, of which nothing is read yet.

        Args:
            fetcher: Lightning's, made for this run.
            batches: of each dataloader; infinite where that is not known.
            step: the module's method that evaluates a batch.
            fill: evaluates a batch for other ranks' sake.
        """
        if self._streams is None:
            self._streams = RandomStreams(self._trainer.strategy.root_device)
        self._hooks = BatchHooks(self._trainer, self._streams)
        self._fetcher, self._step, self._fill = fetcher, step, fill
        self._batches_of = list(batches)
        self._source = None

    def __next__(self) -> tuple[Any, int, int]:
        """The next batch on the device, its index, and its dataloader's index."""
        while True:
            program = self._program or self._enter_next()
            try:
                batch = program.begin(self._of_loader).batch
            except StopIteration:
                self._leave()
                continue
            except TaskError as error:
                raised = user_error(error, program.pipeline.plan)
                note_lost_rank(raised, self._trainer.world_size)
                raise raised from raised.__cause__
            entry = self._in_flight[0]
            if not entry.fills:
                return batch, entry.batch_idx, entry.dataloader_idx
            assert self._fill is not None
            self.run_step(partial(self._fill, batch, entry.batch_idx, entry.dataloader_idx))
            self.finish()

    @property
    def done(self) -> bool:
        """Whether the batch last given is the last one, as far as the loaders know."""
        return self._in_flight[0].is_last

    def run_step(self, step: Callable[[], Any]) -> Any:
        """Evaluate the batch that was given; returns what *step*, a call of the strategy's, returns."""
        program = self._program
        assert program is not None
        try:
            if not program.steps_whole_batch:
                return step()
            program.begin_step()
            output = step()
            program.end_step()
        except TaskError as error:
            raised = user_error(error, program.pipeline.plan)
            raise raised from raised.__cause__
        return output

    def finish(self) -> None:
        """Let go of the batch that was given."""
        assert self._program is not None
        self._program.finish()
        self._in_flight.popleft()

    @contextmanager
    def ending(self) -> Iterator[None]:
        """Around a run: lets go of what is in flight behind it, whatever became of it."""
        try:
            yield
            if self._source is not None:
                # Other ranks still say that they have ended, too. After an error they may say nothing.
                self._source.close()
        finally:
            self._source = self._last_moved = None
            self._leave()
            for key in [key for key, program in self._programs.items() if program.pipeline.failed]:
                self._programs.pop(key).close()

    def teardown(self) -> None:
        """As Lightning's fetchers have it."""
        if self._fetcher is not None:
            self._fetcher.teardown()
            self._fetcher = None

    def close(self) -> None:
        """End evaluating: threads and process groups."""
        for program in self._programs.values():
            program.close()
        self._programs.clear()
        self._statuses.close()

    # ------------------------------------------------------------------ a dataloader

    def _enter_next(self) -> EvaluationProgram:
        """Begin with the dataloader whose batch is next; raises ``StopIteration`` where none is."""
        assert self._streams is not None
        if self._source is None:
            self._source = _Peeking(self._batches())
        if not self._source.knows_next:
            # As in Lightning's loop the iterator is made here, and its sampler seeded, between two batches.
            self._streams.restart()
        loader = self._source.loader_of_next()
        key = self._step, loader
        if key not in self._programs:
            strategy = self._trainer.strategy
            build = strategy.evaluation_program if isinstance(strategy, BringsEvaluation) else default_evaluation
            self._programs[key] = build(self._trainer, self._move, self._step)
        program = self._program = self._programs[key]
        self._inside.enter_context(program.around())
        assert self._fetcher is not None
        known = self._wanted or self._batches_of
        in_turn = self._fetcher.combined_loader._mode == "sequential" and len(known) > 1
        self._of_loader = _OfLoader(self._source, loader, known[loader] if in_turn else None, self._take)
        return program

    def _leave(self) -> None:
        program, self._program = self._program, None
        try:
            if program is not None:
                program.abandon()
        finally:
            self._inside.close()
            self._in_flight.clear()
            self._to_move.clear()

    def _take(self, fetched: Fetched) -> Any:
        batch, is_last, where = fetched
        entry = _Entry(is_last=is_last, **where)
        self._in_flight.append(entry)
        self._to_move.append(entry)
        return batch

    def _move(self, batch: Any) -> Any:
        entry = self._to_move.popleft()
        if entry.fills:
            assert self._last_moved is not None
            return self._last_moved.give()
        assert self._hooks is not None
        moved = self._hooks.move(batch, entry.dataloader_idx)
        if self._wanted is not None and entry.batch_idx == self._batches_of[entry.dataloader_idx] - 1:
            # A copy: the step may change what it gets.
            self._last_moved = capture(moved)
        return moved

    # ------------------------------------------------------------------ where batches come from

    def _batches(self) -> Callable[[], Fetched]:
        source = BatchSource(self._fetch)
        if self._unknown:
            group, statuses = self._statuses.open(getattr(self._trainer.strategy, "_timeout", None))
            return AgreedSource(
                source,
                group,
                statuses,
                lambda: None,
                "error",
                kind=_dataloader,
                of=self._what,
                advice=_ADVICE,
            )
        return source if self._wanted is None else _Filled(source, self._batches_of, self._wanted)

    def _fetch(self) -> Fetched:
        assert self._fetcher is not None and self._streams is not None and self._hooks is not None
        batch, batch_idx, dataloader_idx = self._streams.draw("fetch", self._fetcher.__next__)
        is_last = self._fetcher.done
        batch = self._hooks.prepare(batch, dataloader_idx)
        return batch, is_last, {"batch_idx": batch_idx, "dataloader_idx": dataloader_idx}


def _knows_length(loader: Any) -> bool:
    return sized_len(loader) is not None and not isinstance(getattr(loader, "dataset", None), IterableDataset)


def _dataloader(fetched: Fetched) -> int:
    index: int = fetched[2]["dataloader_idx"]
    return index


class _Filled:
    """A rank's batches, and its last one of a dataloader again until there are as many as wanted."""

    def __init__(self, source: Callable[[], Fetched], batches: Sequence[int | float], wanted: Sequence[int]) -> None:
        self._source = source
        self._batches = batches
        self._wanted = wanted
        self._next: Fetched | None = None
        self._ended = False
        self._given = [0] * len(wanted)
        self._last: Fetched | None = None

    def __call__(self) -> Fetched:
        last = self._last
        index = 0 if last is None else _dataloader(last)
        complete = last is not None and self._given[index] >= self._batches[index]
        fills = complete and self._given[index] < self._wanted[index]
        if self._next is None and not self._ended and not fills:
            try:
                self._next = self._source()
            except StopIteration:
                self._ended = True
        following = self._next
        ends = following is None or _dataloader(following) != index
        if last is not None and ends and self._given[index] < self._wanted[index]:
            self._given[index] += 1
            return last[0], False, {**last[2], "fills": True}
        if following is None:
            raise StopIteration
        self._given[_dataloader(following)] += 1
        self._last, self._next = following, None
        return following


class _Peeking:
    """Batches of which the next one can be looked at."""

    def __init__(self, source: Callable[[], Fetched]) -> None:
        self._source = source
        self._next: Fetched | None = None
        self._ended = False

    @property
    def knows_next(self) -> bool:
        """Whether that one has been read."""
        return self._ended or self._next is not None

    def loader_of_next(self) -> int:
        """The next one's dataloader; raises ``StopIteration`` where there is none."""
        if self._ended:
            raise StopIteration
        if self._next is None:
            try:
                self._next = self._source()
            except StopIteration:
                self._ended = True
                raise
        return _dataloader(self._next)

    def take(self) -> Fetched:
        assert self._next is not None
        fetched, self._next = self._next, None
        return fetched

    def close(self) -> None:
        if isinstance(self._source, AgreedSource):
            self._source.close()


class _OfLoader(Iterator[Any]):
    """The batches of one dataloader; where their number is known, nothing is read of the next one."""

    def __init__(
        self, source: _Peeking, loader: int, batches: int | float | None, take: Callable[[Fetched], Any]
    ) -> None:
        self._source = source
        self._loader = loader
        self._remaining = batches
        self._take = take

    def __next__(self) -> Any:
        if self._remaining == 0 or self._source.loader_of_next() != self._loader:
            raise StopIteration
        if self._remaining is not None:
            self._remaining -= 1
        return self._take(self._source.take())
