"""The tasks' names in PyTorch's profiler, and in NVTX."""

from __future__ import annotations

import torch
from torch.profiler import ProfilerActivity, profile

from lightning_pipe.engine import IterContext, PipelinePlan, PipelineTask, SWPipeline, TaskSchedule


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
            pipeline.begin_period(data)
            pipeline.begin_caller_task("by hand")
            pipeline.end_caller_task("by hand")
            pipeline.finish_period()
        names = shown(found)
        assert {"on main", "on worker", "by hand"} <= set(names)
        assert names["on worker"].isdisjoint(names["on main"])
