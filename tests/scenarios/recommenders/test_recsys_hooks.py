"""Hooks come in Lightning's order, with its arguments and counters; only a batch is transferred earlier."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import lightning.pytorch as pl
import pytest
import torch
from lightning.pytorch.callbacks import Callback

from tests.strategies.cases import ADAGRAD, PLANS, Clicks, adam, fit, loader, recsys, trainer

TRANSFERS = ("on_before_batch_transfer", "transfer_batch_to_device", "on_after_batch_transfer")
# The methods of a LightningModule that Lightning calls around a run.
MODULE_HOOKS = sorted(
    {
        name
        for name in dir(pl.LightningModule)
        if name.startswith("on_") and callable(getattr(pl.LightningModule, name)) and name not in TRANSFERS
    }
    | {"setup", "teardown", "prepare_data", "configure_optimizers", "configure_callbacks", "optimizer_step", "backward"}
    | {"optimizer_zero_grad", "lr_scheduler_step", "training_step", "validation_step", "test_step", "predict_step"}
)
CALLBACK_HOOKS = sorted(name for name in dir(Callback) if name.startswith("on_") or name in ("setup", "teardown"))


def scheduled(module: Clicks) -> Any:
    """A schedule that changes nothing: an optimiser in backward would not follow it."""
    optimizer = adam(module)
    scheduler = torch.optim.lr_scheduler.StepLR(optimizer, 2, gamma=1.0)
    return {"optimizer": optimizer, "lr_scheduler": {"scheduler": scheduler, "interval": "step"}}


class Recording(Clicks):
    """Writes down each of its hooks with the batch's index, and where the trainer stood."""

    def __init__(self) -> None:
        super().__init__(in_backward=ADAGRAD, optimizers=scheduled)
        self.calls: list[tuple[Any, ...]] = []
        self.transfers: list[tuple[str, float]] = []


class RecordingCallback(Callback):
    def __init__(self, calls: list[tuple[Any, ...]]) -> None:
        self.calls = calls


def note(calls: list[tuple[Any, ...]], name: str, used: pl.Trainer | None, args: Any, kwargs: Any) -> None:
    indices = tuple(value for value in (*args, *kwargs.values()) if isinstance(value, int))
    # A loss, or the norm of a gradient: hooks see the same values.
    values = tuple(
        float(value) for value in (*args, *kwargs.values()) if isinstance(value, torch.Tensor) and value.numel() == 1
    )
    where: tuple[Any, ...] = ()
    if used is not None:
        progress = used.fit_loop.epoch_loop.batch_progress
        where = (used.global_step, used.current_epoch, progress.is_last_batch, progress.total.ready)
    calls.append((name, indices, tuple(round(value, 5) for value in values), where))


def hook_of_module(name: str) -> Callable[..., Any]:
    def hook(self: Recording, *args: Any, **kwargs: Any) -> Any:
        note(self.calls, name, self._trainer, args, kwargs)
        return getattr(super(Recording, self), name)(*args, **kwargs)

    return hook


def hook_of_callback(name: str) -> Callable[..., Any]:
    def hook(self: RecordingCallback, used: pl.Trainer, module: Any, *args: Any, **kwargs: Any) -> None:
        note(self.calls, f"callback {name}", used, args, kwargs)

    return hook


def transfer_hook(name: str) -> Callable[..., Any]:
    def hook(self: Recording, batch: Any, *args: Any, **kwargs: Any) -> Any:
        self.transfers.append((name, float(batch.dense[0, 0])))
        return getattr(super(Recording, self), name)(batch, *args, **kwargs)

    return hook


for _name in MODULE_HOOKS:
    setattr(Recording, _name, hook_of_module(_name))
for _name in TRANSFERS:
    setattr(Recording, _name, transfer_hook(_name))
for _name in CALLBACK_HOOKS:
    setattr(RecordingCallback, _name, hook_of_callback(_name))


def calls_of(strategy: Any, **options: Any) -> tuple[list[tuple[Any, ...]], list[tuple[str, float]]]:
    module = Recording()
    fit(module, strategy, val=loader(8), callbacks=[RecordingCallback(module.calls)], **options)
    return module.calls, module.transfers


@pytest.mark.parametrize(
    "options", [{}, {"accumulate_grad_batches": 2, "val_check_interval": 3, "num_sanity_val_steps": 0}], ids=str
)
def test_hooks_of_training_come_in_lightnings_order(options: dict[str, Any]) -> None:
    expected, expected_transfers = calls_of("auto", **options)
    called = {name for name, *_ in expected}
    assert {"on_before_zero_grad", "on_after_backward", "optimizer_step", "lr_scheduler_step"} <= called
    assert {"callback on_before_backward", "callback on_validation_batch_end", "callback on_fit_end"} <= called
    for plan in PLANS:
        found, transfers = calls_of(recsys(plan, optimizer=None), **options)
        assert found == expected, plan
        assert sorted(transfers) == sorted(expected_transfers), plan


@pytest.mark.parametrize(("plan", "ahead"), [("serial", 0), ("base", 2), ("threaded_input", 1), ("prefetch", 2)])
def test_a_batch_is_transferred_as_far_ahead_as_the_plan_says(plan: str, ahead: int) -> None:
    class Ahead(Recording):
        def on_train_batch_start(self, batch: Any, batch_idx: int) -> None:
            counts.append(len([name for name, _ in self.transfers if name == "on_after_batch_transfer"]) - batch_idx)

    counts: list[int] = []
    module = Ahead()
    fit(module, recsys(plan, optimizer=None), loader(32), max_epochs=1)
    assert module.transfers[:3] == [(name, module.transfers[0][1]) for name in TRANSFERS]
    # The first batch trains alone, with recorders on; the last ones find no more to transfer.
    assert counts == [1, *[1 + ahead] * (7 - ahead), *range(ahead, 0, -1)]


@pytest.mark.parametrize("entry", ["validate", "test", "predict"])
def test_hooks_of_evaluation_come_in_lightnings_order(entry: str) -> None:
    def calls(strategy: Any) -> list[tuple[Any, ...]]:
        module = Recording()
        used = trainer(strategy, callbacks=[RecordingCallback(module.calls)])
        quiet = {} if entry == "predict" else {"verbose": False}
        getattr(used, entry)(module, loader(8), **quiet)
        return module.calls

    expected = calls("auto")
    assert len(expected) > 10
    assert calls(recsys(optimizer=None)) == expected
