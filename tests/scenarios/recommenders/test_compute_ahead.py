"""The plan that looks up rows ahead if the batch before does not train them: dynamic tables, and where it cannot."""

from __future__ import annotations

import re
import warnings
from pathlib import Path
from typing import Any
from unittest import mock

import pytest
import torch
from torch import nn
from torchrec.sparse.jagged_tensor import KeyedJaggedTensor

from lightning_pipe.callbacks import PipelineProfiler
from lightning_pipe.engine import State, TaskSchedule
from lightning_pipe.recsys import RecsysTask, TrainPipeline, recsys_tasks
from lightning_pipe.recsys.plans.recsys_plans import PLANS, plan_of_spec
from lightning_pipe.recsys.rewrite.divided_lookup import RowDivision
from tests.distributed import run_ranks
from tests.recsys.dynamic.dynamic_cases import ADAM, ROW_WISE_ADAGRAD, Model, outcome, same, shard, train
from tests.recsys.pipeline_cases import CASES, Case, adam, batches, sharded
from tests.recsys.pipeline_cases import outcome as outcome_of_case
from tests.recsys.pipeline_cases import train as train_batches
from tests.recsys.rewrite_cases import Bags, Batch
from tests.recsys.sharding_cases import CPU
from tests.strategies.cases import Clicks, Sequenced, fit, loader, recsys, state_of
from tests.strategies.cases import difference as state_difference

STEPS = 12


def trained(rank: int, world_size: int, path: Path, options: dict[str, Any], optimizer: dict[str, Any]) -> list[Any]:
    """Scores, dense values and rows under both plans, how many rows were evicted, and how many looked up again."""
    found = []
    late = 0

    class Counted(RowDivision):
        def __init__(self, *arguments: Any) -> None:
            nonlocal late
            super().__init__(*arguments)
            late += int(self.late.sum())

    for plan in ("serial", "compute_ahead"):
        with warnings.catch_warnings(), mock.patch(f"{RowDivision.__module__}.RowDivision", Counted):
            warnings.simplefilter("ignore")  # of the pooled tables, which are not divided
            sharded = shard(Model(path / plan, **{"cache_rows": 50 * world_size, **options}), optimizer)
            scores = train(sharded, range(STEPS), plan)
        evicted = sum(cache.stats.evicted for rows in sharded.dynamic_rows.values() for cache in rows.caches.values())
        found.append((scores, outcome(sharded), evicted, late))
        sharded.close()
    return found


@pytest.mark.parametrize(
    ("world_size", "options", "optimizer"),
    [
        (2, {}, ADAM),
        (2, {"ttl": 3, "admission_threshold": 2}, ROW_WISE_ADAGRAD),
        (3, {"admission_threshold": 2}, ADAM),
    ],
    ids=str,
)
def test_dynamic_tables_train_to_the_bit_of_the_serial_plan_also_where_rows_are_evicted(
    world_size: int, options: dict[str, Any], optimizer: dict[str, Any], tmp_path: Path
) -> None:
    ranks = run_ranks(trained, world_size, tmp_path, options, optimizer)
    for serial, ahead in ranks:
        assert same(serial[:2], ahead[:2])
    assert sum(ahead[2] for _, ahead in ranks) > 0
    # A ttl counts batches that are looked up.
    assert (sum(ahead[3] for _, ahead in ranks) > 0) == ("ttl" not in options)


def reasons(rank: int, world_size: int, extra: dict[str, RecsysTask]) -> list[str]:
    """What is said of modules that are not divided, for a model of sequences and bags."""
    tasks = recsys_tasks(divided=True, extra=extra)
    spec = PLANS["compute_ahead"]
    for follows, task in extra.items():
        spec = spec.insert(task.name, TaskSchedule(), after=follows)
    model = sharded(Case(CASES["sequences, row_wise"].build, batches, "row_wise"))
    with warnings.catch_warnings(record=True) as said:
        warnings.simplefilter("always")
        pipeline = TrainPipeline(model, adam(model), CPU, plan_of_spec(spec, tasks), extra_tasks=extra)
        train_batches(pipeline, batches(3))
    pipeline.close()
    return [str(one.message) for one in said if "looked up only after" in str(one.message)]


def write_tables(actions: Any, ctx: Any) -> None:
    """A task of the user's own."""


@pytest.mark.parametrize(
    ("extra", "names", "reason"),
    [
        (
            {},
            "'model.b'",
            "sends in other ways than by rows (sharded row_wise): shard",
        ),
        (
            {"FinalizeGrads": RecsysTask("Write", write_tables, writes=(State("tables"),))},
            "'model.a'",
            "has tables that the task Write writes",
        ),
    ],
    ids=["pooled by rows", "a task that writes tables"],
)
def test_modules_that_are_looked_up_at_their_turn_are_named_with_the_reason(
    extra: dict[str, RecsysTask], names: str, reason: str
) -> None:
    first, second = run_ranks(reasons, 2, extra)
    assert second == []
    (said,) = first
    assert f"{names} {reason}" in said


def small(rank: int, world_size: int) -> tuple[list[str], bool]:
    """What is said of modules that send little ahead, and whether such a training is the serial one."""
    case = Case(CASES["sequences, row_wise"].build, batches, "table_wise")
    with warnings.catch_warnings(record=True) as said:
        warnings.simplefilter("always")
        found = outcome_of_case(case, "compute_ahead", 30)
    texts = [str(one.message) for one in said if "looked up only after" in str(one.message)]
    return texts, found.same(outcome_of_case(case, "serial", 30))


def test_modules_that_send_little_ahead_are_looked_up_at_their_turn_after_some_batches() -> None:
    (first, first_is_same), (second, second_is_same) = run_ranks(small, 2)
    (said,) = first
    for module in ("model.a", "model.b"):
        assert re.search(rf"'{module}' has sent 0\.\d KiB of rows ahead per batch to other ranks, which is \d+%", said)
    assert second == []
    assert first_is_same
    assert second_is_same


class CalledAgain(nn.Module):
    """Looks up other ids in its step from the third batch on, as for negatives that a step draws."""

    def __init__(self) -> None:
        super().__init__()
        self.model = Bags()
        self.steps = 0

    def forward(self, batch: Batch) -> tuple[torch.Tensor, torch.Tensor]:
        loss = self.model(batch)
        self.steps += 1
        if self.steps > 2:
            drawn = batch.sparse.values().flip(0)
            others = KeyedJaggedTensor(batch.sparse.keys(), drawn, lengths=batch.sparse.lengths())
            loss = loss + self.model.a(others).values().sum() / 100
        return loss, loss.detach().clone()


def called_again(rank: int, world_size: int) -> tuple[list[str], bool]:
    case = Case(CalledAgain, batches, "table_wise")
    with warnings.catch_warnings(record=True) as said:
        warnings.simplefilter("always")
        found = outcome_of_case(case, "compute_ahead")
    texts = [str(one.message) for one in said if "looked up only after" in str(one.message)]
    return texts, found.same(outcome_of_case(case, "serial"))


def test_a_module_that_a_step_calls_again_with_other_ids_is_looked_up_at_its_turn() -> None:
    (first, first_is_same), (_, second_is_same) = run_ranks(called_again, 2)
    assert first_is_same
    assert second_is_same
    assert "'model.a' is called again in a step" in first[-1]


def profiled(rank: int, world_size: int, path: Path) -> tuple[list[str], list[str]]:
    """What differs after a fit with profiles, and the tasks that they have measured."""
    kinds = {"past": "row_wise", "people": "column_wise"}
    states, profiler = [], PipelineProfiler(at_steps=(3,), rounds=1, iterations=1)
    for callbacks in ([], [profiler]):
        module = Clicks(Sequenced)
        strategy = recsys("compute_ahead", kinds)
        states.append(state_of(fit(module, strategy, loader(64), callbacks=callbacks, default_root_dir=path)))
    tasks = [name for profile in profiler.profiles.values() for name in profile.tasks]
    return state_difference(states[0], states[1]), tasks


def test_a_profile_under_the_plan_changes_nothing_and_has_its_tasks(tmp_path: Path) -> None:
    for differs, tasks in run_ranks(profiled, 2, tmp_path):
        assert differs == []
        assert {"EmbOverlap", "EmbForwardAhead", "EmbForward"} <= set(tasks)
