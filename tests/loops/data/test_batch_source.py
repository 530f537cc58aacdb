"""Ranks agree on every batch before it is given: none is left waiting for one that has no more."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from typing import Any, Literal

import lightning.pytorch as pl
import pytest
import torch.distributed as dist
from lightning.pytorch.callbacks import Callback
from torch import Tensor
from torch.utils.data import DataLoader, IterableDataset

from lightning_pipe.engine import InputError
from lightning_pipe.engine.ranks.batch_status import BatchStatusExchange
from lightning_pipe.loops import PipelineTrainingEpochLoop
from lightning_pipe.loops.data.batch_source import Fetched, SynchronizedBatchSource
from tests.distributed import run_ranks
from tests.engine.ranks.test_batch_status import Message
from tests.loops.models import Net, Rows, trainer

LENGTHS = [(4, 4), (3, 5), (5, 3), (0, 2), (1, 2), (0, 0), (1, 1)]


def numbered(count: int, breaks_at: int | None = None) -> Callable[[], Fetched]:
    remaining = iter(range(count))

    def fetch() -> Fetched:
        index = next(remaining)
        if index == breaks_at:
            raise OSError(f"row {index} is unreadable")
        return index, False, {"given": index + 1}

    return fetch


class Reader:
    """Takes batches from a source; with *messages*, a step follows each, except after every fourth."""

    def __init__(self, statuses: BatchStatusExchange, messages: bool) -> None:
        self.statuses, self.messages, self.count = statuses, messages, 0

    def next(self, source: SynchronizedBatchSource) -> Fetched:
        fetched = source()
        self.count += 1
        if self.messages and self.count % 4:
            world: Any = dist.group.WORLD
            status = self.statuses.take_status_to_send(world)
            if status is not None:
                self.statuses.set_carrying_message(Message(status))
        return fetched

    def drain(self, source: SynchronizedBatchSource) -> list[Fetched]:
        batches = []
        while True:
            try:
                batches.append(self.next(source))
            except StopIteration:
                return batches


# ---------------------------------------------------------------------- two ranks


class Uneven(Net):
    """As many batches as each rank is told, from loaders with and without a length."""

    def __init__(self, count: int, sized: bool) -> None:
        super().__init__(Rows(32) if sized else None)
        self.count, self.sized = count, sized
        self.last: list[bool] = []
        self.validated: list[int] = []

    def train_dataloader(self) -> Any:
        rows = Rows(4 * self.count)
        return DataLoader(rows if self.sized else OfRows(rows), batch_size=4)

    def training_step(self, batch: Tensor, batch_idx: int) -> Tensor:
        dist.barrier()  # as a collective of the step: it hangs where a rank is alone
        self.last.append(self.trainer.is_last_batch)
        return super().training_step(batch, batch_idx)

    def on_validation_epoch_start(self) -> None:
        self.validated.append(len(self.trained))


class OfRows(IterableDataset[Tensor]):
    def __init__(self, rows: Rows) -> None:
        self.rows = rows

    def __iter__(self) -> Iterator[Tensor]:
        return iter(self.rows.rows)


class Stop(Callback):
    """Ends the epoch with batches read ahead."""

    def on_train_batch_end(self, trainer: pl.Trainer, *args: Any) -> None:
        if trainer.global_step == 2:
            trainer.should_stop = True


def fit(count: int, sized: bool, uneven: str = "shortest", **options: Any) -> Any:
    made = trainer(
        strategy="ddp", devices=2, use_distributed_sampler=False, num_sanity_val_steps=0, **{"max_epochs": 2, **options}
    )
    made.strategy.uneven_batches = uneven  # type: ignore[attr-defined]
    PipelineTrainingEpochLoop.install(made)
    module = Uneven(count, sized)
    try:
        made.fit(module)
    except InputError as error:
        return f"{type(error).__name__}: {error}"
    return {"trained": len(module.trained), "last": module.last, "validated": module.validated}


class Fails(Uneven):
    """Once, in validation."""

    failed = False

    def validation_step(self, batch: Any, batch_idx: int) -> Any:
        if not self.failed:
            self.failed = True
            raise ValueError("validation failed")
        return super().validation_step(batch, batch_idx)


def fit_again() -> list[int]:
    """Batches trained in a fit that ends in an error, and in one more of the same trainer."""
    made = trainer(
        strategy="ddp",
        devices=2,
        use_distributed_sampler=False,
        num_sanity_val_steps=0,
        max_epochs=2,
        val_check_interval=3,
    )
    PipelineTrainingEpochLoop.install(made)
    module, trained = Fails(8, sized=True), []
    with pytest.raises(ValueError, match="validation failed"):
        made.fit(module)
    trained.append(len(module.trained))
    module.trained.clear()
    made.fit(module)
    return [*trained, len(module.trained)]


def given_by_sources(rank: int, statuses: BatchStatusExchange, messages: bool) -> dict[str, Any]:
    found: dict[str, Any] = {}
    reader = Reader(statuses, messages)

    def agreed(
        fetch: Callable[[], Fetched],
        kept: Sequence[Callable[[], Fetched]] = (),
        remaining: int | None = 0,
        uneven: Literal["shortest", "error"] = "shortest",
    ) -> SynchronizedBatchSource:
        return SynchronizedBatchSource(fetch, kept, statuses, lambda: remaining, uneven)

    for lengths in LENGTHS:
        source = agreed(numbered(lengths[rank]))
        given = reader.drain(source)
        found[f"given {lengths}"] = given, [fetch()[0] for fetch in source.get_undelivered_batches()]
        source.close()
    for name, breaks_at in {"first": 0, "second": 1, "fourth": 3}.items():
        source = agreed(numbered(6, breaks_at if rank == 1 else None))
        try:
            reader.drain(source)
        except (InputError, OSError) as error:
            found[f"broken {name}"] = f"{type(error).__name__}: {error}"
    source = agreed(numbered(5 - 2 * rank), remaining=None, uneven="error")
    with pytest.raises(InputError) as caught:
        reader.drain(source)
    found["strict"] = str(caught.value)
    # Left in the middle, with an answer still on its way.
    source = agreed(numbered(6), [lambda: ("kept", False, {})])
    found["middle"] = [reader.next(source)[0], reader.next(source)[0]]
    source.close()
    found["middle unread"] = [fetch()[0] for fetch in source.get_undelivered_batches()]
    return found


def on_two_ranks(rank: int, size: int) -> dict[str, Any]:
    found: dict[str, Any] = {}
    statuses = BatchStatusExchange()
    found["sources"] = [given_by_sources(rank, statuses, messages) for messages in (False, True)]
    statuses.close()
    found["without a length"] = fit((5, 8)[rank], sized=False)
    found["with a length"] = fit((8, 5)[rank], sized=True, val_check_interval=0.5)
    found["refused"] = fit((5, 8)[rank], sized=False, uneven="error")
    found["after an error"] = fit_again()
    found["stopped"] = fit((5, 8)[rank], sized=False, callbacks=[Stop()], limit_val_batches=0)
    return found


@pytest.fixture(scope="module")
def ranks() -> list[dict[str, Any]]:
    return run_ranks(on_two_ranks, 2)


@pytest.fixture(params=[False, True], ids=["all-reduces", "messages"])
def sources(ranks: list[dict[str, Any]], request: pytest.FixtureRequest) -> list[dict[str, Any]]:
    return [found["sources"][request.param] for found in ranks]


@pytest.mark.parametrize("lengths", LENGTHS)
def test_every_rank_is_given_as_many_batches_as_the_shortest_has(
    lengths: tuple[int, int], sources: list[dict[str, Any]]
) -> None:
    fewest = min(lengths)
    for length, found in zip(lengths, sources, strict=True):
        given, unread = found[f"given {lengths}"]
        assert given == [(index, index == fewest - 1, {"given": index + 1}) for index in range(fewest)]
        assert unread == list(range(fewest, min(length, fewest + 1)))


@pytest.mark.parametrize(("name", "batch"), [("first", 0), ("second", 1), ("fourth", 3)])
def test_a_fetch_that_fails_on_one_rank_is_an_error_on_all(
    name: str, batch: int, sources: list[dict[str, Any]]
) -> None:
    assert sources[0][f"broken {name}"] == (
        f"InputError: Rank 1 could not fetch its batch {batch} of the epoch. See the error of that rank for the cause."
    )
    assert sources[1][f"broken {name}"] == f"OSError: row {batch} is unreadable"


def test_uneven_ranks_can_be_an_error_that_counts_what_is_left(sources: list[dict[str, Any]]) -> None:
    for found in sources:
        assert "uneven numbers of batches: all ranks have 3, with 1 or more on rank 0 left over" in found["strict"]
        assert "drop_last=True" in found["strict"]


def test_an_epoch_that_is_left_in_the_middle_leaves_no_answer_behind(sources: list[dict[str, Any]]) -> None:
    for found in sources:
        assert found["middle"] == ["kept", 0]
        assert found["middle unread"] == [1, 2]


@pytest.mark.parametrize("case", ["without a length", "with a length"])
def test_an_epoch_ends_on_every_rank_with_the_shortest(case: str, ranks: list[dict[str, Any]]) -> None:
    for found in ranks:
        assert found[case]["trained"] == 2 * 5
        assert found[case]["last"] == 2 * ([False] * 4 + [True])
    assert ranks[0][case]["validated"] == ranks[1][case]["validated"]


def test_ranks_validate_together_though_their_lengths_differ(ranks: list[dict[str, Any]]) -> None:
    # Half of the five batches that all ranks have is two.
    assert ranks[0]["with a length"]["validated"] == [2, 4, 7, 9]


def test_a_trainer_raises_it_on_every_rank(ranks: list[dict[str, Any]]) -> None:
    for found in ranks:
        assert found["refused"].startswith("InputError: Ranks have uneven numbers of batches: all ranks have 5")


def test_a_stop_in_mid_epoch_leaves_ranks_ready_for_another_fit(ranks: list[dict[str, Any]]) -> None:
    for found in ranks:
        assert found["stopped"]["trained"] == 2


def test_after_an_error_in_validation_the_same_trainer_fits_again(ranks: list[dict[str, Any]]) -> None:
    for found in ranks:
        assert found["after an error"] == [3, 16]
