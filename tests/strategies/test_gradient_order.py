"""The order of gradients in DDP's buckets, in a process that has trained and in one that continues for it."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import lightning.pytorch as pl
import torch
from lightning.pytorch.callbacks import Callback
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel

from lightning_pipe.strategies.gradient_order import gradient_order, settle_gradient_order
from tests.distributed import run_ranks
from tests.loops.models import FEATURES, Net, Rows, trainer


class Backwards(nn.Module):
    """Registers its layers in another order than it uses them in."""

    def __init__(self) -> None:
        super().__init__()
        self.last, self.first, self.middle = nn.Linear(4, 1), nn.Linear(3, 4), nn.Linear(4, 4)
        self.frozen = nn.Parameter(torch.ones(1), requires_grad=False)

    def forward(self, x: Tensor) -> Tensor:
        y: Tensor = self.last(self.middle(self.first(x)))
        return y


def model() -> DistributedDataParallel:
    torch.manual_seed(3)
    return DistributedDataParallel(Backwards())


def step(model: DistributedDataParallel, rank: int, number: int) -> list[Tensor]:
    """The averaged gradients of a step."""
    model.zero_grad()
    x = torch.randn(5, 3, generator=torch.Generator().manual_seed(10 * number + rank))
    model(x).square().sum().backward()
    return [one.grad.clone() for one in model.parameters() if one.grad is not None]


def continued(rank: int, world: int) -> dict[str, Any]:
    before = model()
    step(before, rank, 0)
    at_first = gradient_order(before)
    second = step(before, rank, 1)
    order = gradient_order(before)

    after = model()
    settle_gradient_order(after, order)
    left = [one.grad for one in after.parameters()]
    restored = gradient_order(after)
    again = step(after, rank, 1)

    other = model()
    settle_gradient_order(other, [*order[:-1], "no such"])
    return {
        "orders": (at_first, order, restored, gradient_order(other)),
        "left": left,
        "equal": all(torch.equal(one, two) for one, two in zip(second, again, strict=True)),
    }


class Trained(Net):
    """Its layers are registered in another order than they are used in."""

    def __init__(self) -> None:
        super().__init__(Rows(24))
        self.last, self.first = nn.Linear(FEATURES, 1), nn.Linear(FEATURES, FEATURES)
        del self.layers

    def training_step(self, batch: Tensor, batch_idx: int) -> Tensor:
        loss: Tensor = self.last(self.first(batch)).square().mean()
        return loss

    def validation_step(self, batch: Tensor, batch_idx: int) -> None:
        self.last(self.first(batch))


class Saves(Callback):
    """Writes a checkpoint when training begins, and one after its first epoch."""

    def __init__(self, folder: Path, name: str) -> None:
        self.folder, self.name = folder, name

    def on_train_start(self, used: pl.Trainer, module: Any) -> None:
        used.save_checkpoint(self.folder / f"{self.name}_begun.ckpt")

    def on_train_epoch_end(self, used: pl.Trainer, module: Any) -> None:
        used.save_checkpoint(self.folder / f"{self.name}_ended.ckpt")


def several_fits(rank: int, world: int, folder: Path) -> dict[str, Any]:
    saves = Saves(folder, "first")
    options: dict[str, Any] = {"strategy": "pipeline", "devices": world, "max_epochs": 1, "callbacks": [saves]}
    first = trainer(**options)
    first.fit(Trained())
    first.save_checkpoint(folder / "first_over.ckpt")
    saves.name = "again"
    first.fit_loop.max_epochs = 2
    first.fit(Trained())

    saves.name = "continued"
    trainer(**{**options, "max_epochs": 2}).fit(Trained(), ckpt_path=folder / "first_ended.ckpt", weights_only=True)

    saves.name = "evaluated"
    evaluated = trainer(**options)
    evaluated.validate(Trained(), ckpt_path=folder / "first_ended.ckpt", weights_only=True, verbose=False)
    evaluated.fit(Trained())

    found = {path.stem: torch.load(path, weights_only=True) for path in folder.glob("*_[beo]*.ckpt")}
    return {name: one.get("lightning_pipe_gradient_order") for name, one in found.items()}


def test_checkpoints_have_the_order_of_their_own_run(tmp_path: Path) -> None:
    for found in run_ranks(several_fits, 3, tmp_path):
        order = found["first_ended"]
        assert order
        assert found["first_over"] == order
        # What goes on from a checkpoint has its order before the first batch, too; nothing else has any.
        assert found["continued_begun"] == order
        without = {name for name, one in found.items() if one is None}
        assert without == {"first_begun", "again_begun", "evaluated_begun"}


def test_a_continued_process_has_the_order_and_the_gradients_of_the_one_before() -> None:
    for found in run_ranks(continued, 3):
        at_first, order, restored, other = found["orders"]
        assert order != at_first
        assert restored == order
        assert found["equal"]
        assert set(found["left"]) == {None}
        assert other == at_first
