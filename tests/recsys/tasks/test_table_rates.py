"""Learning rates of the tables under a Trainer: they follow the dense optimizer, from searches to schedules."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import lightning.pytorch as pl
import pytest
import torch
from lightning.pytorch.callbacks import LearningRateFinder
from lightning.pytorch.tuner import Tuner
from torch.optim.lr_scheduler import CyclicLR, LambdaLR, OneCycleLR

from tests.strategies.cases import Clicks, loader, recsys, trainer

TABLES = 0.1  # of ADAGRAD
DENSE = 0.02


class Rates(pl.Callback):
    """Rates of the dense optimizer and of the tables in each batch."""

    def __init__(self) -> None:
        self.dense: list[float] = []
        self.tables: list[float] = []

    def on_before_optimizer_step(self, trainer: Any, module: Any, optimizer: Any) -> None:
        self.dense.append(optimizer.param_groups[0]["lr"])
        (rate,) = set(trainer.strategy.sharded_model.learning_rates().values())
        self.tables.append(rate)


class Tuned(Clicks):
    def __init__(self) -> None:
        super().__init__()
        self.lr = DENSE

    def configure_optimizers(self) -> Any:
        return torch.optim.SGD(self.dense_parameters(), lr=self.lr)


def test_tables_keep_their_ratio_to_the_rate_that_a_search_found(tmp_path: Path) -> None:
    found = []
    for by_tuner in (True, False):
        module, rates = Tuned(), Rates()
        options: dict[str, Any] = {"max_epochs": 1, "default_root_dir": tmp_path}
        search = LearningRateFinder(min_lr=1e-3, max_lr=0.5, num_training_steps=30, update_attr=True)
        callbacks = [rates] if by_tuner else [rates, search]
        used = trainer(recsys("base"), callbacks=callbacks, **options)
        if by_tuner:
            Tuner(used).lr_find(module, loader(160), min_lr=1e-3, max_lr=0.5, num_training=30)
            rates.dense, rates.tables = [], []
        torch.manual_seed(17)
        used.fit(module, loader(160))
        assert module.lr != DENSE
        found.append((rates.dense[-6:], rates.tables[-6:]))
        assert rates.dense[-6:] == [module.lr] * 6
        assert rates.tables[-6:] == pytest.approx([TABLES * module.lr / DENSE] * 6)
    assert found[0] == found[1]


SCHEDULES: dict[str, tuple[Any, list[float]]] = {
    # Relative to max_lr, which is the rate that the tables' base rate stands for.
    "one cycle": (
        lambda optimizer: OneCycleLR(optimizer, max_lr=0.1, total_steps=8, pct_start=0.5),
        [0.1 / 25, 0.1, 0.1],
    ),
    # Relative to base_lr: tables exceed their base rate.
    "cyclic": (lambda optimizer: CyclicLR(optimizer, base_lr=0.02, max_lr=0.1, step_size_up=3), [0.02, 0.1, 0.02]),
    # Relative to the rate of the optimizer, before the schedule changes it.
    "warm-up": (lambda optimizer: LambdaLR(optimizer, lambda step: (step + 1) / 4), [DENSE / 4, DENSE * 6 / 4, DENSE]),
}


@pytest.mark.parametrize(("schedule", "expected"), SCHEDULES.values(), ids=SCHEDULES)
def test_tables_follow_a_schedule_relative_to_its_reference(schedule: Any, expected: list[float]) -> None:
    class Scheduled(Tuned):
        def configure_optimizers(self) -> Any:
            optimizer = super().configure_optimizers()
            return {"optimizer": optimizer, "lr_scheduler": {"scheduler": schedule(optimizer), "interval": "step"}}

    first, highest, reference = expected
    rates = Rates()
    trainer(recsys("base"), callbacks=[rates], max_epochs=1).fit(Scheduled(), loader())
    assert rates.dense[0] == pytest.approx(first)
    assert max(rates.dense) == pytest.approx(highest)
    assert rates.tables == pytest.approx([TABLES * rate / reference for rate in rates.dense])
