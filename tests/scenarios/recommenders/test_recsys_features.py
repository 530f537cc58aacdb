"""What Lightning's Trainer offers works under every plan as it does in Lightning's own loop."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from functools import cache
from typing import Any

import lightning.pytorch as pl
import pytest
import torch
from lightning.pytorch.callbacks import Callback
from torch.optim.lr_scheduler import LambdaLR, ReduceLROnPlateau, StepLR
from torchrec.optim.apply_optimizer_in_backward import apply_optimizer_in_backward

from lightning_pipe.recsys.kernels.fused_kernels import find_fused_kernels
from lightning_pipe.strategies import RecsysPipelineStrategy
from tests.rounding import Reference
from tests.strategies.cases import (
    ADAGRAD,
    PLANS,
    ROW_WISE_ADAGRAD,
    SGD,
    Clicks,
    Memory,
    Sequenced,
    fit,
    loader,
    outcome,
    predictions,
    recsys,
    trainer,
)


class Stop(Callback):
    """Stops in the middle of an epoch."""

    def on_train_batch_end(self, used: pl.Trainer, *args: Any) -> None:
        used.should_stop = used.global_step == 4


class Skipping(Clicks):
    """Skips the rest of an epoch."""

    def on_train_batch_start(self, batch: Any, batch_idx: int) -> int | None:
        return -1 if batch_idx == 2 else None


class Sometimes(Clicks):
    """Some batches have nothing to train."""

    def training_step(self, batch: Any, batch_idx: int) -> Any:
        loss = super().training_step(batch, batch_idx)
        return None if batch_idx % 3 == 1 else loss


class Mapped(Clicks):
    """Returns more than the loss."""

    def training_step(self, batch: Any, batch_idx: int) -> Any:
        return {"loss": super().training_step(batch, batch_idx), "count": len(batch.label)}


FEATURES: dict[str, tuple[Callable[..., Clicks], dict[str, Any]]] = {
    "accumulation that an epoch does not divide into": (Clicks, {"accumulate_grad_batches": 4}),
    "max_steps with accumulation": (Clicks, {"max_steps": 4, "max_epochs": -1, "accumulate_grad_batches": 4}),
    "fast_dev_run": (Clicks, {"fast_dev_run": True}),
    "validation in mid-epoch": (Clicks, {"val_check_interval": 2}),
    "early stop in mid-epoch": (Clicks, {"callbacks": Stop, "min_epochs": 0}),
    "the rest of an epoch skipped": (Skipping, {}),
    "a step without a loss under accumulation": (Sometimes, {"accumulate_grad_batches": 2}),
    "a mapping from the step": (Mapped, {}),
}


def trained(make: Callable[..., Clicks], strategy: Any, options: dict[str, Any], **arguments: Any) -> Any:
    """The module, its trainer, and what it left."""
    module, logger = make(**arguments), Memory()
    callbacks = [options["callbacks"]()] if "callbacks" in options else None
    used = fit(module, strategy, val=loader(8), **{**options, "logger": logger, "callbacks": callbacks})
    return module, used, logger


def run_feature(feature: str, strategy: Any) -> tuple[dict[str, Any], list[Any]]:
    """All numbers, and what must be the same exactly: steps, and names of what is logged."""
    make, options = FEATURES[feature]
    module, used, logger = trained(make, strategy, options, in_backward=ADAGRAD)
    logged = {f"{key} of line {at}": value for at, (_, line) in enumerate(logger.lines) for key, value in line.items()}
    exact = [used.global_step, used.current_epoch, [(step, set(line)) for step, line in logger.lines]]
    return {**outcome(module, used), **logged}, exact


@cache
def in_lightnings_loop(feature: str) -> tuple[Reference, list[Any]]:
    return Reference.of(lambda: run_feature(feature, "auto")[0]), run_feature(feature, "auto")[1]


def with_a_plan(names: Iterable[str]) -> list[tuple[str, str]]:
    """Each of the names with a plan, another one each time."""
    return [(name, PLANS[-1 - place % len(PLANS)]) for place, name in enumerate(names)]


@pytest.mark.parametrize(("feature", "plan"), with_a_plan(FEATURES))
def test_a_feature_of_the_trainer_works_as_in_lightnings_own_loop(feature: str, plan: str) -> None:
    reference, expected = in_lightnings_loop(feature)
    found, exact = run_feature(feature, recsys(plan, optimizer=None))
    assert exact == expected
    assert reference.differences(found) == []


# ---------------------------------------------------------------------- learning rates


def one_optimizer(schedule: Callable[[Any], Any]) -> Callable[[Clicks], Any]:
    """SGD for all parameters, as an unsharded module has it, and a schedule for it."""

    def configure(module: Clicks) -> Any:
        optimizer = torch.optim.SGD(module.parameters(), lr=0.5)
        return {"optimizer": optimizer, "lr_scheduler": schedule(optimizer)}

    return configure


SCHEDULES: dict[str, Callable[[Any], Any]] = {
    "each epoch": lambda optimizer: {"scheduler": StepLR(optimizer, 1, 0.1), "interval": "epoch"},
    "warm-up from zero": lambda optimizer: {
        "scheduler": LambdaLR(optimizer, lambda step: min(1.0, step / 5)),
        "interval": "step",
    },
    "on a metric": lambda optimizer: {
        "scheduler": ReduceLROnPlateau(optimizer, patience=0, factor=0.1, threshold=10.0),
        "monitor": "loss_epoch",
    },
}


class Rates(Callback):
    """The rate of every step: of the dense optimizer at its start, and of the tables as it ends."""

    def __init__(self) -> None:
        self.dense: list[float] = []
        self.tables: list[set[float]] = []

    def on_train_batch_start(self, used: pl.Trainer, *args: Any) -> None:
        self.dense.append(used.optimizers[0].param_groups[0]["lr"])

    def on_train_batch_end(self, used: pl.Trainer, *args: Any) -> None:
        if isinstance(used.strategy, RecsysPipelineStrategy):
            self.tables.append(set(used.strategy.sharded_model.learning_rates().values()))


@cache
def unsharded(schedule: str) -> tuple[Reference, list[float]]:
    """What training comes to, and the rates of its batches."""
    expected = Rates()

    def run() -> dict[str, Any]:
        expected.dense.clear()
        module = Clicks(optimizers=one_optimizer(SCHEDULES[schedule]))
        return outcome(module, fit(module, "auto", max_epochs=3, callbacks=[expected]))

    return Reference.of(run), expected.dense


@pytest.mark.parametrize(("schedule", "plan"), with_a_plan(SCHEDULES))
def test_a_schedule_of_the_dense_optimizer_reaches_the_tables(schedule: str, plan: str) -> None:
    reference, rates = unsharded(schedule)
    assert len(set(rates)) > 1
    module, found = Clicks(optimizers=one_optimizer(SCHEDULES[schedule])), Rates()
    used = fit(module, recsys(plan, optimizer=SGD), max_epochs=3, callbacks=[found])
    assert found.dense == rates
    assert found.tables == [{rate} for rate in rates]
    assert reference.differences(outcome(module, used)) == []


def test_the_tables_can_have_a_schedule_of_their_own() -> None:
    """The reference says the same with a group, and a schedule, for the tables."""

    def configure(module: Clicks) -> Any:
        groups = [{"params": module.dense_parameters(), "lr": 0.05}, {"params": module.table_parameters(), "lr": 0.5}]
        optimizer = torch.optim.SGD(groups)
        schedules = [lambda step: 1.0, lambda step: 0.5 ** (step // 4)]
        return {
            "optimizer": optimizer,
            "lr_scheduler": {"scheduler": LambdaLR(optimizer, schedules), "interval": "step"},
        }

    def dense_only(module: Clicks) -> Any:
        return torch.optim.SGD(module.dense_parameters(), lr=0.05)

    schedule = {"class_path": "torch.optim.lr_scheduler.StepLR", "init_args": {"step_size": 4, "gamma": 0.5}}

    def unsharded() -> dict[str, Any]:
        module = Clicks(Sequenced, optimizers=configure)
        return outcome(module, fit(module, "auto"))

    reference = Reference.of(unsharded)
    for plan in ("prefetch", "fused_sparse_dist"):
        module, found = Clicks(Sequenced, optimizers=dense_only), Rates()
        strategy = recsys(plan, optimizer=SGD, sparse_lr_scheduler=schedule)
        used = fit(module, strategy, callbacks=[found])
        assert found.tables == [{0.5}] * 4 + [{0.25}] * 4 + [{0.125}] * 4
        assert set(found.dense) == {0.05}
        assert reference.differences(outcome(module, used)) == [], plan


def test_one_schedule_serves_tables_of_several_base_rates() -> None:
    class Two(Clicks):
        def __init__(self) -> None:
            super().__init__()
            for parameter, rate in zip(self.table_parameters(), (0.1, 0.4), strict=True):
                apply_optimizer_in_backward(torch.optim.SGD, [parameter], {"lr": rate})

    schedule = {"class_path": "torch.optim.lr_scheduler.ExponentialLR", "init_args": {"gamma": 0.5}}
    used = fit(Two(), recsys(optimizer=None, sparse_lr_scheduler=schedule), max_steps=3, max_epochs=-1)
    strategy = used.strategy
    assert isinstance(strategy, RecsysPipelineStrategy)
    # The third step's, which the second's end has set.
    assert list(strategy.sharded_model.learning_rates().values()) == pytest.approx([0.025, 0.1])


# ---------------------------------------------------------------------- evaluation


def test_validate_test_and_predict_compute_what_the_unsharded_module_does() -> None:
    """Inference mode, Lightning's default, has no CPU kernel in FBGEMM; and evaluation must not count as training."""

    def evaluated(strategy: Any) -> dict[str, Any]:
        module = Clicks(in_backward=ROW_WISE_ADAGRAD)
        used = trainer(strategy, inference_mode=True)
        (validated,) = used.validate(module, loader(8), verbose=False)
        (tested,) = used.test(module, loader(8), verbose=False)
        return {**validated, **tested, "predictions": predictions(used, module, loader(8))}

    strategy = recsys(optimizer=None)
    assert Reference.of(lambda: evaluated("auto")).differences(evaluated(strategy)) == []
    assert isinstance(strategy, RecsysPipelineStrategy)
    kernels = [
        kernel for module in strategy.sharded_model.sharded_modules.values() for kernel in find_fused_kernels(module)
    ]
    assert kernels
    assert [int(kernel.iter_cpu) for kernel in kernels] == [0] * len(kernels)
