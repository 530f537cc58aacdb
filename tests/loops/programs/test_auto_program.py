"""A plan is found while training: each batch is trained once, in order, under every plan, and the fastest one stays.

Time is a clock that tasks move on.
"""

from __future__ import annotations

import time
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

import pytest
import torch
import torch.distributed as dist

from lightning_pipe.engine import IterContext, PipelinePlan, PipelineTask, PlanError, TaskSchedule
from lightning_pipe.loops.programs.auto_program import AutoProgram, PlanChoice, PlanSearchOptions
from tests.distributed import run_ranks


class Clock:
    def __init__(self) -> None:
        self.now = 0.0

    def __call__(self) -> float:
        return self.now


class Machine:
    """Two tasks; an iteration takes as long as is said of its plan."""

    def __init__(
        self,
        clock: Clock,
        seconds: Mapping[str, float],
        exploration: PlanSearchOptions,
        found: Sequence[str] = (),
        group: dist.ProcessGroup | None = None,
    ):
        self.clock, self.seconds = clock, dict(seconds)
        self.fetch = self.start = 0.0
        self.trained: list[Any] = []
        self.plans: list[str] = []
        self.asked: list[tuple[dict[str, float], float]] = []
        self.choices: list[PlanChoice] = []
        self.tasks = [
            PipelineTask("Copy", self.copy, reads=("batch",), writes=("batch",)),
            PipelineTask("Train", self.train, reads=("batch",)),
        ]
        self.found = found
        self.program = AutoProgram(
            [self.plan("serial", 0), self.plan("ahead", 1)],
            self.propose,
            torch.device("cpu"),
            group,
            exploration,
            self.choices.append,
            transfer="Copy",
            step="Train",
        )

    def plan(self, name: str, stage: int, stream: str | None = None) -> PipelinePlan:
        return PipelinePlan([(self.tasks[0], TaskSchedule(stage, stream)), (self.tasks[1], TaskSchedule())], name=name)

    def propose(self, own: Mapping[str, float], beside: float) -> list[PipelinePlan]:
        self.asked.append((dict(own), beside))
        return [self.plan(name, 2 + index) for index, name in enumerate(self.found)]

    def copy(self, ctx: IterContext) -> None:
        self.clock.now += 1.0

    def train(self, ctx: IterContext) -> None:
        """The caller's."""

    def fetched(self, batches: Sequence[Any]) -> Iterator[Any]:
        self.clock.now += self.start
        for batch in batches:
            self.clock.now += self.fetch
            yield batch

    def epoch(self, batches: Sequence[Any]) -> None:
        source = self.fetched(batches)
        while True:
            try:
                ctx = self.program.begin_next_batch(source)
            except StopIteration:
                return
            name = self.program.pipeline.plan.name
            self.program.begin_step_task()
            self.trained.append(ctx.batch)
            self.plans.append(name)
            self.clock.now += self.seconds.get(name, 5.0)
            self.program.end_step_task()
            self.program.finish_batch()


@pytest.fixture
def clock(monkeypatch: pytest.MonkeyPatch) -> Clock:
    made = Clock()
    monkeypatch.setattr(time, "perf_counter", made)
    return made


FEW = PlanSearchOptions(
    iterations=3, rounds=5, max_generated=1, extra_rounds=0
)  # with fewer rounds nothing that is found is tried


@pytest.mark.parametrize(
    ("seconds", "winner"),
    [
        ({"serial": 5, "ahead": 9, "auto_1": 8}, "serial"),
        ({"serial": 9, "ahead": 5, "auto_1": 8}, "ahead"),
        ({"serial": 9, "ahead": 8, "auto_1": 5}, "auto_1"),
        ({"serial": 9, "ahead": 8, "auto_1": 8}, "ahead"),  # as fast is not faster
    ],
)
def test_the_fastest_plan_stays_and_batches_keep_their_order(
    clock: Clock, seconds: dict[str, float], winner: str
) -> None:
    machine = Machine(clock, seconds, FEW, ["auto_1"])
    machine.epoch(range(200))
    assert machine.trained == list(range(200))
    (choice,) = machine.choices
    assert choice.plan.name == winner
    assert machine.plans[-1] == winner
    assert set(machine.plans) == {"serial", "ahead", "auto_1"}
    assert {name: len(times) for name, times in choice.measured.items()} == {"serial": 5, "ahead": 5, "auto_1": 5}
    machine.program.close()


def test_the_planner_is_told_what_tasks_take_and_what_is_beside_them(clock: Clock) -> None:
    machine = Machine(clock, {"serial": 5}, FEW)
    machine.epoch(range(100))
    ((own, beside),) = machine.asked
    assert own == pytest.approx({"Copy": 1.0, "Train": 5.0})
    assert beside == pytest.approx(0.0)
    # The planner found nothing.
    assert set(machine.plans) == {"serial", "ahead"}


def test_a_recording_that_another_has_begun_goes_on(clock: Clock) -> None:
    machine = Machine(clock, {}, FEW)
    source = iter(range(100))
    machine.program.begin_next_batch(source)
    machine.program.pipeline.start_trace()
    trace = machine.program.pipeline.trace
    for _ in range(8):
        machine.program.finish_batch()
        machine.program.begin_next_batch(source)
    assert machine.asked  # the tasks were recorded and plans are found
    assert machine.program._pipelines["serial"].trace is trace


def test_a_recording_of_others_that_ends_in_between_leaves_the_rest_to_be_recorded(clock: Clock) -> None:
    machine = Machine(clock, {}, FEW)
    machine.program.pipeline.start_trace()
    machine.epoch(range(1))
    machine.program.pipeline.stop_trace()
    machine.epoch(range(60))
    assert machine.asked[0][0] == pytest.approx({"Copy": 1.0, "Train": 5.0})
    machine.program.close()


def test_it_goes_on_over_epochs_that_end_in_the_middle(clock: Clock) -> None:
    machine = Machine(clock, {"ahead": 1.0}, FEW, ["auto_1"])
    for epoch in range(40):
        machine.epoch(range(10 * epoch, 10 * epoch + 7))
    assert machine.trained == [10 * epoch + index for epoch in range(40) for index in range(7)]
    assert machine.choices[0].plan.name == "ahead"


def test_where_iterations_become_slower_plans_are_tried_again_if_asked_to(clock: Clock) -> None:
    for above, again in ((None, 1), (2.0, 2)):
        machine = Machine(clock, {"serial": 2, "ahead": 1}, PlanSearchOptions(3, 2, 0, above, 0))
        machine.epoch(range(100))
        machine.seconds = {"serial": 4, "ahead": 50}
        machine.epoch(range(50))
        machine.epoch(range(100))
        assert len(machine.choices) == again
        assert machine.plans[-1] == ("ahead" if again == 1 else "serial")


def propose_by_rank(rank: int, world_size: int) -> tuple[list[str], list[int]]:
    """Plans that each rank tries if planners of ranks disagree, as on machines with unequal numbers of cores."""
    machine = Machine(Clock(), {}, FEW, ["auto_1"], dist.group.WORLD)
    machine.program._propose = lambda own, beside: [machine.plan("auto_1", 2 + rank)]
    machine.epoch(range(200))
    machine.program.close()
    return machine.plans, machine.trained


def test_all_ranks_try_the_plans_of_the_first() -> None:
    first, second = run_ranks(propose_by_rank, 2)
    assert first == second
    assert "auto_1" in first[0]
    assert first[1] == list(range(200))


def test_a_plan_that_is_found_again_under_the_same_name_is_the_new_one(clock: Clock) -> None:
    exploration = PlanSearchOptions(iterations=3, rounds=5, max_generated=1, replan_above=2.0, extra_rounds=0)
    machine = Machine(clock, {"serial": 9, "ahead": 8, "auto_1": 5}, exploration, ["auto_1"])
    machine.epoch(range(200))
    assert machine.choices[0].plan.schedule["Copy"].stage == 2
    machine.propose = lambda own, beside: [machine.plan("auto_1", 3)]  # type: ignore[method-assign]
    machine.program._propose = machine.propose
    machine.seconds = {"serial": 90, "ahead": 80, "auto_1": 50}
    machine.epoch(range(50))
    machine.epoch(range(200))
    assert machine.choices[1].plan.schedule["Copy"].stage == 3
    assert machine.program.pipeline.plan.schedule["Copy"].stage == 3
    machine.program.close()


def test_iterations_at_the_ends_of_an_epoch_are_not_timed(clock: Clock) -> None:
    # A pipeline that fills fetches more than once, one that drains not at all; and a loader's workers have to start.
    machine = Machine(clock, {}, PlanSearchOptions(1, 8, 1, extra_rounds=0), ["auto_1"])
    machine.fetch, machine.start = 10.0, 100.0
    epochs = [range(20 * epoch, 20 * epoch + 4 + epoch % 7) for epoch in range(70)]
    for epoch in epochs:
        machine.epoch(epoch)
    (choice,) = machine.choices
    assert {seconds for times in choice.measured.values() for seconds in times} == {16.0}
    assert machine.trained == [batch for epoch in epochs for batch in epoch]


def test_training_that_ends_before_says_that_no_plan_was_chosen(clock: Clock, caplog: pytest.LogCaptureFixture) -> None:
    for batches, said in ((20, True), (200, False)):
        caplog.clear()
        machine = Machine(clock, {}, FEW)
        machine.epoch(range(batches))
        with caplog.at_level("INFO"):
            machine.program.close()
            machine.program.close()
        assert caplog.text.count("ended before a plan was chosen, under plan ") == said


def test_plans_that_may_yet_be_the_fastest_are_timed_for_longer(clock: Clock) -> None:
    exploration = PlanSearchOptions(1, 5, 3, extra_rounds=4)
    names = ["auto_1", "auto_2", "auto_3"]
    found = {"auto_1": 7.0, "auto_2": 20.0, "auto_3": 7.0}
    machine = Machine(clock, {"serial": 7.0, "ahead": 20.0, **found}, exploration, names)
    machine.epoch(range(400))
    (choice,) = machine.choices
    # Two drop out, and the others are as fast as each other to the end.
    rounds = {"serial": 9, "ahead": 5, "auto_1": 9, "auto_2": 5, "auto_3": 9}
    assert {name: len(times) for name, times in choice.measured.items()} == rounds
    assert choice.plan.name == "serial"


@pytest.mark.parametrize(
    "arguments",
    [
        {"iterations": 0},
        {"max_generated": -1},
        {"replan_above": 1.0},
        {"replan_above": "2"},
    ],
)
def test_numbers_that_make_no_exploration_are_refused(arguments: dict[str, Any]) -> None:
    with pytest.raises(PlanError, match="expected"):
        PlanSearchOptions(**arguments)
