"""Timeline of all ranks: bars in lanes, arrows between dependent bars, and the critical path.

A lane is a thread of a rank or a stream of its device. A bar is the run of a task or a part of it: the work of a stage
on a micro-batch lies inside the run of the task that executes the schedule. All times are seconds of the same clock.
"""

from __future__ import annotations

from bisect import bisect_left, bisect_right
from collections import defaultdict, deque
from collections.abc import Callable, Iterable, Sequence
from functools import cached_property
from itertools import pairwise
from typing import Any, NamedTuple

from lightning_pipe.engine.observe.trace import TaskSpan
from lightning_pipe.engine.plans.dependencies import Dependency
from lightning_pipe.engine.plans.schedule import MAIN

TASK, DEVICE, EVALUATION = "task", "device", "evaluation"  # a device bar is the same task on its stream
BACKGROUND = "background"  # work submitted by a simulated task
FORWARD, BACKWARD = "forward", "backward"
INPUT_BACKWARD, WEIGHT_BACKWARD = "input_backward", "weight_backward"
RECOMPUTE = "recompute"  # repeated forward of activation checkpointing, before the backward
WAITS = ("wait_forward", "wait_backward")
CRITICAL_WAIT = "critical_wait"
TRANSFER, HAND_OFF, BETWEEN_TASKS = "transfer", "hand-off", "between tasks"

Arrow = tuple[int, int]


class Bar(NamedTuple):
    """Measured or simulated time interval: the record type of all timelines."""

    rank: int
    lane: str  # name of the thread group; "stream NAME" for work on a device
    name: str  # the task's name, or the kind
    kind: str  # one of the constants above
    start: float  # seconds
    end: float
    iteration: int | None = None
    microbatch: int | None = None
    stage: int | None = None
    pipeline: int = 0  # index of the data-parallel pipeline
    submitted: float | None = None  # when the main thread submitted the task to the lane's worker


def microbatch_bar(
    stage: int, kind: str, microbatch: int, start: float, end: float, rank: int = 0, lane: str = MAIN
) -> Bar:
    """Create a bar for work on a micro-batch, or for the wait before it."""
    return Bar(rank, lane, kind, kind, start, end, None, microbatch, stage)


def task_bars(spans: Iterable[TaskSpan], rank: int) -> list[Bar]:
    """Create a bar for each span, and a second bar for its work on a device with streams."""
    bars = []
    for span in spans:
        task = Bar(rank, span.thread, span.task, TASK, span.start, span.end, span.iteration, submitted=span.submitted)
        bars.append(task)
        if span.device_start is not None and span.device_end is not None:
            lane = f"stream {span.stream or 'current'}"
            bars.append(Bar(rank, lane, span.task, DEVICE, span.device_start, span.device_end, span.iteration))
    return bars


def convert_bars_to_clock(clock: Callable[[float], float], bars: Iterable[Bar]) -> list[Bar]:
    """Convert the times of bars to another clock."""
    return [
        bar._replace(
            start=clock(bar.start),
            end=clock(bar.end),
            submitted=None if bar.submitted is None else clock(bar.submitted),
        )
        for bar in bars
    ]


def assign_iterations_to_bars(bars: Iterable[Bar], tasks: Iterable[Bar]) -> list[Bar]:
    """Assign to each bar the iteration of the main thread's task during which it began; None without such a task."""
    assigned = []
    tasks_by_start = deque(
        sorted((bar for bar in tasks if bar.kind == TASK and bar.lane == MAIN), key=lambda bar: bar.start)
    )
    for bar in bars:
        while tasks_by_start and tasks_by_start[0].end <= bar.start:
            tasks_by_start.popleft()
        assigned.append(
            bar._replace(
                iteration=tasks_by_start[0].iteration
                if tasks_by_start and tasks_by_start[0].start <= bar.start
                else None
            )
        )
    return assigned


class Timeline:
    """Bars of all ranks on a common clock, sorted by rank, lane and start; the longer of two first."""

    def __init__(self, bars: Iterable[Bar], dependencies: Sequence[Dependency] = ()) -> None:
        unsorted = list(bars)
        order = {key: position for position, key in enumerate(_sort_lanes(unsorted))}
        self.bars = tuple(sorted(unsorted, key=lambda bar: (order[bar.rank, bar.lane], bar.start, -bar.end)))
        self._needs: dict[str, list[Dependency]] = defaultdict(list)
        for dependency in dependencies:
            self._needs[dependency.downstream].append(dependency)

    @cached_property
    def lanes(self) -> tuple[tuple[int, str], ...]:
        """(rank, lane) pairs sorted by rank; within a rank the main thread, other threads, then streams."""
        return tuple(dict.fromkeys((bar.rank, bar.lane) for bar in self.bars))

    @cached_property
    def arrows(self) -> tuple[Arrow, ...]:
        """Pairs of positions of bars whose second bar depends on the first, by the plan or through a micro-batch."""
        return (*self._arrows_of_tasks(), *self._arrows_of_microbatches())

    @cached_property
    def enclosing_bar_positions(self) -> frozenset[int]:
        """Positions of bars that enclose others: bars of the same lane, or micro-batch bars of another thread."""
        return frozenset(self._enclosed_bars)

    @cached_property
    def _enclosed_bars(self) -> dict[int, list[int]]:
        """Positions of bars that enclose others, with the positions of those bars."""
        enclosed = {task: list(waited_for) for task, waited_for in self._bars_waited_for_by_task.items()}
        open_bars: list[int] = []
        for position, bar in enumerate(self.bars):
            while open_bars and not _is_bar_enclosed(bar, self.bars[open_bars[-1]]):
                open_bars.pop()
            for enclosing in open_bars:
                enclosed.setdefault(enclosing, []).append(position)
            open_bars.append(position)
        return enclosed

    @cached_property
    def _bars_waited_for_by_task(self) -> dict[int, list[int]]:
        """Positions of main-thread tasks that wait for other threads to process micro-batches, with those bars."""
        waited_for: dict[int, list[int]] = defaultdict(list)
        for rank in {bar.rank for bar in self.bars if bar.stage is not None and bar.lane != MAIN}:
            tasks = [p for p, bar in enumerate(self.bars) if (bar.rank, bar.lane, bar.kind) == (rank, MAIN, TASK)]
            begins = [self.bars[position].start for position in tasks]
            for position, bar in enumerate(self.bars):
                if bar.rank == rank and bar.stage is not None and bar.lane != MAIN:
                    before = bisect_right(begins, bar.start) - 1
                    if before >= 0 and bar.end <= self.bars[tasks[before]].end:
                        waited_for[tasks[before]].append(position)
        return waited_for

    @cached_property
    def critical_path(self) -> frozenset[int]:
        """Positions of the bars on the critical path: if any of them had been shorter, the end would have come earlier.

        The path is traced from the end. The predecessor of a bar is the latest-ending bar that it had to wait for: its
        dependencies, the previous bar of its lane, the last bar of the main thread before it was submitted to a worker
        or launched on a stream and, after a schedule of micro-batches, the last bar of every rank in that schedule,
        since ranks exchange their losses there. Ranks connected by arrows share a path; each other rank has a separate
        path, because synchronization through collectives is not recorded.
        """
        return frozenset(
            position for step in self._critical_path_predecessors for position in step if position is not None
        )

    @cached_property
    def critical_path_arrows(self) -> tuple[Arrow, ...]:
        """Critical path as pairs of positions of consecutive bars."""
        return tuple((source, target) for source, target in self._critical_path_predecessors if source is not None)

    @cached_property
    def critical_waits(self) -> tuple[Bar, ...]:
        """Times on the critical path between its bars, as bars in the lane of the bar that waited.

        The name of a wait is its reason: ``"transfer"`` from another rank, ``"hand-off"`` between threads or streams of
        a rank, ``"between tasks"`` for other work of the thread, such as hooks and the data loader, or ``"in NAME"``
        for other work of the task called NAME, which encloses bars.
        """
        return tuple(
            wait for source, target in self.critical_path_arrows for wait in self._split_wait_by_reason(source, target)
        )

    def _split_wait_by_reason(self, source: int, target: int) -> list[Bar]:
        source_bar, target_bar = self.bars[source], self.bars[target]
        source_task, target_task = (
            self._outermost_enclosing_bars.get(source),
            self._outermost_enclosing_bars.get(target),
        )
        start, end = source_bar.end, target_bar.start
        reason = (
            TRANSFER
            if source_bar.rank != target_bar.rank
            else BETWEEN_TASKS
            if source_bar.lane == target_bar.lane
            else HAND_OFF
        )
        parts = [(reason, start, end)]
        if reason != TRANSFER and source_task != target_task:
            exit_time = start if source_task is None else min(max(start, self.bars[source_task].end), end)
            entry_time = end if target_task is None else max(min(end, self.bars[target_task].start), exit_time)
            parts = [(self._describe_enclosing_bar(source_task), start, exit_time), (reason, exit_time, entry_time)]
            parts.append((self._describe_enclosing_bar(target_task), entry_time, end))
        elif reason == BETWEEN_TASKS and source_task is not None:
            parts = [(self._describe_enclosing_bar(source_task), start, end)]
        return [
            Bar(target_bar.rank, target_bar.lane, name, CRITICAL_WAIT, begin, until, target_bar.iteration)
            for name, begin, until in parts
            if begin < until
        ]

    def _describe_enclosing_bar(self, around: int | None) -> str:
        return "" if around is None else f"in {self.bars[around].name}"

    @cached_property
    def _outermost_enclosing_bars(self) -> dict[int, int]:
        """Position of the outermost bar that encloses a bar."""
        return {
            inner: outer for outer in sorted(self._enclosed_bars, reverse=True) for inner in self._enclosed_bars[outer]
        }

    @cached_property
    def _critical_path_predecessors(self) -> list[tuple[int | None, int]]:
        leaves = [
            p for p, bar in enumerate(self.bars) if p not in self.enclosing_bar_positions and bar.kind not in WAITS
        ]
        before = self._predecessors(leaves)
        path: list[tuple[int | None, int]] = []
        seen: set[int] = set()
        for ranks in self._group_connected_ranks():
            of_ranks = (p for p in leaves if self.bars[p].rank in ranks)
            position: int | None = max(of_ranks, key=lambda p: self.bars[p].end, default=None)
            while position is not None and position not in seen:
                seen.add(position)
                # A predecessor on another rank that ends later is a clock error, or not a predecessor at all.
                candidates = [p for p in before[position] if self.bars[p].end <= self.bars[position].end]
                previous = max(candidates, key=lambda p: self.bars[p].end, default=None)
                path.append((previous, position))
                position = previous
        return path

    def _predecessors(self, leaves: Sequence[int]) -> dict[int, list[int]]:
        """Bars that each bar had to wait for. A bar that encloses others is represented by those others."""
        within = {position: [position] for position in leaves}
        within.update({outer: [p for p in inner if p in within] for outer, inner in self._enclosed_bars.items()})
        last = {p: [max(inner, key=lambda p: self.bars[p].end)] for p, inner in within.items() if inner}
        before: dict[int, list[int]] = defaultdict(list)

        def add_predecessor_bars(target: int, sources: Iterable[int]) -> None:
            for position in within.get(target, ()):
                before[position].extend(sources)

        for source, target in self.arrows:
            add_predecessor_bars(target, last.get(source, ()))
        lanes: dict[tuple[int, str], list[int]] = defaultdict(list)
        for position in sorted({*leaves, *self._bars_waited_for_by_task}):
            lanes[self._lane(position)].append(position)
        of_schedules = self._find_last_bars_by_schedule(leaves)
        for previous, following in (pair for lane in lanes.values() for pair in pairwise(lane)):
            add_predecessor_bars(following, last[previous])
            if self.bars[previous].stage is not None and self.bars[following].stage is None:
                add_predecessor_bars(following, of_schedules[self._get_pipeline_and_iteration(previous)])
        for position in leaves:
            submitted, tasks = self.bars[position].submitted, lanes[self.bars[position].rank, MAIN]
            if submitted is not None:
                count = bisect_left(tasks, submitted, key=lambda p: self.bars[p].start)
                if count and self.bars[tasks[count - 1]].end > submitted:
                    count -= 1
                before[position].extend(last[tasks[count - 1]] if count else ())
        hosts = {(bar.rank, bar.name, bar.iteration): p for p, bar in enumerate(self.bars) if bar.kind == TASK}
        for position in leaves:
            bar = self.bars[position]
            if bar.kind == DEVICE and (launching := within.get(hosts.get((bar.rank, bar.name, bar.iteration), -1))):
                before[position].extend(before[min(launching, key=lambda p: self.bars[p].start)])
        return before

    def _find_last_bars_by_schedule(self, leaves: Iterable[int]) -> dict[tuple[int, int | None], list[int]]:
        """Last bar of each rank in each schedule of micro-batches."""
        last: dict[tuple[int, int | None], dict[int, int]] = defaultdict(dict)
        for position in leaves:  # sorted by lane and start
            if self.bars[position].stage is not None:
                of_rank, rank = last[self._get_pipeline_and_iteration(position)], self.bars[position].rank
                if rank not in of_rank or self.bars[of_rank[rank]].end <= self.bars[position].end:
                    of_rank[rank] = position
        return defaultdict(list, {schedule: list(of_rank.values()) for schedule, of_rank in last.items()})

    def _get_pipeline_and_iteration(self, position: int) -> tuple[int, int | None]:
        return self.bars[position].pipeline, self.bars[position].iteration

    def _lane(self, position: int) -> tuple[int, str]:
        return self.bars[position].rank, self.bars[position].lane

    def _arrows_of_tasks(self) -> list[Arrow]:
        arrows: list[Arrow] = []
        for kind in (TASK, DEVICE):
            where = {
                (bar.rank, bar.name, bar.iteration): position
                for position, bar in enumerate(self.bars)
                if bar.kind == kind and bar.iteration is not None
            }
            for (rank, task, iteration), target in where.items():
                for dependency in self._needs[task]:
                    source = where.get((rank, dependency.upstream, iteration - dependency.distance))
                    if source is not None:
                        arrows.append((source, target))
        return arrows

    def _arrows_of_microbatches(self) -> list[Arrow]:
        first: dict[tuple[Any, ...], int] = {}  # work that took turns with other work has several bars
        last: dict[tuple[Any, ...], int] = {}
        for position, bar in enumerate(self.bars):
            if bar.stage is not None and bar.kind not in WAITS:
                key = bar.pipeline, bar.iteration, bar.microbatch, bar.stage, bar.kind
                first.setdefault(key, position)
                last[key] = position
        arrows: list[Arrow] = []
        for (pipeline, iteration, microbatch, stage, kind), target in first.items():
            for needed_stage, needed_kind in _get_microbatch_dependencies(stage, kind):
                source = last.get((pipeline, iteration, microbatch, needed_stage, needed_kind))
                if source is not None:
                    arrows.append((source, target))
        return arrows

    def _group_connected_ranks(self) -> list[set[int]]:
        joined = {bar.rank: {bar.rank} for bar in self.bars}
        for source, target in self.arrows:
            source_ranks, target_ranks = joined[self.bars[source].rank], joined[self.bars[target].rank]
            if source_ranks is not target_ranks:
                source_ranks |= target_ranks
                for rank in target_ranks:
                    joined[rank] = source_ranks
        return list({id(ranks): ranks for ranks in joined.values()}.values())


def _get_microbatch_dependencies(stage: int, kind: str) -> list[tuple[int, str]]:
    """Preceding work on the same micro-batch, as (stage, kind) pairs."""
    if kind == FORWARD:
        return [(stage - 1, FORWARD)]
    if kind == WEIGHT_BACKWARD:
        return [(stage, INPUT_BACKWARD)]
    if kind == RECOMPUTE:
        return [(stage, FORWARD)]
    return [(stage, FORWARD), (stage, RECOMPUTE), (stage + 1, BACKWARD), (stage + 1, INPUT_BACKWARD)]


def _is_bar_enclosed(bar: Bar, enclosing: Bar) -> bool:
    same_lane = (bar.rank, bar.lane) == (enclosing.rank, enclosing.lane)
    return same_lane and enclosing.start <= bar.start < enclosing.end and bar.end <= enclosing.end


def _sort_lanes(bars: Iterable[Bar]) -> list[tuple[int, str]]:
    keys = dict.fromkeys((bar.rank, bar.lane) for bar in bars)
    return sorted(keys, key=lambda key: (key[0], key[1] != MAIN, key[1].startswith("stream ")))
