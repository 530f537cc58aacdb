"""``PipelineStrategy(plan=...)``: every plan trains to the same bits, and under ``auto`` the fastest is looked for."""

from __future__ import annotations

import contextlib
import io
import re
from collections.abc import Callable
from pathlib import Path
from typing import Any

import lightning.pytorch as pl
import pytest
import torch
import torch.distributed as dist
from torch import Tensor

from lightning_pipe.engine import PipelinePlan, PlanError, SetupError
from lightning_pipe.engine.plans import plan_file
from lightning_pipe.loops import PipelineTrainingEpochLoop
from lightning_pipe.loops.programs.default_program import default_plan
from lightning_pipe.strategies import PipelineStrategy
from tests.distributed import run_ranks
from tests.loops.models import Net, Rows
from tests.strategies.cases import difference, fit, state_of

# Some 11 iterations, in which the hand-written plans are tried; and 80, in which more are.
QUICK = {"iterations": 1, "rounds": 1, "extra_rounds": 0}
LONGER = {"iterations": 1, "rounds": 5, "extra_rounds": 0}
BATCHES = 9
BY_HAND = {"serial", "copy_ahead"}


def auto(exploration: dict[str, Any] = QUICK, **options: Any) -> PipelineStrategy:
    return PipelineStrategy("auto", exploration=exploration, **options)


def net(batches: int = BATCHES) -> Net:
    """With so many batches an epoch on each rank."""
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(3)
        ranks = dist.get_world_size() if dist.is_initialized() else 1
        return Net(Rows(2 * batches * ranks), batch_size=2)


def trained(strategy: Any, batches: int = BATCHES, **options: Any) -> tuple[Any, ...]:
    """Losses, batches trained, optimiser steps, metrics, and what is left."""
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

OPTIONS: dict[str, dict[str, Any]] = {
    "as it is": {},
    "accumulation": {"accumulate_grad_batches": 4},
    "validation in mid-epoch": {"val_check_interval": 2},
    "an end in the exploration": {"max_steps": 10, "max_epochs": -1},
    "epochs shorter than the exploration": {"batches": 5, "max_epochs": 5},
}


@pytest.mark.parametrize("feature", OPTIONS)
def test_one_process_trains_to_the_same_bits_as_without_a_strategy_while_plans_are_tried(feature: str) -> None:
    options, strategy, plans = OPTIONS[feature], auto(), Plans()
    assert_same(trained(strategy, callbacks=[plans], **options), trained("auto", **options))
    assert len(set(plans.names)) > 1
    if "max_steps" not in options:
        assert strategy.plan_choice is not None
        assert set(strategy.plan_choice.measured) == set(plans.names) == BY_HAND
        assert plans.names[-1] == strategy.plan_choice.plan.name


@pytest.mark.parametrize("plan", ["serial", "copy_ahead"])
def test_plans_by_name_train_to_the_same_bits(plan: str) -> None:
    plans = Plans()
    assert_same(trained(PipelineStrategy(plan), callbacks=[plans]), trained("auto"))
    assert set(plans.names) == {plan}


def both(rank: int, world_size: int, folder: Path) -> dict[str, Any]:
    found: dict[str, Any] = {}
    for feature, options in OPTIONS.items():
        strategy, said = auto(), io.StringIO()
        with contextlib.redirect_stdout(said):
            here = trained(strategy, **options)
        found[feature] = here, trained("ddp", **options)
        found[f"{feature}, choice"] = (choice := strategy.plan_choice) and (choice.plan.name, choice.measured)
        found[f"{feature}, said"] = said.getvalue()
    differing = folder / f"{rank}.yaml"
    differing.write_text(default_plan(lambda batch: batch).to_yaml().replace("stage: 1", f"stage: {rank}"))
    with pytest.raises(PlanError) as caught:
        trained(PipelineStrategy(differing))
    found["refused"] = str(caught.value)
    return found


def test_two_processes_choose_one_plan_and_train_to_the_same_bits_as_lightnings_ddp(tmp_path: Path) -> None:
    first, second = run_ranks(both, 2, tmp_path)
    for feature in OPTIONS:
        for results in (first, second):
            assert_same(*results[feature])
        assert first[feature][0][1] != second[feature][0][1], "both ranks trained the same rows"
        (one, other), asked = (results[f"{feature}, choice"] for results in (first, second)), OPTIONS[feature]
        if "max_steps" in asked:
            assert one is other is None
            continue
        assert one == other
        assert f"plan {one[0]} is the fastest" in first[f"{feature}, said"]
        assert second[f"{feature}, said"] == ""
    for results in (first, second):
        assert "the plan differs between ranks" in results["refused"]


# ---------------------------------------------------------------------- what was chosen


def test_it_says_what_it_chose_and_why_and_writes_it_down(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    path, more = tmp_path / "plans" / "mine.yaml", {"batches": 45, "num_sanity_val_steps": 0}
    strategy = auto(LONGER, save_plan=path)
    expected = trained(strategy, **more)
    assert strategy.plan_choice is not None
    chosen = strategy.plan_choice.plan
    out = " ".join(capsys.readouterr().out.split())
    assert re.search(rf"plan {chosen.name} is the fastest: .*(beyond noise|faster than .*, the best hand-written)", out)
    assert all(f" {name} " in out for name in (*BY_HAND, "copy_2_ahead", "H2D", "TrainBatch"))
    again = default_plan(lambda batch: batch, path)
    assert again.description() == chosen.description()
    plans = Plans()
    assert_same(trained(PipelineStrategy(path), callbacks=[plans], **more), expected)
    assert set(plans.names) == {chosen.name}


def test_a_plan_that_was_edited_is_the_one_that_trains(tmp_path: Path) -> None:
    path = tmp_path / "mine.yaml"
    text = default_plan(lambda batch: batch).to_yaml()
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

    for plan in (path, PipelinePlan.from_yaml(path.read_text(), default_plan(lambda batch: batch).tasks.values())):
        copies.clear()
        module = Transfers(Rows(6), 1, shuffle=False)
        data, options = (module.train_dataloader(), module.val_dataloader()), {"num_sanity_val_steps": 0}
        fit(module, PipelineStrategy(plan), *data, max_epochs=1, **options)
        begun = copies.index(("begin", 0))
        assert copies[begun - 4 : begun] == [("train", 0.0), ("train", 1.0), ("train", 2.0), ("train", 3.0)]
        # Evaluation moves batches as far ahead.
        checked = copies.index(("check", 0))
        assert copies[checked - 4 : checked] == [("validate", float(row)) for row in range(4)]


def test_a_plan_that_cannot_be_written_ends_no_training(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    with pytest.warns(UserWarning, match="cannot be written"):
        trained(auto(save_plan=tmp_path / "file" / "plan.yaml"))


@pytest.mark.parametrize("batches", [1, 2])
def test_epochs_too_short_to_time_a_plan_in_train_all_the_same(batches: int, caplog: Any) -> None:
    strategy = auto()
    with caplog.at_level("INFO"):
        assert_same(trained(strategy, batches, max_epochs=10), trained("auto", batches, max_epochs=10))
    assert strategy.plan_choice is None
    assert "Training ended before a plan was chosen" in caplog.text


def test_where_fewer_batches_may_be_in_flight_fewer_plans_are_tried() -> None:
    for most, tried in ((1, {"serial"}), (2, BY_HAND)):
        strategy = auto(max_in_flight=most)
        trained(strategy)
        assert strategy.plan_choice is not None
        assert set(strategy.plan_choice.measured) == tried


class Save(pl.Callback):
    """Writes a checkpoint behind a batch."""

    def __init__(self, path: Path, batch: int) -> None:
        self.path, self.batch = path, batch

    def on_train_batch_end(self, trainer: pl.Trainer, pl_module: Any, outputs: Any, batch: Any, batch_idx: int) -> None:
        if trainer.global_step == self.batch:
            trainer.save_checkpoint(self.path)


@pytest.mark.parametrize("step", [4, 10, 16])
def test_a_run_resumed_while_plans_are_tried_or_later_trains_as_one_that_was_not_interrupted(
    step: int, tmp_path: Path
) -> None:
    path = tmp_path / "a.ckpt"
    whole = trained(auto(), callbacks=[Save(path, step)])
    resumed = trained(auto(), ckpt_path=path)
    assert (resumed[0], resumed[1]) == (whole[0][step:], whole[1][step:])
    assert resumed[2] == whole[2]
    assert difference(resumed[4], whole[4]) == []


def test_training_again_looks_for_a_plan_again() -> None:
    strategy = auto()
    module = net()
    used = fit(module, strategy, module.train_dataloader())
    first = strategy.plan_choice
    assert first is not None
    used.fit_loop.max_epochs = 4
    used.fit(module, module.train_dataloader())
    assert strategy.plan_choice is not first
    assert len(module.losses) == 4 * BATCHES


# ---------------------------------------------------------------------- what is refused

GOOD = default_plan(lambda batch: batch).to_yaml()


@pytest.mark.parametrize(
    ("make", "kind", "said"),
    [
        (lambda: PipelineStrategy("fast"), PlanError, "no plan 'fast': it is neither one of serial, copy_ahead nor"),
        (lambda: PipelineStrategy(Path("no.yaml")), PlanError, "no plan no.yaml.*lightning-pipe plan show pipeline"),
        (lambda: PipelineStrategy(3), PlanError, "no plan 3: it is neither"),  # type: ignore[arg-type]
        (lambda: PipelineStrategy("pla\0n"), PlanError, "neither one of"),
        (lambda: PipelineStrategy(save_plan="a"), SetupError, "'copy_ahead', but .* are for plan='auto'"),
        (lambda: PipelineStrategy("serial", exploration=QUICK), SetupError, "plan='auto', which searches for"),
        (lambda: PipelineStrategy("serial", max_in_flight=2), SetupError, "plan='auto', which searches for"),
        (lambda: PipelineStrategy("auto", max_in_flight=0), PlanError, "max_in_flight is 0"),
        (lambda: PipelineStrategy("auto", max_in_flight="3"), PlanError, "max_in_flight is '3'"),  # type: ignore[arg-type]
        (lambda: auto({"rounds": "two"}), PlanError, "rounds of an exploration is 'two'"),
        (lambda: PipelineStrategy("auto", exploration={"steps": 3}), SetupError, "expected only iterations, rounds"),
        (lambda: PipelineStrategy("auto", exploration={"rounds": 0}), PlanError, "expected a whole number"),
    ],
)
def test_arguments_that_cannot_be_are_refused(make: Callable[[], Any], kind: type[Exception], said: str) -> None:
    with pytest.raises(kind, match=said):
        make()


@pytest.mark.parametrize(
    ("text", "said"),
    [
        ("name: [", "not valid YAML"),
        ("- a", "a plan must be a mapping"),
        (GOOD.replace("H2D", "Copy"), "unknown task 'Copy'; the tasks are H2D, TrainBatch"),
        (GOOD.replace("stage: 1", "stage: -1"), "stages are whole numbers from 0"),
        (GOOD.replace("stage: 1", "stage: 1, thread_group: loader"), "'loader', but the task calls the user's"),
        (GOOD.replace("TrainBatch: {}", "TrainBatch: {stream: side}"), "Set the task's schedule to {}"),
        (
            GOOD.replace("stage: 1", "stage: 2").replace("depth: 2", "depth: 3").replace("{}", "{stage: 1}"),
            "Set the task's schedule to {}",
        ),
        (GOOD.replace("[H2D, TrainBatch]", "[TrainBatch, H2D]"), "Set the order to H2D, TrainBatch"),
        (GOOD + "stale: [[TrainBatch, TrainBatch]]", "which no read or write requires"),
    ],
)
def test_a_plan_in_yaml_that_these_tasks_cannot_run_under_is_refused(text: str, said: str, tmp_path: Path) -> None:
    path = tmp_path / "plan.yaml"
    path.write_text(text)
    with pytest.raises(PlanError, match=re.escape(said)):
        PipelineStrategy(path)


def test_a_plan_that_is_no_text_or_cannot_be_read_is_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = tmp_path / "plan.yaml"
    path.write_bytes(b"\xff\xfe\x00")
    with pytest.raises(PlanError, match=r"is not text in UTF-8 .*plan show pipeline --format yaml"):
        PipelineStrategy(path)

    def denied(*_: Any) -> int:
        raise PermissionError("not yours")

    monkeypatch.setattr(plan_file, "_open_at_once", denied)
    with pytest.raises(PlanError, match=r"cannot be read .not yours"):
        PipelineStrategy(path)
