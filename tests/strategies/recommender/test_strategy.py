"""What the strategy sets up, refuses, and leaves behind."""

from __future__ import annotations

import dataclasses
import os
import pickle
import threading
from pathlib import Path
from typing import Any

import lightning.pytorch as pl
import pytest
import torch
import torch.distributed as dist
from lightning.pytorch.callbacks import Callback
from lightning.pytorch.plugins.io import AsyncCheckpointIO
from torch import nn
from torchrec.modules.embedding_configs import EmbeddingBagConfig
from torchrec.modules.embedding_modules import EmbeddingBagCollection

from lightning_pipe.engine import PlanError, SetupError, TaskSchedule, TaskSpan
from lightning_pipe.recsys import RecsysTask, ShardingOptions
from lightning_pipe.recsys.plans.recsys_plans import plan_of_spec, recsys_plan
from lightning_pipe.recsys.tasks.task_list import recsys_tasks
from lightning_pipe.strategies import RecsysPipelineStrategy
from tests.rounding import Reference
from tests.strategies.cases import (
    ADAGRAD,
    PLANS,
    SGD,
    Clicks,
    Mixed,
    Pooled,
    difference,
    fit,
    loader,
    outcome,
    recsys,
    state_of,
    trainer,
)

PEOPLE, THINGS = (f"network.bags.embedding_bags.{name}.weight" for name in ("people", "things"))


def strategy_of(used: pl.Trainer) -> RecsysPipelineStrategy:
    assert isinstance(used.strategy, RecsysPipelineStrategy)
    return used.strategy


# ---------------------------------------------------------------------- plans


def test_a_plan_may_be_a_name_an_object_or_a_file(tmp_path: Path) -> None:
    plan = recsys_plan("prefetch", recsys_tasks())
    file = tmp_path / "plan.yaml"
    file.write_text(plan.to_yaml(), encoding="utf-8")
    states = [state_of(fit(Clicks(), recsys(given))) for given in ("prefetch", plan, file, str(file))]
    assert states[0]
    assert [difference(state, states[0]) for state in states] == [[], [], [], []]


def test_what_is_on_or_off_is_no_text() -> None:
    with pytest.raises(SetupError, match="async_checkpoints is 'false'; expected True or False"):
        recsys(async_checkpoints="false")


def double(actions: Any, ctx: Any) -> None:
    ctx.batch = dataclasses.replace(ctx.batch, dense=2 * ctx.batch.dense)


DOUBLED = {"H2DAndShuffle": RecsysTask("Double", double, reads=("batch",), writes=("batch",))}


@pytest.mark.parametrize("place", [TaskSchedule(2), TaskSchedule(2, thread_group="augment")])
def test_a_task_of_the_users_own_trains_ahead_and_is_profiled(place: TaskSchedule) -> None:
    class Doubling(Clicks):
        def training_step(self, batch: Any, batch_idx: int) -> Any:
            return super().training_step(dataclasses.replace(batch, dense=2 * batch.dense), batch_idx)

    class Profiling(Callback):
        def on_train_batch_end(self, used: pl.Trainer, module: Any, outputs: Any, batch: Any, batch_idx: int) -> None:
            if batch_idx == 1:
                self.profile = strategy_of(used).profile([batch], rounds=1, iterations=1)

    spec = recsys_plan("prefetch", recsys_tasks()).spec.insert("Double", place, after="H2DAndShuffle")
    plan, profiling = plan_of_spec(spec, recsys_tasks(extra=DOUBLED)), Profiling()
    trained = fit(Clicks(), recsys(plan, extra_tasks=DOUBLED), callbacks=[profiling])
    assert difference(state_of(trained), state_of(fit(Doubling(), recsys("serial")))) == []
    assert difference(state_of(trained), state_of(fit(Clicks(), recsys("serial")))) != []
    assert "Double" in profiling.profile.tasks


def test_a_task_of_the_users_own_may_follow_the_balancer() -> None:
    spec = recsys_plan("prefetch", recsys_tasks(balanced=True)).spec
    spec = spec.insert("Double", spec.schedule["BalanceFinish"], after="BalanceFinish")
    extra = {"BalanceFinish": DOUBLED["H2DAndShuffle"]}
    plan = plan_of_spec(spec, recsys_tasks(balanced=True, extra=extra))
    behind = fit(Clicks(), recsys(plan, balancer={}, extra_tasks=extra))
    spec = recsys_plan("prefetch", recsys_tasks()).spec.insert("Double", TaskSchedule(2), after="H2DAndShuffle")
    alone = fit(Clicks(), recsys(plan_of_spec(spec, recsys_tasks(extra=DOUBLED)), extra_tasks=DOUBLED))
    assert difference(state_of(behind), state_of(alone)) == []


def test_what_a_task_of_the_users_own_stores_in_the_batch_reaches_logs_and_callbacks() -> None:
    def count_ids(actions: Any, ctx: Any) -> None:
        ctx.batch.num_ids = ctx.batch.sparse.values().numel()

    class Logging(Clicks):
        def training_step(self, batch: Any, batch_idx: int) -> Any:
            self.log("ids", float(batch.num_ids))
            return super().training_step(batch, batch_idx)

    class Reading(Callback):
        def on_train_batch_end(self, used: pl.Trainer, module: Any, outputs: Any, batch: Any, batch_idx: int) -> None:
            counts.append((batch.num_ids, used.callback_metrics["ids"].item(), batch.sparse.values().numel()))

    extra = {"EmbInputDistWait": RecsysTask("CountIds", count_ids, reads=("batch",), writes=("batch",))}
    place = TaskSchedule(1, thread_group="count")
    spec = recsys_plan("base", recsys_tasks()).spec.insert("CountIds", place, after="EmbInputDistWait")
    counts: list[tuple[int, float, int]] = []
    fit(Logging(), recsys(plan_of_spec(spec, recsys_tasks(extra=extra)), extra_tasks=extra), callbacks=[Reading()])
    assert len(counts) > 2
    assert all(stored == logged == counted > 0 for stored, logged, counted in counts)


@pytest.mark.parametrize("plan", ["prefetch", "auto"])
def test_a_plan_without_a_place_for_a_task_of_the_users_own_is_refused(plan: str) -> None:
    with pytest.raises(PlanError, match=r"Double|extra_tasks"):
        recsys(plan, extra_tasks=DOUBLED)


@pytest.mark.parametrize(
    "group",
    [
        {"sharding": ShardingOptions(constraints={"people": {"sharding_types": ["row_wise"]}})},
        {"sharding": {"constraints": {"people": {"sharding_types": ["row_wise"]}}}},
    ],
)
def test_a_group_may_be_a_dataclass_or_a_mapping(group: dict[str, Any]) -> None:
    sharded = strategy_of(fit(Clicks(), recsys(**group), max_epochs=1)).sharded_model
    assert [table.sharding_type for table in sharded.tables.values() if table.config.name == "people"] == ["row_wise"]


def test_an_unknown_plan_is_refused_when_the_strategy_is_made() -> None:
    with pytest.raises(PlanError, match=r"there is no plan 'prefech'.*serial, base, threaded_input, prefetch"):
        recsys("prefech")


def test_a_trace_shows_the_prefetch_on_a_thread_of_its_own() -> None:
    class Tracing(Callback):
        spans: list[TaskSpan]

        def on_train_batch_start(self, used: pl.Trainer, module: Any, batch: Any, batch_idx: int) -> None:
            if batch_idx == 1:
                strategy_of(used).start_trace()
            elif batch_idx == 5:
                self.spans = strategy_of(used).stop_trace()

    tracing = Tracing()
    fit(Clicks(), recsys("prefetch"), callbacks=[tracing], max_epochs=1)
    groups = {span.task: span.thread for span in tracing.spans}
    assert len(groups) == 11
    assert {task for task, group in groups.items() if group != "main"} == {"EmbPrefetch"}


# ---------------------------------------------------------------------- tables


def test_tables_without_an_optimizer_are_named() -> None:
    with pytest.raises(SetupError, match=f"tables {PEOPLE}, {THINGS} must have an optimizer.*sparse_optimizer"):
        fit(Clicks(), recsys(optimizer=None))


def evaluated(optimizer: Any, checkpoint: Path) -> dict[str, Any]:
    validated, tested, predicted = (trainer(recsys(optimizer=optimizer)) for _ in range(3))
    predictions: Any = predicted.predict(Clicks(), loader(), ckpt_path=checkpoint)
    return {
        "validated": validated.validate(Clicks(), loader(), ckpt_path=checkpoint, verbose=False),
        "tested": tested.test(Clicks(), loader(), ckpt_path=checkpoint, verbose=False),
        "predicted": [part.tolist() for part in predictions],
    }


def test_a_checkpoint_is_evaluated_without_an_optimizer_of_its_tables(tmp_path: Path) -> None:
    fit(Clicks(), recsys(optimizer=ADAGRAD)).save_checkpoint(tmp_path / "trained")
    assert evaluated(None, tmp_path / "trained") == evaluated(ADAGRAD, tmp_path / "trained")


def test_a_module_sharded_for_an_evaluation_without_an_optimizer_is_not_trained() -> None:
    module = Clicks()
    trainer(recsys(optimizer=None)).validate(module, loader(), verbose=False)
    with pytest.raises(SetupError, match=f"sharded for an evaluation.*{PEOPLE}, {THINGS}.*cannot be trained"):
        fit(module, recsys(optimizer=None))


def test_freezing_tables_in_a_hook_is_refused_by_name() -> None:
    class Frozen(Clicks):
        def on_train_epoch_start(self) -> None:
            self.network.bags.requires_grad_(False)

    with pytest.raises(SetupError, match=rf"table {PEOPLE} cannot be frozen after sharding.*\.detach\(\)"):
        fit(Frozen(), recsys())


def test_a_table_keeps_the_optimizer_it_names_in_torchrecs_way() -> None:
    sharded = strategy_of(fit(Clicks(in_backward=SGD), recsys(optimizer=ADAGRAD))).sharded_model
    assert {table.resolved_optimizer.name for table in sharded.tables.values()} == {"torch.optim.SGD"}
    assert set(sharded.learning_rates().values()) == {0.5}


def test_tables_that_the_dense_optimizer_lists_are_taken_out_with_one_line(
    caplog: pytest.LogCaptureFixture,
) -> None:
    def everything(module: Clicks) -> Any:
        return torch.optim.Adam(module.parameters(), lr=0.05)

    with caplog.at_level("INFO"):
        module = Clicks(optimizers=everything)
        used = fit(module, recsys())
    lines = [record.getMessage() for record in caplog.records if "table parameter" in record.getMessage()]
    assert lines == ["Removed 2 table parameter(s) from Adam's groups, since the tables' own optimizer trains them"]
    separate = Clicks()
    assert difference(state_of(used), state_of(fit(separate, recsys()))) == []
    assert module.losses == separate.losses


def test_a_group_of_tables_only_is_refused() -> None:
    def groups(module: Clicks) -> Any:
        groups: list[dict[str, Any]] = [{"params": module.dense_parameters()}, {"params": module.table_parameters()}]
        return torch.optim.SGD(groups, lr=0.1)

    with pytest.raises(SetupError, match=f"parameter group 1 .*SGD holds embedding tables only.*{PEOPLE}"):
        fit(Clicks(optimizers=groups), recsys())


def test_a_model_may_have_nothing_but_tables() -> None:
    class Bare(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.bags = EmbeddingBagCollection(
                tables=[EmbeddingBagConfig(name="people", embedding_dim=8, num_embeddings=24, feature_names=["user"])]
            )

        def forward(self, batch: Any) -> torch.Tensor:
            return self.bags(batch.sparse)["user"].sum(1)

    def unsharded() -> dict[str, Any]:
        module = Clicks(Bare, in_backward=ADAGRAD, optimizers=lambda module: None)
        return outcome(module, fit(module, "auto"))

    reference = Reference.of(unsharded)
    for plan in PLANS:
        module = Clicks(Bare, optimizers=lambda module: None)
        assert reference.differences(outcome(module, fit(module, recsys(plan)))) == []


def test_values_set_before_training_survive_sharding() -> None:
    module = Clicks()
    with torch.no_grad():
        for index, parameter in enumerate(module.table_parameters()):
            parameter.copy_(torch.arange(parameter.numel()).view_as(parameter) / 1000 + index)
    expected = {name: parameter.detach().clone() for name, parameter in module.named_parameters()}
    used = trainer(recsys(kinds={"people": "row_wise", "things": "data_parallel"}))
    used.validate(module, loader(8), verbose=False)
    sharded = strategy_of(used).sharded_model
    assert torch.equal(sharded.full_table(PEOPLE), expected[PEOPLE])
    assert torch.equal(sharded.full_table(THINGS), expected[THINGS])


def test_a_module_on_the_meta_device_is_filled_and_trained() -> None:
    def meta() -> nn.Module:
        with torch.device("meta"):
            return Pooled("meta")

    states = []
    for plan in PLANS:
        torch.manual_seed(3)
        module = Clicks(meta)
        assert all(parameter.is_meta for parameter in module.parameters())
        states.append((module.losses, state_of(fit(module, recsys(plan)))))
    (losses, state), *others = states
    assert all(torch.isfinite(value).all() for value in state.values())
    assert len(set(losses)) == len(losses) == 12
    for other_losses, other in others:
        assert other_losses == losses
        assert difference(other, state) == []


# ---------------------------------------------------------------------- what cannot work


class Manual(Clicks):
    def __init__(self) -> None:
        super().__init__()
        self.automatic_optimization = False


class Iterating(Clicks):
    def training_step(self, dataloader_iter: Any) -> Any:  # type: ignore[override]
        return None


@pytest.mark.parametrize(
    ("module", "options", "message"),
    [
        (Manual, {}, "uses manual optimization.*strategy='pipeline'"),
        (Iterating, {}, "takes the dataloader_iter.*strategy='pipeline'"),
        (Clicks, {"precision": "bf16-true"}, "precision is 'bf16-true'.*'bf16-mixed'"),
        (Clicks, {"plugins": [AsyncCheckpointIO()]}, "plugin AsyncCheckpointIO.*Remove the plugin"),
    ],
    ids=["manual optimization", "dataloader_iter", "bf16-true", "a plugin for checkpoints"],
)
def test_what_a_plan_cannot_do_is_refused(module: Any, options: dict[str, Any], message: str) -> None:
    with pytest.raises(SetupError, match=message):
        fit(module(), recsys(), **options)


def test_an_optimizer_that_calls_its_closure_twice_is_refused() -> None:
    def lbfgs(module: Clicks) -> Any:
        return torch.optim.LBFGS(module.dense_parameters())

    with pytest.raises(SetupError, match=r"called its closure a second time.*LBFGS"):
        fit(Clicks(optimizers=lbfgs), recsys())


# ---------------------------------------------------------------------- before and after


def replaced_forwards(module: nn.Module) -> list[str]:
    return [name for name, child in module.named_modules() if "forward" in child.__dict__]


def groups() -> int:
    """Process groups of this process."""
    return len(dist.distributed_c10d._world.pg_map)


def test_training_leaves_nothing_behind_but_the_sharded_module() -> None:
    threads, environment = threading.enumerate(), dict(os.environ)
    used, module = trainer(recsys()), Clicks()
    used.fit(module, loader())
    assert replaced_forwards(module) == []
    assert [thread.name for thread in threading.enumerate() if thread.name.startswith("lightning_pipe")] == []
    assert len(threading.enumerate()) <= len(threads) + 1  # Lightning's observer of its child processes
    assert "LOCAL_WORLD_SIZE" not in set(os.environ) - set(environment)
    assert groups() == 2  # the world, and the one that the sharded module exchanges rows over


def test_a_sharded_module_can_go_to_another_trainer() -> None:
    module, other = Clicks(), Clicks()
    for one in (module, other):
        fit(one, recsys("prefetch"), max_epochs=1)
    # Two trainers, of which the second takes the tables as the first left them: Adagrad's sums too.
    used = fit(module, recsys("base", optimizer=None), max_epochs=1)
    again = fit(other, recsys("serial"), max_epochs=1)
    assert module.losses == other.losses
    assert difference(state_of(used), state_of(again)) == []
    (loss,) = trainer("recsys_serial_pipeline").validate(module, loader(8), verbose=False)
    (expected,) = used.validate(module, loader(8), verbose=False)
    assert loss == expected


def test_another_trainer_cannot_ask_for_another_sharding() -> None:
    module = Clicks()
    fit(module, recsys(optimizer=ADAGRAD), max_epochs=1)
    with pytest.raises(SetupError, match=r"sharded by an earlier strategy with sparse_optimizer=.*Adagrad.*SGD"):
        fit(module, recsys(optimizer=SGD), max_epochs=1)


@pytest.mark.parametrize("plan", ["serial", "prefetch"])
def test_a_user_error_ends_training_cleanly_and_training_can_begin_again(plan: str) -> None:
    class Failing(Clicks):
        fails = True

        def training_step(self, batch: Any, batch_idx: int) -> Any:
            if self.fails and batch_idx == 3:
                raise KeyError("no such column")
            return super().training_step(batch, batch_idx)

    module = Failing()
    used = trainer(recsys(plan))
    with pytest.raises(KeyError, match="no such column") as caught:
        used.fit(module, loader())
    assert any("task 'DenseForward' of iteration 3" in note for note in caught.value.__notes__)
    assert replaced_forwards(module) == []
    assert [thread.name for thread in threading.enumerate() if thread.name.startswith("lightning_pipe")] == []
    assert groups() == 2
    module.fails = False
    fit(module, recsys(plan))
    assert len(module.losses) == 3 + 12


def test_batch_normalization_over_ranks_is_asked_for_as_with_lightnings_ddp() -> None:
    module = Clicks(Mixed)
    # PyTorch has it for accelerators only, and says so when it is called.
    with pytest.raises(ValueError, match="SyncBatchNorm expected input tensor to be on GPU"):
        fit(module, recsys(), sync_batchnorm=True)
    assert not any(isinstance(child, nn.SyncBatchNorm) for child in module.modules())


def test_a_strategy_can_train_one_module_after_another() -> None:
    used, first, second = trainer(recsys(), max_epochs=1), Clicks(), Clicks(Mixed)
    used.fit(first, loader())
    (expected,) = used.validate(first, loader(8), verbose=False)
    with pytest.raises(SetupError, match="holds embedding tables only"):
        used.fit(Clicks(optimizers=lambda module: torch.optim.SGD(module.table_parameters(), lr=0.1)), loader())
    used.fit_loop.max_epochs = 2
    used.fit(second, loader())
    assert len(second.losses) == 6
    # What the first one exchanges its rows over is still there.
    assert used.validate(first, loader(8), verbose=False) == [expected]


@pytest.mark.parametrize("plan", ["prefetch", "auto"])
def test_a_strategy_can_be_pickled_for_processes_that_are_spawned(plan: str) -> None:
    again = pickle.loads(pickle.dumps(RecsysPipelineStrategy(plan)))
    assert isinstance(again, RecsysPipelineStrategy)
