from __future__ import annotations

from collections.abc import Callable
from typing import Any

import lightning.pytorch as pl
import pytest
import torch
from lightning.pytorch.callbacks import Callback

from lightning_pipe.loops import PipelineTrainingEpochLoop
from tests.loops.models import Net, Rows, Stream, trainer


def fit(pipelined: bool, make: Callable[[], pl.LightningModule] = Net, **options: Any) -> tuple[Any, pl.Trainer]:
    pl.seed_everything(3)
    model = make()
    used = trainer(**options)
    if pipelined:
        loop = used.fit_loop.epoch_loop
        used.fit_loop.epoch_loop = PipelineTrainingEpochLoop(used, loop.min_steps, loop.max_steps)
    used.fit(model)
    return model, used


def assert_same_training(first: Net, second: Net) -> None:
    assert first.trained == second.trained
    assert first.losses == second.losses
    for (name, ours), (_, theirs) in zip(first.named_parameters(), second.named_parameters(), strict=True):
        assert torch.equal(ours, theirs), name


@pytest.mark.parametrize(
    "options",
    [
        {},
        {"accumulate_grad_batches": 4},
        {"gradient_clip_val": 0.01, "gradient_clip_algorithm": "value"},
        {"max_steps": 4, "max_epochs": -1},
        {"fast_dev_run": True},
        {"val_check_interval": 0.5, "accumulate_grad_batches": 2},
        {"min_steps": 10, "max_epochs": 1},
    ],
    ids=str,
)
def test_trains_the_same_batches_to_the_same_bits_as_lightnings_loop(options: dict[str, Any]) -> None:
    ours, our_trainer = fit(True, **options)
    theirs, their_trainer = fit(False, **options)
    assert_same_training(ours, theirs)
    assert our_trainer.global_step == their_trainer.global_step
    assert our_trainer.current_epoch == their_trainer.current_epoch
    assert our_trainer.callback_metrics.keys() == their_trainer.callback_metrics.keys()
    for name, value in their_trainer.callback_metrics.items():
        assert torch.equal(our_trainer.callback_metrics[name], value), name


@pytest.mark.parametrize("length", [1, 23])
def test_a_dataset_without_length_is_trained_to_its_end(length: int) -> None:
    ours, _ = fit(True, lambda: Net(Stream(length)))
    theirs, _ = fit(False, lambda: Net(Stream(length)))
    assert_same_training(ours, theirs)
    assert sum(map(len, ours.trained)) == 2 * length


class Transfers(Net):
    def __init__(self) -> None:
        super().__init__(Rows(8), batch_size=2, shuffle=False)
        self.calls: list[tuple[str, float]] = []

    def on_before_batch_transfer(self, batch: Any, dataloader_idx: int) -> Any:
        self.calls.append(("before", batch[0, 0].item()))
        return batch + 0

    def on_after_batch_transfer(self, batch: Any, dataloader_idx: int) -> Any:
        self.calls.append(("after", batch[0, 0].item()))
        return batch * torch.rand(())  # draws from a stream of its own

    def on_train_batch_start(self, batch: Any, batch_idx: int) -> None:
        self.calls.append(("start", float(batch_idx)))


def test_transfer_hooks_run_once_a_batch_one_batch_ahead() -> None:
    model, _ = fit(True, Transfers, max_epochs=1, limit_val_batches=0)
    assert model.calls[:5] == [("before", 0.0), ("after", 0.0), ("before", 2.0), ("after", 2.0), ("start", 0.0)]
    assert [call for call in model.calls if call[0] == "after"] == [("after", float(row)) for row in (0, 2, 4, 6)]


def test_random_numbers_of_transfer_hooks_do_not_disturb_the_model() -> None:
    """Dropout draws what it draws when nothing else does, however many batches the hooks are ahead."""

    class Quiet(Transfers):
        def on_after_batch_transfer(self, batch: Any, dataloader_idx: int) -> Any:
            torch.rand(())
            return batch

    disturbed, _ = fit(True, Quiet, max_epochs=1, limit_val_batches=0)
    plain, _ = fit(False, lambda: Net(Rows(8), batch_size=2, shuffle=False), max_epochs=1, limit_val_batches=0)
    assert disturbed.losses[1:] == plain.losses[1:]


def test_an_exception_of_the_user_keeps_its_type_and_says_where_it_happened() -> None:
    class Failing(Net):
        def on_after_batch_transfer(self, batch: Any, dataloader_idx: int) -> Any:
            if self.trained:
                raise KeyError("no such column")
            return batch

    with pytest.raises(KeyError, match="no such column") as caught:
        fit(True, Failing)
    assert "task 'H2D' of iteration 2 (stage 1) failed on rank 0" in "".join(caught.value.__notes__)


def test_a_step_that_takes_the_iterator_falls_back_to_lightnings_advance() -> None:
    class Iterating(Net):
        def training_step(self, dataloader_iter: Any) -> Any:  # type: ignore[override]
            batch, _, _ = next(dataloader_iter)
            return self.layers(batch).square().mean()

    with pytest.warns(UserWarning, match="dataloader_iter"):
        ours, _ = fit(True, Iterating)
    with pytest.warns(UserWarning, match="dataloader_iter"):
        theirs, _ = fit(False, Iterating)
    assert_same_training(ours, theirs)


def test_the_ledger_counts_every_batch_fetched_and_trained() -> None:
    counts = []

    class Counting(Callback):
        def on_train_batch_start(self, used: pl.Trainer, *args: Any) -> None:
            loop = used.fit_loop.epoch_loop
            assert isinstance(loop, PipelineTrainingEpochLoop)
            assert loop.ledger is not None
            ledger = loop.ledger
            counts.append((ledger.fetched, ledger.num_in_flight, ledger.trained))

    fit(True, callbacks=[Counting()], max_epochs=1)
    assert counts == [(2, 2, 0), (3, 2, 1), (4, 2, 2), (5, 2, 3), (6, 2, 4), (6, 1, 5)]


def test_optimizer_step_overrides_that_call_the_closure_themselves_behave_as_in_lightning() -> None:
    class Late(Net):
        def optimizer_step(self, epoch: int, batch_idx: int, optimizer: Any, closure: Any = None) -> None:
            closure()
            if batch_idx % 2 == 0:
                optimizer.step()

    assert_same_training(fit(True, Late)[0], fit(False, Late)[0])
