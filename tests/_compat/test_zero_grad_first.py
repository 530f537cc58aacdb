"""Gradients that ``training_step`` itself makes are there for the optimizer."""

from __future__ import annotations

from typing import Any

import lightning.pytorch as pl
import pytest
import torch
from torch import Tensor, nn
from torch.utils.data import DataLoader

from lightning_pipe._compat.zero_grad_first import ZeroGradFirstOptimization

DATA = [torch.full((1, 2), float(index)) for index in range(1, 6)]


class Backwards(pl.LightningModule):
    """Its backward runs in ``training_step``, as a pipeline's, if it is told to."""

    def __init__(self, inside: bool) -> None:
        super().__init__()
        self.inside = inside
        self.layer = nn.Linear(2, 1, bias=False)
        self.calls: list[str] = []
        nn.init.ones_(self.layer.weight)

    def training_step(self, batch: Tensor, batch_idx: int) -> Tensor:
        self.calls.append("training_step")
        loss = self.layer(batch).sum() / self.trainer.accumulate_grad_batches
        if self.inside:
            loss.backward()
            return loss.detach() * self.trainer.accumulate_grad_batches
        return loss * self.trainer.accumulate_grad_batches

    def backward(self, loss: Tensor, *args: Any, **kwargs: Any) -> None:
        self.calls.append("backward")
        if not self.inside:
            super().backward(loss, *args, **kwargs)

    def on_before_zero_grad(self, optimizer: Any) -> None:
        self.calls.append("on_before_zero_grad")

    def configure_optimizers(self) -> Any:
        return torch.optim.SGD(self.parameters(), lr=0.01)


def fit(inside: bool, **options: Any) -> Backwards:
    class Installing(pl.Callback):
        def on_fit_start(self, trainer: pl.Trainer, pl_module: pl.LightningModule) -> None:
            if inside:
                ZeroGradFirstOptimization.install(trainer)
                first = trainer.fit_loop.epoch_loop.automatic_optimization
                ZeroGradFirstOptimization.install(trainer)
                assert trainer.fit_loop.epoch_loop.automatic_optimization is first

    module = Backwards(inside)
    trainer = pl.Trainer(
        accelerator="cpu",
        devices=1,
        max_epochs=2,
        logger=False,
        enable_checkpointing=False,
        enable_progress_bar=False,
        enable_model_summary=False,
        callbacks=[Installing()],
        **options,
    )
    trainer.fit(module, DataLoader(DATA, batch_size=None))  # type: ignore[arg-type]
    assert trainer.global_step == 2 * (5 if trainer.accumulate_grad_batches == 1 else 3)
    return module


@pytest.mark.parametrize("accumulate", [1, 2])
def test_a_backward_inside_training_step_trains_as_one_after_it(accumulate: int) -> None:
    inside, after = fit(True, accumulate_grad_batches=accumulate), fit(False, accumulate_grad_batches=accumulate)
    assert torch.equal(inside.layer.weight, after.layer.weight)
    assert not torch.equal(inside.layer.weight, torch.ones(1, 2))


def test_zeroing_and_its_hook_come_before_training_step_and_once_for_each_optimizer_step() -> None:
    calls = fit(True, accumulate_grad_batches=2).calls
    batch = ["training_step", "backward"]
    epoch = [*("on_before_zero_grad", *batch), *batch, *("on_before_zero_grad", *batch), *batch]
    assert calls == 2 * [*epoch, "on_before_zero_grad", *batch]
