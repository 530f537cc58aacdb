"""A run that hangs: after the timeout, the error of each rank that noticed says the rank's batch and tasks."""

from __future__ import annotations

from pathlib import Path

import pytest

from lightning_pipe.engine.ranks.current_tasks import current_tasks, describe_current_tasks
from tests.distributed import run_ranks
from tests.patience import HANG
from tests.scenarios.faults.launched import Launched
from tests.scenarios.faults.training import KINDS, fit, module

# Of collectives, in seconds. Ranks are at the same place within it, also on a busy machine.
TIMEOUT = 30


@pytest.mark.exhaustive
@pytest.mark.parametrize("case", ["skipped", "stuck"])
def test_a_timeout_says_in_which_batch_and_task_the_rank_was(case: str, tmp_path: Path) -> None:
    options = ["--standalone", "--nproc-per-node=2"]
    arguments = [case, str(tmp_path), str(TIMEOUT)]
    code, output = Launched(options, "tests.scenarios.faults.hanging_program", *arguments).wait(HANG)
    assert code == 1, output
    assert "rank 0 was in batch 2 of epoch 0, in TrainBatch of iteration 2" in output
    assert ("rank 1 was in batch 2 of epoch 0" in output) == (case != "stuck"), output


def tasks_after_fit(rank: int, world_size: int, kind: str, folder: Path) -> list[str]:
    fit(kind, world_size, module(kind), default_root_dir=folder)
    return [task for task, *_ in current_tasks.values()]


@pytest.mark.parametrize("kind", KINDS)
def test_under_each_strategy_tasks_and_actions_are_noted(kind: str, tmp_path: Path) -> None:
    for rank, tasks in enumerate(run_ranks(tasks_after_fit, 2, kind, tmp_path)):
        assert tasks[0] in KINDS[kind].tasks
        if kind == "llm":
            assert f"backward of micro-batch 3 in stage {rank}" in tasks


def test_tasks_are_described_with_iteration_and_thread(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in list(current_tasks):
        monkeypatch.delitem(current_tasks, name)
    monkeypatch.setitem(current_tasks, "main", ("Forward", 7, False))
    monkeypatch.setitem(current_tasks, "io", ("Copy", 8, True))
    monkeypatch.setitem(current_tasks, "stages", ("forward of micro-batch 1", None, False))
    assert describe_current_tasks() == (
        "in Forward of iteration 7, after Copy of iteration 8 (thread io), in forward of micro-batch 1"
    )
