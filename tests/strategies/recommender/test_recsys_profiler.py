"""A profile in the middle of a training changes nothing of it, on one rank and two, under every plan."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from lightning.pytorch.callbacks import Callback
from torch import Tensor
from torchmetrics import MeanMetric

from lightning_pipe.engine import ProfileResult, SetupError
from lightning_pipe.recsys import recsys_tasks
from tests.distributed import run_ranks
from tests.strategies.cases import ADAGRAD, Batch, Clicks, Memory, Mixed, fit, loader, recsys, state_of

TASKS = [task.name for task in recsys_tasks()]
KINDS = {"people": "row_wise", "things": "data_parallel"}


class Measured(Clicks):
    """Keeps a metric, logs, and draws random numbers in its step."""

    def __init__(self) -> None:
        super().__init__(Mixed)
        self.mean = MeanMetric()
        self.drawn: list[float] = []

    def training_step(self, batch: Batch, batch_idx: int) -> Any:
        loss = super().training_step(batch, batch_idx)
        self.mean.update(loss.detach())
        self.log("mean", self.mean, on_step=True, on_epoch=True)
        return loss


class Profiles(Callback):
    """Profiles the last two batches behind the fourth."""

    def __init__(self, tasks: Any = None, at: int = 3) -> None:
        self.tasks, self.at = tasks, at
        self.batches: list[Any] = []
        self.result: ProfileResult | None = None
        self.losses_before = 0
        self.losses_after = 0

    def on_train_batch_end(self, trainer: Any, pl_module: Any, outputs: Any, batch: Any, batch_idx: int) -> None:
        self.batches = [*self.batches, batch][-2:]
        if batch_idx == self.at and self.result is None:
            self.losses_before = len(pl_module.losses)
            self.result = trainer.strategy.profile(self.batches, self.tasks, rounds=1, iterations=1)
            self.losses_after = len(pl_module.losses)


def trained(
    plan: str, profiles: Profiles | None = None, kind: type[Measured] = Measured, **options: Any
) -> tuple[list[float], list[Any], dict[str, Tensor]]:
    module, logger = kind(), Memory()
    callbacks = [] if profiles is None else [profiles]
    strategy = recsys(plan, KINDS, ADAGRAD)
    # Five batches an epoch on each of two ranks, of which the profile follows the fourth.
    used = fit(module, strategy, loader(40), loader(16), callbacks=callbacks, logger=logger, **options)
    losses = module.losses
    if profiles is not None:
        losses = [*losses[: profiles.losses_before], *losses[profiles.losses_after :]]
    return losses, logger.lines, state_of(used)


def same(one: Any, other: Any) -> list[str]:
    different = [] if one[0] == other[0] else ["losses"]
    different += [] if one[1] == other[1] else ["logged"]
    return different + [name for name in other[2] if not torch.equal(one[2][name], other[2][name])]


class Counts(torch.optim.SGD):
    """Counts its steps where schedules of rates are, and takes smaller and smaller ones."""

    def step(self, closure: Any = None) -> Any:
        for group in self.param_groups:
            group["count"] = group.get("count", 0) + 1
            group["lr"] = 0.1 / group["count"]
        return super().step(closure)


class CountsSteps(Measured):
    def configure_optimizers(self) -> Any:
        return Counts(self.parameters(), lr=0.1)


class ClearsSeldom(Measured):
    def optimizer_zero_grad(self, epoch: int, batch_idx: int, optimizer: Any) -> None:
        if batch_idx % 4 == 0:
            optimizer.zero_grad()


@pytest.mark.parametrize("kind", [CountsSteps, ClearsSeldom])
def test_what_optimizers_and_gradients_hold_is_put_back(kind: type[Measured]) -> None:
    runs = [trained("serial", profiles, kind=kind) for profiles in (None, Profiles(["EmbForward", "DenseForward"]))]
    assert same(runs[1], runs[0]) == []


class AtOnce(Profiles):
    """Profiles before the first batch."""

    def __init__(self, tasks: Any = None) -> None:
        super().__init__(tasks, at=-1)
        self.first = list(loader(8))  # an iterator of a loader draws a random number

    def on_train_batch_start(self, trainer: Any, pl_module: Any, batch: Any, batch_idx: int) -> None:
        if self.result is None:
            self.result = trainer.strategy.profile(self.first, self.tasks, rounds=1, iterations=1)
            self.losses_after = len(pl_module.losses)


def test_training_begins_as_without_a_profile_before_it() -> None:
    runs = [trained("prefetch", profiles) for profiles in (None, AtOnce(["EmbForward"]))]
    assert same(runs[1], runs[0]) == []


class Scheduled(Measured):
    """Another learning rate in each step, which tables follow."""

    def configure_optimizers(self) -> Any:
        optimizer = super().configure_optimizers()
        scheduler = torch.optim.lr_scheduler.LambdaLR(optimizer, lambda step: 1 / (1 + step))
        return {"optimizer": optimizer, "lr_scheduler": {"scheduler": scheduler, "interval": "step"}}


def with_schedule(rank: int, world_size: int) -> list[str]:
    return same(*(trained("serial", profiles, kind=Scheduled) for profiles in (Profiles(["DenseForward"]), None)))


def test_replicated_tables_continue_with_the_schedules_rate() -> None:
    assert run_ranks(with_schedule, 2) == [[], []]


OPTIONS: dict[str, dict[str, Any]] = {
    "plain": {},
    "clipped": {"gradient_clip_val": 0.1},
    "accumulated": {"accumulate_grad_batches": 2},
}
# A run, and the plan that it is trained under.
CASES = [("plain", "serial"), ("clipped", "prefetch"), ("accumulated", "prefetch")]


def run_cases(rank: int, world_size: int, cases: list[tuple[str, str]]) -> dict[str, Any]:
    results: dict[str, Any] = {}
    for name, plan in cases:
        profiles = Profiles(["DenseForward"] if name == "accumulated" else None)
        ours = trained(plan, profiles, **OPTIONS[name])
        results[f"{plan}, {name}"] = same(ours, trained(plan, None, **OPTIONS[name]))
        results[f"tasks, {plan}, {name}"] = profiles.result
        results[f"called, {plan}, {name}"] = profiles.losses_after - profiles.losses_before
    for plan in sorted({plan for _, plan in cases}):
        accumulating = Profiles(["DenseForward"], at=2)
        try:
            trained(plan, accumulating, accumulate_grad_batches=2)
        except SetupError as error:
            results[f"accumulating, {plan}"] = str(error)
    return results


@pytest.fixture(scope="module")
def ranks() -> list[dict[str, Any]]:
    return run_ranks(run_cases, 1, CASES)


@pytest.mark.parametrize(("name", "plan"), CASES)
def test_training_goes_on_to_the_bits_of_one_that_was_not_profiled(
    ranks: list[dict[str, Any]], plan: str, name: str
) -> None:
    assert [results[f"{plan}, {name}"] for results in ranks] == [[]] * len(ranks)


@pytest.mark.parametrize(("name", "plan"), CASES[:2])
def test_every_task_is_profiled_as_the_module_trains(ranks: list[dict[str, Any]], plan: str, name: str) -> None:
    for results in ranks:
        profile = results[f"tasks, {plan}, {name}"]
        assert set(profile.tasks) == set(TASKS)
        assert profile.plan == plan
        assert all(one.exposed is not None for one in profile.tasks.values())
        assert results[f"called, {plan}, {name}"] > len(TASKS)


@pytest.mark.parametrize("plan", ["serial", "prefetch"])
def test_in_mid_accumulation_every_rank_is_told_why_not(ranks: list[dict[str, Any]], plan: str) -> None:
    for results in ranks:
        assert "in the middle of an accumulation" in results[f"accumulating, {plan}"]
