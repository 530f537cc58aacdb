"""A schedule for the tables alone: the rates PyTorch's schedulers give, and what is refused."""

from __future__ import annotations

import warnings
from typing import Any

import pytest
import torch
from torch.optim.lr_scheduler import LRScheduler

from lightning_pipe.engine import SetupError
from lightning_pipe.recsys.kernels.table_lr_scheduler import TableLRScheduler

RATES = {"users": 0.5, "movies": 0.1}
STEP = {"class_path": "torch.optim.lr_scheduler.StepLR", "init_args": {"step_size": 2, "gamma": 0.5}}

SCHEDULES: list[dict[str, Any]] = [
    STEP,
    {"class_path": "torch.optim.lr_scheduler.CosineAnnealingLR", "init_args": {"T_max": 4}},
    {"class_path": "torch.optim.lr_scheduler.OneCycleLR", "init_args": {"max_lr": [1.0, 0.2], "total_steps": 9}},
]


def expected(config: dict[str, Any], steps: int) -> list[list[float]]:
    """What the scheduler itself gives to an optimizer with a group for each table."""
    groups: list[Any] = [{"params": [torch.zeros(1, requires_grad=True)], "lr": rate} for rate in RATES.values()]
    optimizer = torch.optim.SGD(groups)
    kind: type[LRScheduler] = getattr(torch.optim.lr_scheduler, config["class_path"].rpartition(".")[2])
    scheduler = kind(optimizer, **config.get("init_args", {}))
    found = []
    for _ in range(steps):
        found.append([group["lr"] for group in optimizer.param_groups])
        optimizer.step()
        scheduler.step()
    return found


@pytest.mark.parametrize("config", SCHEDULES, ids=lambda config: config["class_path"].rpartition(".")[2])
def test_each_table_s_rate_follows_the_scheduler_from_its_own_base(config: dict[str, Any]) -> None:
    schedule = TableLRScheduler(config, RATES)
    found = []
    with warnings.catch_warnings():
        warnings.simplefilter("error")  # PyTorch warns of schedulers stepped in the wrong order
        for _ in range(6):
            rates = schedule.learning_rates()
            assert list(rates) == list(RATES)
            found.append(list(rates.values()))
            schedule.step()
    assert found == expected(config, 6)
    assert len({tuple(rates) for rates in found}) > 1


@pytest.mark.parametrize("config", SCHEDULES, ids=lambda config: config["class_path"].rpartition(".")[2])
def test_a_schedule_taken_up_from_its_state_goes_on_as_if_never_interrupted(config: dict[str, Any]) -> None:
    whole, first = TableLRScheduler(config, RATES), TableLRScheduler(config, RATES)
    for _ in range(3):
        whole.step()
        first.step()
    resumed = TableLRScheduler(config, RATES)
    resumed.load_state_dict(first.state_dict())
    for _ in range(3):
        assert resumed.learning_rates() == whole.learning_rates()
        whole.step()
        resumed.step()


@pytest.mark.parametrize(
    ("config", "says"),
    [
        ("torch.optim.lr_scheduler.StepLR", "must be a mapping with class_path"),
        ({"class_path": "torch.optim.SGD"}, "must be a subclass of LRScheduler"),
        ({"class_path": "torch.optim.lr_scheduler.ReduceLROnPlateau"}, "steps on a metric"),
        ({"class_path": "torch.optim.lr_scheduler.StepLR"}, r"does not accept init_args \{\}"),
    ],
)
def test_what_is_no_schedule_is_refused_with_what_is(config: Any, says: str) -> None:
    with pytest.raises(SetupError, match=says):
        TableLRScheduler(config, RATES)
