"""Random tasks with declared reads and writes, random valid plans for them, and what serial execution gives."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

from hypothesis import strategies as st

from lightning_pipe.engine import IterContext, PipelinePlan, PipelineTask, State, TaskSchedule
from lightning_pipe.engine.plans.dependencies import required_dependencies
from lightning_pipe.engine.runtime.sequencer import end_submission_turn

FIELDS = ("batch", "x", "y", "t")
STATES = (State("t"), State("u"))  # one spelled like a field: they are different things


@dataclass(frozen=True)
class Declared:
    """One random task: what it reads and writes, and how often it lets other threads run in between."""

    name: str
    reads: tuple[str, ...]
    writes: tuple[str, ...]
    yields: int


@dataclass
class World:
    """What tasks work on and leave behind: the outliving state, every value computed, every submission."""

    state: dict[str, int] = field(default_factory=dict)
    computed: dict[tuple[str, int], int] = field(default_factory=dict)
    submissions: list[tuple[str, int]] = field(default_factory=list)
    launch: Callable[[tuple[str, int]], None] = lambda _: None
    lock: threading.Lock = field(default_factory=threading.Lock)

    def task(self, declared: Declared) -> PipelineTask:
        """A task that reads, lets others run, and only then writes, so that one out of order leaves its mark."""

        def fn(ctx: IterContext) -> None:
            work = (declared.name, ctx.iter_idx)
            with self.lock:
                self.submissions.append(work)
            self.launch(work)
            seen = [self._value(ctx, name) for name in declared.reads]
            for _ in range(declared.yields):
                time.sleep(0)  # no pause: lets another thread have the interpreter
            end_submission_turn()
            value = hash((len(declared.name), declared.name[-1], *seen))
            for name in declared.writes:
                if isinstance(name, State):
                    self.state[name] = value
                else:
                    setattr(ctx, name, value)
            with self.lock:
                self.computed[work] = value

        return PipelineTask(declared.name, fn, reads=declared.reads, writes=declared.writes)

    def _value(self, ctx: IterContext, name: str) -> int:
        """Of a field or of the outliving state, 0 before the first write."""
        if isinstance(name, State):
            return self.state.get(name, 0)
        return getattr(ctx, name) if ctx.has(name) else 0


def run_serially(tasks: Sequence[Declared], batches: Sequence[int]) -> World:
    """The world after running *tasks* for one batch after the other: what every plan has to give."""
    world = World()
    functions = [world.task(declared).fn for declared in tasks]
    for iteration, batch in enumerate(batches):
        ctx = IterContext(batch, iteration)
        for fn in functions:
            fn(ctx)
    return world


def conflicts(tasks: Sequence[Declared], iterations: int) -> list[tuple[tuple[str, int], tuple[str, int]]]:
    """All pairs of runs that must keep their serial order: they meet in something, and one of them writes it."""
    runs = [(declared, iteration) for iteration in range(iterations) for declared in tasks]
    pairs = []
    for position, (after, later) in enumerate(runs):
        for before, earlier in runs[:position]:
            shared = [
                *({*before.writes} & {*after.reads, *after.writes}),
                *({*before.reads} & {*after.writes}),
            ]
            # Strings are equal whatever their class, so look again whether both mean the state or both the field.
            if any(_meets(before, after, name, earlier == later) for name in shared):
                pairs.append(((before.name, earlier), (after.name, later)))
    return pairs


def _meets(before: Declared, after: Declared, name: str, same_iteration: bool) -> bool:
    def touches(names: Sequence[str], is_state: bool) -> bool:
        return any(entry == name and isinstance(entry, State) == is_state for entry in names)

    for is_state in (False, True):
        first = touches(before.writes, is_state) and touches((*after.reads, *after.writes), is_state)
        second = touches(before.reads, is_state) and touches(after.writes, is_state)
        if (first or second) and (is_state or same_iteration):
            return True
    return False


@st.composite
def random_tasks(draw: st.DrawFn) -> list[Declared]:
    """Two to seven tasks in serial order."""
    names = st.lists(st.sampled_from([*FIELDS, *STATES]), max_size=3, unique_by=lambda n: (n, isinstance(n, State)))
    return [
        Declared(f"task{index}", tuple(draw(names)), tuple(draw(names)), draw(st.integers(0, 3)))
        for index in range(draw(st.integers(2, 7)))
    ]


@st.composite
def random_schedules(draw: st.DrawFn, tasks: Sequence[Declared]) -> dict[str, object]:
    """The arguments of a valid plan for *tasks*, but the tasks themselves: see :func:`build`."""
    names = [declared.name for declared in tasks]
    pairs = st.tuples(st.sampled_from(range(len(names))), st.sampled_from(range(len(names))))
    deps = [(names[a], names[b]) for a, b in draw(st.lists(pairs, max_size=2)) if a < b]
    cross = [
        (names[a], names[b], distance)
        for (a, b), distance in draw(st.lists(st.tuples(pairs, st.integers(1, 3)), max_size=2))
    ]
    required = required_dependencies([World().task(declared) for declared in tasks])
    edges = [(d.upstream, d.downstream, d.distance) for d in required] + [(a, b, 0) for a, b in deps] + cross
    stages = {name: draw(st.integers(0, 3)) for name in names}
    lowered = True
    while lowered:  # until no task is further ahead than what it depends on allows
        lowered = False
        for upstream, downstream, distance in edges:
            if stages[downstream] > stages[upstream] + distance:
                stages[downstream], lowered = stages[upstream] + distance, True
    schedule = {
        name: TaskSchedule(
            stages[name],
            draw(st.sampled_from([None, "copy", "dist"])),
            draw(st.sampled_from(["main", "main", "w1", "w2", "w3"])),
            draw(st.booleans()),
        )
        for name in names
    }
    priority = draw(st.permutations(names))
    order: list[str] = []
    same_period = [(up, down) for up, down, distance in edges if stages[up] + distance == stages[down] and up != down]
    while len(order) < len(names):
        order.append(
            next(
                name
                for name in priority
                if name not in order and all(up in order for up, down in same_period if down == name)
            )
        )
    return {
        "schedule": schedule,
        "deps": deps,
        "cross_iter_deps": cross,
        "pipeline_depth": max(stages.values()) + 1 + draw(st.integers(0, 1)),
        "order": draw(st.sampled_from([(), tuple(order)])),
    }


def build(world: World, tasks: Sequence[Declared], arguments: dict[str, object]) -> PipelinePlan:
    """A plan whose tasks work on *world*."""
    schedule = arguments["schedule"]
    assert isinstance(schedule, dict)
    rest = {key: value for key, value in arguments.items() if key != "schedule"}
    return PipelinePlan([(world.task(declared), schedule[declared.name]) for declared in tasks], **rest)  # type: ignore[arg-type]
