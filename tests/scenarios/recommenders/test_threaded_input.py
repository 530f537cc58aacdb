"""The user's part in a transfer, and errors of batches, under a plan whose input has a thread of its own."""

from __future__ import annotations

import io
import logging
import threading
from typing import Any

import pytest
import torch
from lightning.fabric.utilities.apply_func import move_data_to_device
from lightning.pytorch.callbacks import Callback
from lightning.pytorch.trainer import call

from lightning_pipe.engine import SetupError, TaskError
from lightning_pipe.loops.programs import batch_hooks
from lightning_pipe.strategies import RecsysPipelineStrategy
from tests.distributed import run_ranks
from tests.strategies.cases import ADAGRAD, Clicks, difference, fit, loader, recsys, state_of

MAIN, WORKER = "MainThread", "lightning_pipe-input"
LINE = "moves batches to the device in the main thread, not in its worker thread"


class Doubling(Clicks):
    """Changes a batch on the device, and notes in which thread."""

    def __init__(self) -> None:
        super().__init__()
        self.threads: set[str] = set()

    def on_after_batch_transfer(self, batch: Any, dataloader_idx: int) -> Any:
        self.threads.add(threading.current_thread().name)
        batch.dense = 2 * batch.dense
        return batch


def trained(module: Clicks, plan: str, **options: Any) -> Any:
    return state_of(fit(module, recsys(plan, optimizer=ADAGRAD, **options), val=loader(8)))


@pytest.mark.usefixtures("one_rank")
def test_hooks_of_the_user_stay_in_the_main_thread_and_one_line_says_so(caplog: pytest.LogCaptureFixture) -> None:
    module = Doubling()
    with caplog.at_level(logging.INFO):
        state = trained(module, "threaded_input")
    assert module.threads == {MAIN}
    (line,) = [record.getMessage() for record in caplog.records if LINE in record.getMessage()]
    assert "because of Doubling.on_after_batch_transfer. Pass transfer_on_worker=True if" in line
    assert difference(state, trained(Doubling(), "serial")) == []


@pytest.mark.usefixtures("one_rank")
def test_transfers_stay_in_the_main_thread_if_lightning_logs_each_hook(caplog: pytest.LogCaptureFixture) -> None:
    with caplog.at_level(logging.DEBUG, logger=call.__name__), caplog.at_level(logging.INFO):
        state = trained(Clicks(), "threaded_input")
    (line,) = [record.getMessage() for record in caplog.records if LINE in record.getMessage()]
    assert "because of a profiler of hooks" in line
    assert difference(state, trained(Clicks(), "serial")) == []


@pytest.mark.usefixtures("one_rank")
def test_hooks_that_may_leave_the_main_thread_run_in_the_worker(caplog: pytest.LogCaptureFixture) -> None:
    module = Doubling()
    with caplog.at_level(logging.INFO):
        state = trained(module, "threaded_input", transfer_on_worker=True)
    # The first batch is trained alone.
    assert module.threads == {MAIN, WORKER}
    assert LINE not in caplog.text
    assert difference(state, trained(Doubling(), "serial")) == []


@pytest.mark.usefixtures("one_rank")
def test_a_strategys_own_transfer_stays_in_the_main_thread() -> None:
    found = set()

    class Tripling(RecsysPipelineStrategy):
        def batch_to_device(self, batch: Any, device: Any = None, dataloader_idx: int = 0) -> Any:
            found.add(threading.current_thread().name)
            batch.dense = 3 * batch.dense
            return super().batch_to_device(batch, device, dataloader_idx)

    def state(plan: str, **options: Any) -> Any:
        return state_of(fit(Clicks(), Tripling(plan, sparse_optimizer=ADAGRAD, **options)))

    serial = state("serial")
    found.clear()
    assert difference(state("threaded_input", transfer_on_worker=True), serial) == []
    assert found == {MAIN}


@pytest.mark.usefixtures("one_rank")
def test_without_hooks_batches_are_moved_in_the_worker(
    caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    threads: list[str] = []

    def move(batch: Any, device: torch.device) -> Any:
        threads.append(threading.current_thread().name)
        return move_data_to_device(batch, device)

    monkeypatch.setattr(batch_hooks, "move_data_to_device", move)
    with caplog.at_level(logging.INFO):
        fit(Clicks(), recsys("threaded_input", optimizer=ADAGRAD), max_steps=4)
    assert threads[0] == MAIN  # the first batch is trained alone
    assert set(threads[1:]) == {WORKER}
    assert LINE not in caplog.text


@pytest.mark.usefixtures("one_rank")
def test_a_hook_that_is_set_while_a_worker_moves_batches_is_refused() -> None:
    class Late(Callback):
        def on_train_batch_end(self, trainer: Any, module: Any, *args: Any) -> None:
            module.on_after_batch_transfer = lambda batch, dataloader_idx: batch

    with pytest.raises(
        SetupError, match=r"begun without Clicks.on_after_batch_transfer. Set hooks and profilers before"
    ):
        fit(Clicks(), recsys("threaded_input", optimizer=ADAGRAD), callbacks=[Late()])


# ---------------------------------------------------------------------- errors


def losses_before_a_bad_batch(rank: int, world_size: int) -> tuple[list[float], str]:
    """Rank 1's third batch cannot be trained: its ids are out of range."""

    class Bad(Clicks):
        def on_before_batch_transfer(self, batch: Any, dataloader_idx: int) -> Any:
            self.seen = getattr(self, "seen", 0) + 1
            if rank == 1 and self.seen == 3:
                batch.sparse.values()[0] = 10**6
            return batch

    module = Bad()
    try:
        fit(module, recsys("threaded_input", optimizer=ADAGRAD, validate_ids=True), num_sanity_val_steps=0)
    except Exception as error:
        return module.losses, f"{type(error).__name__}: {error}"
    return module.losses, ""


class Immovable:
    """A part of a batch that cannot be moved to the device; *error* is raised in the worker."""

    def __init__(self, error: BaseException) -> None:
        self.error = error

    def to(self, *args: Any, **kwargs: Any) -> Any:
        raise self.error


class BadThird(Clicks):
    """Has one batch whose transfer raises in the worker, where it is the third."""

    def __init__(self, error: BaseException) -> None:
        super().__init__()
        self.error, self.seen, self.states = error, 0, 0

    def on_before_batch_transfer(self, batch: Any, dataloader_idx: int) -> Any:
        self.seen += 1
        if self.seen == 3:
            batch.label = Immovable(self.error)
        return batch

    def on_train_batch_end(self, *args: Any) -> None:
        super().on_train_batch_end(*args)
        self.states += 1


def test_a_batch_that_a_worker_cannot_distribute_is_an_error_at_its_turn_on_every_rank() -> None:
    results = run_ranks(losses_before_a_bad_batch, 2)
    for losses, message in results:
        assert len(losses) == 2  # the batches before it are trained
        assert "rank 1" in message
        assert "1000000" in message


@pytest.mark.usefixtures("one_rank")
@pytest.mark.parametrize("error", [MemoryError("no room"), StopIteration()], ids=lambda error: type(error).__name__)
def test_a_single_rank_too_trains_the_batches_before_a_bad_one(error: Exception) -> None:
    module = BadThird(error)
    with pytest.raises((type(error), TaskError)) as raised:
        fit(module, recsys("threaded_input", optimizer=ADAGRAD))
    assert not isinstance(raised.value, StopIteration)  # which a loop takes for the end of the data
    assert error in (raised.value, raised.value.__cause__)
    assert module.states == len(module.losses) == 2


def profiled_on_one_rank(rank: int, world_size: int) -> tuple[str, Any]:
    said = io.StringIO()
    handler = logging.StreamHandler(said)
    logger = logging.getLogger("lightning.pytorch.utilities.rank_zero")
    logger.addHandler(handler)
    used = fit(Clicks(), recsys("threaded_input", optimizer=ADAGRAD), profiler="simple" if rank == 1 else None)
    return said.getvalue(), state_of(used)


def test_ranks_follow_one_plan_if_only_one_has_a_profiler() -> None:
    (said, state), _ = run_ranks(profiled_on_one_rank, 2)
    assert "because of a profiler of hooks" in said
    assert difference(state, run_ranks(serial, 2)[0]) == []


def serial(rank: int, world_size: int) -> Any:
    return state_of(fit(Clicks(), recsys("serial", optimizer=ADAGRAD)))
