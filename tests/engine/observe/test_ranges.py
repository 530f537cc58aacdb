"""The tasks' names in PyTorch's profiler, and in NVTX."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any
from unittest import mock

import torch
from torch.profiler import ProfilerActivity, profile

from lightning_pipe.engine import IterContext, PipelinePlan, PipelineTask, SWPipeline, TaskSchedule
from lightning_pipe.engine.observe.ranges import task_range


def pipeline_of(names: dict[str, str]) -> SWPipeline:
    """A chain of tasks, each in the thread group given, which multiply."""

    def work(ctx: IterContext) -> None:
        torch.ones(4) * 2

    tasks = {PipelineTask(name, work, reads=["x"], writes=["x"]): TaskSchedule(0, None, g) for name, g in names.items()}
    return SWPipeline(PipelinePlan(tasks))


def shown(found: profile) -> dict[str, set[int]]:
    """Names in a profile, and the threads that they are of."""
    threads: dict[str, set[int]] = {}
    for event in found.events() or ():
        threads.setdefault(event.name, set()).add(event.thread)
    return threads


def test_the_profiler_shows_tasks_of_every_thread_when_it_is_told_to_profile_all() -> None:
    with pipeline_of({"on main": "main", "on worker": "w", "by hand": "main"}) as pipeline:
        data = iter(range(3))
        pipeline.progress(data)  # the worker is there before the profiler is
        everywhere = torch._C._profiler._ExperimentalConfig(profile_all_threads=True)
        with profile(activities=[ProfilerActivity.CPU], experimental_config=everywhere) as found:
            pipeline.begin(data)
            pipeline.begin_task("by hand")
            pipeline.end_task("by hand")
            pipeline.finish()
        names = shown(found)
        assert {"on main", "on worker", "by hand"} <= set(names)
        assert names["on worker"].isdisjoint(names["on main"])


def test_without_a_profiler_there_is_no_range() -> None:
    with mock.patch.object(torch.profiler, "record_function", side_effect=AssertionError):
        assert task_range("task", traced=False) is task_range("task", traced=True)


def test_nvtx_has_the_names_where_there_is_a_device_and_a_trace() -> None:
    marks: list[str] = []

    @contextmanager
    def note(name: str) -> Iterator[None]:
        marks.append(f"begin {name}")
        yield
        marks.append(f"end {name}")

    nvtx: Any = mock.Mock(range=note)
    with (
        mock.patch.object(torch.cuda, "is_initialized", return_value=True),
        mock.patch.object(torch.cuda, "nvtx", nvtx),
    ):
        with task_range("quiet", traced=False):
            pass
        with task_range("traced", traced=True):
            marks.append("work")
        with profile(activities=[ProfilerActivity.CPU]) as found, task_range("profiled", traced=False):
            pass
    assert marks == ["begin traced", "work", "end traced", "begin profiled", "end profiled"]
    assert "profiled" in shown(found)
