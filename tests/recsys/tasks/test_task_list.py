"""The eleven tasks: what each reads and writes, and what it does where there is nothing to train."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
import yaml
from torch import nn

from lightning_pipe.engine import (
    IterContext,
    PlanError,
    SWPipeline,
    TaskSchedule,
)
from lightning_pipe.recsys import (
    ModelRewrite,
    RecsysActions,
    RecsysTask,
    ShardedModel,
    TrainPipeline,
    recsys_plan,
    recsys_tasks,
)
from lightning_pipe.recsys.dense.dense_reduction import DenseGradientReducer
from lightning_pipe.recsys.kernels.fused_kernels import find_fused_kernels
from lightning_pipe.recsys.plans.recsys_plans import plan_of_spec
from lightning_pipe.recsys.tasks.actions import TableHooks
from lightning_pipe.recsys.tasks.context import RecsysContext
from tests.recsys.pipeline_cases import CASES, Case, adam, difference, grouped, sharded, train, values_of
from tests.recsys.rewrite_cases import Bags, Batch, batches
from tests.recsys.sharding_cases import CPU, ROW_WISE_ADAGRAD

pytestmark = pytest.mark.usefixtures("one_rank")

NAMES = [
    "H2DAndShuffle",
    "EmbInputDistStart",
    "EmbInputDistWait",
    "EmbPrefetch",
    "EmbForward",
    "DenseForward",
    "LossPostprocess",
    "DenseBackward",
    "EmbBackward",
    "FinalizeGrads",
    "OptimStep",
]


def same(batch: Any) -> Any:
    return batch


@contextmanager
def actions_of(model: ShardedModel, *, look_ahead: bool = False, **arguments: Any) -> Iterator[RecsysActions]:
    world = dist.group.WORLD
    assert world is not None
    rewrite = ModelRewrite(model.module, method="direct", look_ahead=look_ahead)
    reducer = DenseGradientReducer(model.dense_parameters(), world)
    try:
        yield RecsysActions(
            rewrite,
            **{
                "transfer": same,
                "training_step": model.module,
                "loss_of": lambda output: output[0],
                "reducer": reducer,
                "tables": TableHooks(after_backward=model.step_data_parallel_tables),
                **arguments,
            },
        )
    finally:
        reducer.close()
        rewrite.restore()


def run(actions: RecsysActions, batch: Any, ctx: IterContext | None = None) -> IterContext:
    ctx = RecsysContext(batch) if ctx is None else ctx
    for task in recsys_tasks(actions):
        task.fn(ctx)
    return ctx


def test_the_tasks_are_the_eleven_of_a_serial_iteration() -> None:
    assert [task.name for task in recsys_tasks()] == NAMES


def test_scaled_late_the_tables_backward_comes_last_and_reads_the_scale() -> None:
    tasks = recsys_tasks(scaled_late=True)
    assert [task.name for task in tasks] == [*(name for name in NAMES if name != "EmbBackward"), "EmbBackward"]
    assert "gradient_scale" in tasks[-1].reads
    assert "gradient_scale" in tasks[-2].writes


def state_written(model: ShardedModel, call: Callable[[], Any]) -> list[str]:
    before = values_of(model)
    call()
    return difference(before, values_of(model))


@pytest.mark.parametrize("case", ["pooled, table_wise", "pooled, data_parallel"])
def test_tables_change_in_their_backward_only_and_layers_in_the_optimizer_step_only(case: str) -> None:
    model = sharded(CASES[case])
    with actions_of(model, optimizer_step=adam(model).step) as actions:
        ctx = IterContext(CASES[case].data(1)[0])
        changed = {task.name: state_written(model, lambda: task.fn(ctx)) for task in recsys_tasks(actions)}  # noqa: B023
    assert {name for name, values in changed.items() if values} == {"EmbBackward", "OptimStep"}
    assert all("embedding_bags" in name for name in changed["EmbBackward"])
    assert not any("embedding_bags" in name for name in changed["OptimStep"])


class Pair(nn.Module):
    def __init__(self, model: nn.Module) -> None:
        super().__init__()
        self.model = model

    def forward(self, batch: Any) -> Any:
        return self.model(batch), None


def pooled() -> nn.Module:
    return Pair(Bags())


def test_after_a_batch_is_abandoned_in_mid_training_the_next_lookup_brings_learning_rates_again() -> None:
    model = sharded(Case(pooled, optimizer=ROW_WISE_ADAGRAD))
    brought: list[str] = []
    with actions_of(model, look_ahead=True, tables=TableHooks(lambda: brought.append("rates"))) as actions:
        tasks = {task.name: task.fn for task in recsys_tasks(actions)}
        first, ahead, following = (IterContext(batch) for batch in batches(3))

        def run_until(ctx: IterContext, last: str) -> int:
            """How often rates were brought in the last of the tasks."""
            for name in NAMES[: NAMES.index(last)]:
                tasks[name](ctx)
            brought.clear()
            tasks[last](ctx)
            return len(brought)

        assert run_until(first, "EmbForward") == 1
        tasks["DenseForward"](first)
        # The tables' rates are those of the batch in training until its backward.
        assert run_until(ahead, "EmbForward") == 0
        actions.abandon([first, ahead])
        assert run_until(following, "EmbForward") == 1
    assert steps_of(model) == [1, 1]  # of the one that may still be trained


@pytest.mark.parametrize("why", ["no step", "no grad mode", "no loss", "no output"])
def test_a_batch_that_is_not_trained_changes_nothing(why: str) -> None:
    model = sharded(Case(pooled, optimizer=ROW_WISE_ADAGRAD))
    optimizer = adam(model)
    steps: dict[str, Any] = {
        "no step": None,
        "no grad mode": model.module,
        "no loss": lambda batch: (None, model.module(batch)),
        "no output": lambda batch: None,
    }
    checked: list[Any] = []
    with (
        actions_of(
            model, training_step=steps[why], optimizer_step=optimizer.step, check_loss=checked.append
        ) as actions,
        torch.set_grad_enabled(why != "no grad mode"),
    ):
        assert state_written(model, lambda: run(actions, batches(1)[0])) == []
    assert steps_of(model) == [0, 0]
    assert optimizer.state_dict()["state"] == {}
    # Other ranks may have a loss to check.
    assert checked == ([None] if why in ("no loss", "no output") else [])


def steps_of(model: ShardedModel) -> list[int]:
    """How many steps the tables' kernels have counted."""
    return [
        int(kernel.iter.item()) for module in model.sharded_modules.values() for kernel in find_fused_kernels(module)
    ]


def test_a_caller_s_own_step_and_backward_are_run_in_their_tasks() -> None:
    model = sharded(Case(pooled))
    called = []
    with actions_of(model, training_step=None) as actions:
        pipeline = SWPipeline(recsys_plan("base", recsys_tasks(actions)))
        ctx = pipeline.begin_period(iter(batches(3)))

        def step() -> Any:
            called.append("step")
            return model.module(ctx.batch)

        def backward() -> None:
            called.append("backward")
            loss.backward()

        ctx.training_step = step
        pipeline.run_until("LossPostprocess")
        loss = ctx.loss
        ctx.run_backward = backward
        pipeline.run_until("DenseBackward")
        assert ctx.has_gradients
        pipeline.finish_period()
        pipeline.close()
    assert called == ["step", "backward"]


# A task from outside the package: its declaration here, its place in a plan.


def double(actions: RecsysActions, ctx: IterContext) -> None:
    """Feed dense features twice as large."""
    ctx.batch = Batch(2 * ctx.batch.dense, ctx.batch.sparse, ctx.batch.label)


DOUBLED = {"H2DAndShuffle": RecsysTask("Double", double, reads=("batch",), writes=("batch",))}


@pytest.mark.parametrize("name", ["serial", "prefetch", "threaded_input"])
def test_a_task_of_the_callers_own_trains_in_a_plan_that_places_it(name: str, tmp_path: Path) -> None:
    content = yaml.safe_load(recsys_plan(name, recsys_tasks()).to_yaml())
    content["tasks"]["Double"] = dict(content["tasks"]["H2DAndShuffle"] or {})
    content["order"].insert(content["order"].index("H2DAndShuffle") + 1, "Double")
    path = tmp_path / "doubled.yaml"
    path.write_text(yaml.safe_dump(content, sort_keys=False), encoding="utf-8")

    def trained(plan: Any, data: list[Batch], **arguments: Any) -> dict[str, torch.Tensor]:
        model = sharded(Case(pooled))
        pipeline = TrainPipeline(model, adam(model), CPU, plan, **grouped(arguments))
        train(pipeline, data)
        pipeline.close()
        return values_of(model)

    larger = [Batch(2 * one.dense, one.sparse, one.label) for one in batches(5)]
    expected = trained("serial", larger)
    assert difference(trained(path, batches(5), extra_tasks=DOUBLED), expected) == []
    assert difference(trained("serial", batches(5)), expected) != []


def test_beside_a_balancer_a_task_behind_the_copy_comes_before_the_exchange() -> None:
    spec = recsys_plan("prefetch", recsys_tasks()).spec.insert("Double", TaskSchedule(2), after="H2DAndShuffle")
    order = plan_of_spec(spec, recsys_tasks(balanced=True, extra=DOUBLED)).order
    positions = [order.index(task) for task in ("H2DAndShuffle", "Double", "BalanceStart", "BalanceFinish")]
    assert positions == sorted(positions)


def test_extra_tasks_come_after_the_tasks_that_they_name() -> None:
    more = {**DOUBLED, "Double": RecsysTask("Again", double, reads=("batch",), writes=("batch",))}
    assert [task.name for task in recsys_tasks(extra=more)][:4] == ["H2DAndShuffle", "Double", "Again", NAMES[1]]
    with pytest.raises(PlanError, match=r"extra tasks must follow one of H2DAndShuffle, .*, got Duble"):
        recsys_tasks(extra={"Duble": more["Double"]})
