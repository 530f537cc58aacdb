"""Overhead of the trace per task, with the trace off and on, measured in the same run.

``python -m benchmarks.trace_cost`` prints microseconds per task, on the main thread and on a worker:

- trace off, against an engine without trace code (limit: 1 µs more);
- trace on, against trace off (limit: 5 µs more), with a full ring buffer.

The three alternate in each round. The fastest rounds are compared, because other work on the machine can only add time.
Exits with status 1 if a limit is exceeded, except with ``--json``.
"""

from __future__ import annotations

import argparse
import sys
import time
from itertools import repeat
from unittest import mock

from benchmarks.figures import add_options, at_most, save
from lightning_pipe.engine import IterContext, PipelinePlan, PipelineTask, SWPipeline, TaskSchedule
from lightning_pipe.engine.runtime import pipeline as pipeline_module
from lightning_pipe.engine.runtime.executor import Executor, Operation, Slot

TASKS, PERIODS, ROUNDS = 10, 100, 41
KEEP = 1000
OFF_LIMIT, ON_LIMIT = 1.0, 5.0


def empty(ctx: IterContext) -> None:
    """An empty task, so that only the engine takes time."""


class Untraced(Executor):
    """An executor without code for traces and profilers."""

    def _call(self, op: Operation, slot: Slot, group: str, stream: str | None, submitted: float | None = None) -> None:
        with self.streams.use_named_stream(stream):
            op.fn(slot.ctx)
            if op.records_event:
                self.streams.record(slot.events[op.index])


def engine(group: str, executor: type[Executor] = Executor) -> SWPipeline:
    """A chain of empty tasks."""
    plan = PipelinePlan(
        [
            (
                PipelineTask(f"task{index}", empty, reads=[f"x{index}"], writes=[f"x{index + 1}"]),
                TaskSchedule(thread_group=group),
            )
            for index in range(TASKS)
        ]
    )
    with mock.patch.object(pipeline_module, "Executor", executor):
        return SWPipeline(plan)


def measure(group: str) -> tuple[float, float, float]:
    """Microseconds per task without trace code, with the trace off, and with the trace on."""
    pipelines = engine(group, Untraced), engine(group), engine(group)
    pipelines[2].start_trace(KEEP)
    data = repeat(None)
    samples: tuple[list[float], ...] = ([], [], [])
    for _ in range(ROUNDS):
        for pipeline, times in zip(pipelines, samples, strict=True):
            start = time.perf_counter()
            for _ in range(PERIODS):
                pipeline.progress(data)
            times.append((time.perf_counter() - start) / (PERIODS * TASKS) * 1e6)
    assert len(pipelines[2].stop_trace()) == KEEP
    for pipeline in pipelines:
        pipeline.close()
    return min(samples[0]), min(samples[1]), min(samples[2])


def main() -> int:
    """Print the table, and return the exit status."""
    parser = argparse.ArgumentParser(description="overhead of the trace per task")
    add_options(parser)
    options = parser.parse_args()
    figures = []
    print(f"{'microseconds per task':24}{'without':>9}{'off':>9}{'on':>9}{'off adds':>10}{'on adds':>9}")
    for group in ("main", "worker"):
        without, off, on = measure(group)
        print(f"{group:24}{without:9.2f}{off:9.2f}{on:9.2f}{off - without:10.2f}{on - off:9.2f}")
        for state, added, limit in (("off", off - without, OFF_LIMIT), ("on", on - off, ON_LIMIT)):
            figures.append(at_most(f"trace {state}, added to a task ({group})", added, limit, (added, added), "us"))
    print(f"{'limit':24}{'':27}{OFF_LIMIT:10.1f}{ON_LIMIT:9.1f}")
    save(figures, options.json)
    return 0 if options.json or all(figure.met for figure in figures) else 1


if __name__ == "__main__":
    sys.exit(main())
