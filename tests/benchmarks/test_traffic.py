"""What tasks send and wait for, recorded on two ranks, and made into one rank's times."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
import torch
import torch.distributed as dist

from benchmarks.traffic import Exchange, TaskRun, recorded_traffic, serial_times, task_runs
from lightning_pipe.engine import PlanError, TaskSpan
from lightning_pipe.engine.planning.network import Message
from lightning_pipe.recsys import TrainPipeline
from tests.distributed import run_ranks
from tests.recsys.pipeline_cases import CASES, sharded
from tests.recsys.sharding_cases import CPU


def span(task: str, start: float, end: float) -> TaskSpan:
    return TaskSpan(task, 0, "main", None, start, end, 0, 0)


def test_what_is_submitted_and_waited_for_belongs_to_the_task_at_work() -> None:
    spans = [span("Send", 0.0, 1.0), span("Wait", 1.5, 4.0), span("Rest", 4.0, 5.0)]
    exchanges = [
        Exchange("all_reduce", 4, 0.1, (0.1, 0.2)),
        Exchange("all_to_all", 100, 0.5, (2.0, 3.5)),
        Exchange("all_to_all", 30, 0.6),  # nobody has waited yet
        Exchange("all_to_all", 7, 1.2, (1.3, 1.4)),  # between two tasks
    ]
    found = task_runs(spans, exchanges)
    assert [run.wait for run in found] == pytest.approx([0.1, 1.5, 0.0])
    assert [replace(run, wait=0.0) for run in found] == [
        TaskRun("Send", 0, 1.0, 0.0, "all_to_all", 134),
        TaskRun("Wait", 0, 2.5, 0.0, None, 0),
        TaskRun("Rest", 0, 1.0, 0.0, None, 0),
    ]


def runs(wait: float, own: float = 5.0) -> list[TaskRun]:
    return [
        TaskRun("Send", 0, 1.0, 0.0, "all_to_all", 100),
        TaskRun("Wait", 0, own, wait, None, 0),
        TaskRun("Send", 1, 1.0, 0.0, "all_to_all", 300),
        TaskRun("Wait", 1, own, wait, None, 0),
    ]


def test_waiting_for_a_rank_that_is_late_is_no_message() -> None:
    found = serial_times([runs(wait=3.0), runs(wait=1.0, own=7.0)])
    assert found.own == {"Send": 1.0, "Wait": 6.0}
    assert found.waits == {"Send": 0.0, "Wait": 1.0}
    assert found.sent == {"Send": Message("all_to_all", 200)}


def test_who_is_late_may_change_from_iteration_to_iteration() -> None:
    one, other = runs(wait=3.0), runs(wait=3.0)
    one[1], other[3] = TaskRun("Wait", 0, 5.0, 1.0, None, 0), TaskRun("Wait", 1, 5.0, 1.0, None, 0)
    assert serial_times([one, other]).waits["Wait"] == 1.0


def test_a_wait_in_which_other_threads_had_the_core_is_work() -> None:
    assert serial_times([runs(wait=2.0)], helpers=0.5).waits["Wait"] == pytest.approx(1.5)
    assert serial_times([runs(wait=2.0)], helpers=9.0).waits["Wait"] == 0.0
    assert serial_times([runs(wait=0.0)], helpers=9.0).waits["Wait"] == 0.0


def test_nothing_recorded_is_refused() -> None:
    with pytest.raises(PlanError, match="no task was recorded"):
        serial_times([[], []])


def record(rank: int, world_size: int) -> dict[str, Any]:
    before = (dist.all_to_all_single, dist.all_reduce)
    case = CASES["pooled, table_wise"]
    model = sharded(case)
    optimizer = torch.optim.SGD([parameter for _, parameter in model.dense_parameters()], lr=0.1)
    pipeline = TrainPipeline(model, optimizer, CPU, "serial")
    feed = iter(case.data(5))
    try:
        pipeline.progress(feed)
        with recorded_traffic() as exchanges:
            pipeline.pipeline.start_trace()
            for _ in range(4):
                pipeline.progress(feed)
            spans = pipeline.pipeline.stop_trace()
        found = {(run.task, run.iteration): run for run in task_runs(spans, exchanges)}
        sizes = [parameter.numel() + 1 for _, parameter in model.dense_parameters()]
        assert (dist.all_to_all_single, dist.all_reduce) == before
        work = dist.all_reduce(torch.zeros(3), async_op=True)
        work.wait()
        return {"runs": found, "dense": sum(sizes), "exchanges": exchanges}
    finally:
        pipeline.close()


def test_a_serial_run_on_two_ranks_says_what_each_task_sends_and_waits_for() -> None:
    ranks = run_ranks(record, 2)
    for found in ranks:
        for (task, _), run in found["runs"].items():
            assert 0 <= run.wait <= run.own
            if task == "DenseBackward":
                assert (run.kind, run.bytes) == ("all_reduce", 4 * found["dense"])  # and a number for each parameter
            if task in ("EmbInputDistStart", "EmbInputDistWait", "EmbForward", "EmbBackward"):
                assert run.kind == "all_to_all"
                assert run.bytes > 0
            if task in ("DenseForward", "OptimStep", "H2DAndShuffle"):
                assert (run.kind, run.bytes, run.wait) == (None, 0, 0)
            if task in ("EmbInputDistWait", "EmbPrefetch", "EmbForward", "EmbBackward", "FinalizeGrads"):
                assert run.wait > 0
        assert all(one.waited is not None and one.waited[0] >= one.submitted for one in found["exchanges"])
    times = serial_times([list(found["runs"].values()) for found in ranks])
    assert times.sent["DenseBackward"] == Message("all_reduce", 4 * ranks[0]["dense"])
    assert all(times.waits[name] <= times.own[name] for name in times.own)
