"""What the engine adds to a task, against the least that the same work can cost in Python, measured in the same run.

``python -m benchmarks.engine_cost`` prints microseconds per task:

- on the main thread, against calling the same empty functions in a loop (limit: 10 µs more);
- on one worker, for a chain of tasks each of which needs the one before, against handing the same empty functions to a
  bare thread through a queue, which sets an event after each, and waiting for the events (limit: 15 µs more). Both
  threads are kept on one core, and then on a core each: left to the scheduler, one side of the comparison may get the
  one and the other side the other, and a round trip takes 14 µs on one core and 50 between two.

The two sides of each comparison take turns, round by round; medians over rounds, of what a round added too. Exits with
1 where a limit is passed, but not with ``--json``.
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
    """The task: nothing, so that what is left is the engine."""


def engine(group: str, tasks: int) -> tuple[Callable[[], None], Callable[[], None]]:
    """A chain of *tasks* run by the engine, ``PERIODS`` times; and how to end it."""
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
    """The same functions, called."""
    for index in range(PERIODS):
        ctx = IterContext(None, index)
        for _ in range(TASKS):
            empty(ctx)


def bare_thread(tasks: int) -> tuple[Callable[[], None], Callable[[], None]]:
    """The same functions on a thread with a queue, each followed by an event of its own, ``PERIODS`` times."""
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
    """Microseconds per task of both, which take turns, round by round."""
    times: tuple[list[float], list[float]] = ([], [])
    for _ in range(ROUNDS):
        for body, taken in zip((first, second), times, strict=True):
            start = time.perf_counter()
            body()
            taken.append((time.perf_counter() - start) / (PERIODS * tasks) * 1e6)
    return times


def main() -> int:
    """Print the table; returns the exit status."""
    options = argparse.ArgumentParser(description="what the engine adds to a task")
    add_options(options)
    given = options.parse_args()
    print(f"{'microseconds per task':48}{'engine':>9}{'bare':>9}{'added':>9}{'limit':>9}")
    figures: list[Figure] = []

    def show(name: str, measured: tuple[list[float], list[float]], limit: float) -> None:
        added = [one - other for one, other in zip(*measured, strict=True)]
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
            os.sched_setaffinity(0, {of_worker})  # which threads that are made now take over
            run, close = engine("worker", tasks)
            bare, close_bare = bare_thread(tasks)
            os.sched_setaffinity(0, {of_main})
            show(f"chain of {tasks} on one worker, {place}", compare(run, bare, tasks), WORKER_LIMIT)
            close()
            close_bare()
    save(figures, given.json)
    return 0 if given.json or all(figure.met for figure in figures) else 1


if __name__ == "__main__":
    sys.exit(main())
