"""The order of gradients in DDP's buckets is part of a checkpoint: three ranks continue to the bit."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from tests.distributed import run_ranks
from tests.loops.models import FEATURES, Net, Rows, trainer


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


def trained(world: int, epochs: int, saved: Path, ckpt_path: Path | None = None) -> dict[str, Tensor]:
    torch.manual_seed(3)
    module, used = Trained(), trainer(strategy="pipeline", devices=world, max_epochs=epochs)
    used.fit(module, ckpt_path=ckpt_path)
    used.save_checkpoint(saved)
    return {name: value.clone() for name, value in module.state_dict().items()}


def continued(rank: int, world: int, folder: Path) -> dict[str, Any]:
    whole = trained(world, 2, folder / "whole.ckpt")
    trained(world, 1, folder / "half.ckpt")
    again = trained(world, 2, folder / "again.ckpt", folder / "half.ckpt")
    # A checkpoint that is only evaluated has no effect on a later fit.
    evaluated = trainer(strategy="pipeline", devices=world, max_epochs=2)
    evaluated.validate(Trained(), ckpt_path=folder / "half.ckpt", verbose=False)
    assert evaluated.strategy._order_at_save is None  # type: ignore[attr-defined]
    orders = [torch.load(folder / f"{name}.ckpt")["lightning_pipe_gradient_order"] for name in ("half", "again")]
    return {"orders": orders, "differs": [name for name in whole if not torch.equal(again[name], whole[name])]}


def test_three_ranks_continue_to_the_bit_with_the_order_of_the_checkpoint(tmp_path: Path) -> None:
    registered = [name for name, _ in Trained().named_parameters()]
    for found in run_ranks(continued, 3, tmp_path):
        assert found["differs"] == []
        assert found["orders"][0] == found["orders"][1] != registered
