"""Overhead of the engine per task, against a minimal Python implementation of the same work in the same run.

``python -m benchmarks.engine_cost`` prints microseconds per task:

- on the main thread, against calling the same empty functions in a loop (limit: 10 µs more);
- on one worker, for a chain of tasks in which each depends on the previous one, against sending the same empty
  functions to a bare thread through a queue and waiting for an event after each (limit: 15 µs more). Both threads are
  pinned to one core, and then to one core each. Without pinning, the scheduler could choose differently for the two
  sides of the comparison, and a round trip takes 14 µs on one core and 50 µs between two.

The two sides of each comparison alternate in each round. The figures are medians over rounds, also of the difference in
each round. Exits with status 1 if a limit is exceeded, except with ``--json``.
"""

from __future__ import annotations

import argparse
import os
import statistics
import sys
import threading
import time
from collections.abc import Callable, Iterator
from itertools import count, repeat
from queue import SimpleQueue

from benchmarks.figures import Figure, add_options, at_most, quartiles, save
from lightning_pipe.engine import IterContext, PipelinePlan, PipelineTask, SWPipeline, TaskSchedule

TASKS = 10
PERIODS = 100
ROUNDS = 41
MAIN_LIMIT, WORKER_LIMIT = 10.0, 15.0


def empty(ctx: IterContext) -> None:
    """An empty task, so that only the engine takes time."""


def engine(group: str, tasks: int) -> tuple[Callable[[], None], Callable[[], None]]:
    """Functions that run a chain of *tasks* in the engine ``PERIODS`` times, and that close the pipeline."""
    plan = PipelinePlan(
        [
            (
                PipelineTask(f"task{index}", empty, reads=[f"x{index}"], writes=[f"x{index + 1}"]),
                TaskSchedule(thread_group=group),
            )
            for index in range(tasks)
        ]
    )
    pipeline = SWPipeline(plan)
    data: Iterator[None] = repeat(None)

    def run() -> None:
        for _ in range(PERIODS):
            pipeline.progress(data)

    return run, pipeline.close


def calls() -> None:
    """Call the same functions in a loop."""
    for index in range(PERIODS):
        ctx = IterContext(None, index)
        for _ in range(TASKS):
            empty(ctx)


def bare_thread(tasks: int) -> tuple[Callable[[], None], Callable[[], None]]:
    """Functions that run the same tasks on a thread with a queue and one event per task, and that end the thread."""
    queue: SimpleQueue[tuple[IterContext, threading.Event] | None] = SimpleQueue()

    def serve() -> None:
        while (item := queue.get()) is not None:
            ctx, done = item
            empty(ctx)
            done.set()

    thread = threading.Thread(target=serve, daemon=True)
    thread.start()
    numbers = count()
    events = [threading.Event() for _ in range(tasks)]

    def run() -> None:
        for _ in range(PERIODS):
            ctx = IterContext(None, next(numbers))
            for event in events:
                event.clear()
                queue.put((ctx, event))
            for event in events:
                event.wait()

    def close() -> None:
        queue.put(None)
        thread.join()

    return run, close


def compare(first: Callable[[], None], second: Callable[[], None], tasks: int) -> tuple[list[float], list[float]]:
    """Microseconds per task of two functions that alternate in each round."""
    times: tuple[list[float], list[float]] = ([], [])
    for _ in range(ROUNDS):
        for body, samples in zip((first, second), times, strict=True):
            start = time.perf_counter()
            body()
            samples.append((time.perf_counter() - start) / (PERIODS * tasks) * 1e6)
    return times


def main() -> int:
    """Print the table, and return the exit status."""
    parser = argparse.ArgumentParser(description="overhead of the engine per task")
    add_options(parser)
    options = parser.parse_args()
    print(f"{'microseconds per task':48}{'engine':>9}{'bare':>9}{'added':>9}{'limit':>9}")
    figures: list[Figure] = []

    def show(name: str, measured: tuple[list[float], list[float]], limit: float) -> None:
        added = [first_time - second_time for first_time, second_time in zip(*measured, strict=True)]
        middle = statistics.median(added)
        figures.append(at_most(f"engine cost of a task, {name}", middle, limit, quartiles(added), "us"))
        engine_time, bare_time = map(statistics.median, measured)
        print(f"{name:48}{engine_time:9.2f}{bare_time:9.2f}{middle:9.2f}{limit:9.1f}")

    run, close = engine("main", TASKS)
    show("main thread", compare(run, calls, TASKS), MAIN_LIMIT)
    close()
    cores = sorted(os.sched_getaffinity(0))
    for place, (of_main, of_worker) in {"same core": cores[:1] * 2, "another core": (cores[0], cores[-1])}.items():
        for tasks in (TASKS, 1):
            os.sched_setaffinity(0, {of_worker})  # inherited by the threads that are created next
            run, close = engine("worker", tasks)
            bare, close_bare = bare_thread(tasks)
            os.sched_setaffinity(0, {of_main})
            show(f"chain of {tasks} on one worker, {place}", compare(run, bare, tasks), WORKER_LIMIT)
            close()
            close_bare()
    save(figures, options.json)
    return 0 if options.json or all(figure.met for figure in figures) else 1


if __name__ == "__main__":
    sys.exit(main())
