"""A session: its tasks train and evaluate one model by turns, and nothing is left of it at the end."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import nn

from lightning_pipe.engine import SetupError, SWPipeline
from lightning_pipe.engine.common.options import option_group
from lightning_pipe.recsys import ShardedModel, TrainPipeline, recsys_plan, recsys_tasks
from lightning_pipe.recsys.tasks.options import SessionOptions
from lightning_pipe.recsys.tasks.session import RecsysSession
from tests.recsys.pipeline_cases import CASES, adam, difference, sharded, values_of
from tests.recsys.sharding_cases import CPU
from tests.recsys.train_pipeline_cases import hooks, replaced

pytestmark = pytest.mark.usefixtures("one_rank")

CASE = CASES["everything"]


def same(batch: Any) -> Any:
    return batch


@contextmanager
def session_of(model: nn.Module | ShardedModel, plan: str = "prefetch", **groups: Any) -> Iterator[RecsysSession]:
    options = option_group(SessionOptions, "options", groups)
    session = RecsysSession(model, recsys_plan(plan, recsys_tasks()), CPU, options)
    try:
        yield session
    finally:
        session.close()


@contextmanager
def pipeline_of(session: RecsysSession, optimizer: torch.optim.Optimizer, plan: str) -> Iterator[SWPipeline]:
    def step(batch: Any) -> Any:
        if torch.is_grad_enabled():
            optimizer.zero_grad()
        return session.module(batch)

    session.begin_training(None)
    tasks = session.training_tasks(
        "forward", transfer=same, training_step=step, loss_of=lambda output: output[0], optimizer_step=optimizer.step
    )
    with SWPipeline(recsys_plan(plan, tasks), CPU) as pipeline:
        yield pipeline


def run(pipeline: SWPipeline, batches: Iterator[Any]) -> None:
    pipeline.run_one_serial_iter(next(batches))  # the method "record" watches the first one
    while True:
        try:
            pipeline.progress(batches)
        except StopIteration:
            return


@pytest.mark.parametrize("plan", ["serial", "prefetch"])
def test_its_tasks_train_as_a_train_pipeline_does(plan: str) -> None:
    expected, ours = sharded(CASE), sharded(CASE)
    reference = TrainPipeline(expected, adam(expected), CPU, plan)
    torch.manual_seed(3)
    feed = iter(CASE.data(4))
    for _ in range(4):
        reference.progress(feed)
    reference.close()
    with session_of(ours, plan) as session, pipeline_of(session, adam(ours), plan) as pipeline:
        torch.manual_seed(3)
        run(pipeline, iter(CASE.data(4)))
    assert difference(values_of(ours), values_of(expected)) == []


def test_set_aside_the_model_is_as_it_was_and_afterwards_rewritten_again() -> None:
    model = sharded(CASE)
    with session_of(model) as session, pipeline_of(session, adam(model), "prefetch") as pipeline:
        assert replaced(model.module)
        with session.suspended(pipeline):
            assert replaced(model.module) == []
        assert replaced(model.module)


def test_closed_it_leaves_no_forward_no_hook_and_no_process_group() -> None:
    def groups() -> int:
        return len(dist.distributed_c10d._world.pg_map)

    model, before = sharded(CASE), groups()
    with session_of(model) as session, pipeline_of(session, adam(model), "prefetch") as pipeline:
        run(pipeline, iter(CASE.data(2)))
        assert groups() > before
    assert groups() == before
    assert replaced(model.module) == []
    assert hooks(model) == 0
    session.close()


def test_a_model_is_rewritten_by_one_session_at_a_time() -> None:
    model = sharded(CASE)
    with session_of(model) as session, pipeline_of(session, adam(model), "prefetch"):
        with session_of(model) as other, pytest.raises(SetupError, match="is replaced already"):
            other.training_tasks("forward", transfer=same, loss_of=same)
        session.end_training()
        assert replaced(model.module) == []
