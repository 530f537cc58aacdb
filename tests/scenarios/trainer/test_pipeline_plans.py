"""``PipelineStrategy(plan=...)``: every plan trains to the same bits."""

from __future__ import annotations

import re
from collections.abc import Callable
from pathlib import Path
from typing import Any

import lightning.pytorch as pl
import pytest
import torch
import torch.distributed as dist
from torch import Tensor

from lightning_pipe.engine import PipelinePlan, PlanError
from lightning_pipe.loops import PipelineTrainingEpochLoop
from lightning_pipe.loops.programs.default_program import build_plan_of_default_tasks
from lightning_pipe.strategies import PipelineStrategy
from tests.distributed import run_ranks
from tests.loops.models import Net, Rows
from tests.strategies.cases import difference, fit, state_of

BATCHES = 9


def net(batches: int = BATCHES) -> Net:
    """With so many batches an epoch on each rank."""
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(3)
        ranks = dist.get_world_size() if dist.is_initialized() else 1
        return Net(Rows(2 * batches * ranks), batch_size=2)


def trained(strategy: Any, batches: int = BATCHES, **options: Any) -> tuple[Any, ...]:
    """Losses, batches trained, optimizer steps, metrics, and what is left."""
    module = net(batches)
    used = fit(module, strategy, module.train_dataloader(), Net(Rows(8)).val_dataloader(), **options)
    return module.losses, module.trained, used.global_step, dict(used.callback_metrics), state_of(used)


def assert_same(found: tuple[Any, ...], expected: tuple[Any, ...]) -> None:
    assert len(expected[0]) >= 10
    assert found[:4] == expected[:4]
    assert difference(found[4], expected[4]) == []


class Plans(pl.Callback):
    """Writes down under which plan each batch trained."""

    def __init__(self) -> None:
        self.names: list[str] = []

    def on_train_batch_end(self, trainer: pl.Trainer, *args: Any) -> None:
        self.names.append(pipeline_of(trainer).plan.name)


def pipeline_of(trainer: pl.Trainer) -> Any:
    loop = trainer.fit_loop.epoch_loop
    assert isinstance(loop, PipelineTrainingEpochLoop)
    assert loop.program is not None
    return loop.program.pipeline


# ---------------------------------------------------------------------- the same bits


@pytest.mark.parametrize("plan", ["serial", "copy_ahead"])
def test_plans_by_name_train_to_the_same_bits(plan: str) -> None:
    plans = Plans()
    assert_same(trained(PipelineStrategy(plan), callbacks=[plans]), trained("auto"))
    assert set(plans.names) == {plan}


def with_differing_plans(rank: int, world_size: int, folder: Path) -> str:
    path = folder / f"{rank}.yaml"
    path.write_text(build_plan_of_default_tasks(lambda batch: batch).to_yaml().replace("stage: 1", f"stage: {rank}"))
    with pytest.raises(PlanError) as caught:
        trained(PipelineStrategy(path))
    return str(caught.value)


def test_ranks_with_different_plans_are_refused(tmp_path: Path) -> None:
    for refused in run_ranks(with_differing_plans, 2, tmp_path):
        assert "the plan differs between ranks" in refused


def test_a_plan_that_was_edited_is_the_one_that_trains(tmp_path: Path) -> None:
    path = tmp_path / "mine.yaml"
    text = build_plan_of_default_tasks(lambda batch: batch).to_yaml()
    path.write_text(text.replace("copy_ahead", "mine").replace("stage: 1", "stage: 3").replace("depth: 2", "depth: 4"))
    copies: list[tuple[str, float]] = []

    class Transfers(Net):
        def transfer_batch_to_device(self, batch: Any, device: torch.device, dataloader_idx: int) -> Any:
            copies.append(("train" if self.trainer.training else "validate", batch[0, 0].item()))
            return super().transfer_batch_to_device(batch, device, dataloader_idx)

        def on_train_batch_start(self, batch: Tensor, batch_idx: int) -> None:
            copies.append(("begin", batch_idx))

        def on_validation_batch_start(self, batch: Tensor, batch_idx: int, dataloader_idx: int = 0) -> None:
            copies.append(("check", batch_idx))

    for plan in (
        path,
        PipelinePlan.from_yaml(path.read_text(), build_plan_of_default_tasks(lambda batch: batch).tasks.values()),
    ):
        copies.clear()
        module = Transfers(Rows(6), 1, shuffle=False)
        data, options = (module.train_dataloader(), module.val_dataloader()), {"num_sanity_val_steps": 0}
        fit(module, PipelineStrategy(plan), *data, max_epochs=1, **options)
        begun = copies.index(("begin", 0))
        assert copies[begun - 4 : begun] == [("train", 0.0), ("train", 1.0), ("train", 2.0), ("train", 3.0)]
        # Evaluation moves batches as far ahead.
        checked = copies.index(("check", 0))
        assert copies[checked - 4 : checked] == [("validate", float(row)) for row in range(4)]


# ---------------------------------------------------------------------- what is refused

GOOD = build_plan_of_default_tasks(lambda batch: batch).to_yaml()


@pytest.mark.parametrize(
    ("make", "kind", "said"),
    [
        (lambda: PipelineStrategy("fast"), PlanError, "no plan 'fast': it is neither one of serial, copy_ahead nor"),
        (lambda: PipelineStrategy(Path("no.yaml")), PlanError, "no plan no.yaml.*lightning-pipe plan show pipeline"),
        (lambda: PipelineStrategy(3), PlanError, "no plan 3: it is neither"),  # type: ignore[arg-type]
        (lambda: PipelineStrategy("pla\0n"), PlanError, "neither one of"),
    ],
)
def test_arguments_that_cannot_be_are_refused(make: Callable[[], Any], kind: type[Exception], said: str) -> None:
    with pytest.raises(kind, match=said):
        make()


@pytest.mark.parametrize(
    ("text", "said"),
    [
        ("name: [", "not valid YAML"),
        ("- a", "the plan is ['a']; expected a mapping"),
        (GOOD.replace("H2D", "Copy"), "unknown task 'Copy'; the tasks are H2D, TrainBatch"),
        (GOOD.replace("stage: 1", "stage: -1"), "expected a whole number from 0"),
        (GOOD.replace("stage: 1", "stage: 1, thread_group: loader"), "expected 'H2D' in thread group 'main'"),
        (GOOD.replace("TrainBatch: {}", "TrainBatch: {stream: side}"), "'TrainBatch' with an empty schedule {}"),
        (GOOD.replace("[H2D, TrainBatch]", "[TrainBatch, H2D]"), "the order H2D, TrainBatch; got"),
        (GOOD + "stale: [[TrainBatch, TrainBatch]]", "which no read or write requires"),
    ],
)
def test_a_plan_in_yaml_that_these_tasks_cannot_run_under_is_refused(text: str, said: str, tmp_path: Path) -> None:
    path = tmp_path / "plan.yaml"
    path.write_text(text)
    with pytest.raises(PlanError, match=re.escape(said)):
        PipelineStrategy(path)
