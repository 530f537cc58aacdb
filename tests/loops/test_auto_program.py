"""A plan is found while training: each batch is trained once, in order, under every plan, and the fastest one stays.

Time is a clock that tasks move on.
"""

from __future__ import annotations

import time
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

import pytest

from lightning_pipe.engine import IterContext, PipelinePlan, PipelineTask, PlanError, TaskSchedule
from lightning_pipe.loops.auto_program import AutoProgram, Exploration, PlanChoice, fastest


class Clock:
    def __init__(self) -> None:
        self.now = 0.0

    def __call__(self) -> float:
        return self.now


class Machine:
    """Two tasks; an iteration takes as long as is said of its plan."""

    def __init__(self, clock: Clock, seconds: Mapping[str, float], exploration: Exploration, found: Sequence[str] = ()):
        self.clock, self.seconds = clock, dict(seconds)
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
            None,  # type: ignore[arg-type]
            None,
            exploration,
            self.choices.append,
            transfer="Copy",
            step="Train",
        )

    def plan(self, name: str, stage: int, stream: str | None = None) -> PipelinePlan:
        return PipelinePlan([(self.tasks[0], TaskSchedule(stage, stream)), (self.tasks[1], TaskSchedule())], name=name)

    def propose(self, own: Mapping[str, float], beside: float) -> list[PipelinePlan]:
        self.asked.append((dict(own), beside))
        # The last is the one that is there already.
        return [*(self.plan(name, 2 + index) for index, name in enumerate(self.found)), self.plan("same", 1)]

    def copy(self, ctx: IterContext) -> None:
        self.clock.now += 1.0

    def train(self, ctx: IterContext) -> None:
        """The caller's."""

    def epoch(self, batches: Sequence[Any]) -> None:
        source: Iterator[Any] = iter(batches)
        while True:
            try:
                ctx = self.program.begin(source)
            except StopIteration:
                return
            name = self.program.pipeline.plan.name
            self.program.begin_step()
            self.trained.append(ctx.batch)
            self.plans.append(name)
            self.clock.now += self.seconds.get(name, 5.0)
            self.program.end_step()
            self.program.finish()


@pytest.fixture
def clock(monkeypatch: pytest.MonkeyPatch) -> Clock:
    made = Clock()
    monkeypatch.setattr(time, "perf_counter", made)
    return made


FEW = Exploration(iterations=3, rounds=3, found=1)


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
    assert {name: len(times) for name, times in choice.measured.items()} == {"serial": 3, "ahead": 3, "auto_1": 3}
    machine.program.close()


def test_the_planner_is_told_what_tasks_take_and_what_is_beside_them(clock: Clock) -> None:
    machine = Machine(clock, {"serial": 5}, FEW)
    machine.epoch(range(100))
    ((own, beside),) = machine.asked
    assert own == pytest.approx({"Copy": 1.0, "Train": 5.0})
    assert beside == pytest.approx(0.0)
    # What the planner found was there already.
    assert set(machine.plans) == {"serial", "ahead"}


def test_it_goes_on_over_epochs_that_end_in_the_middle(clock: Clock) -> None:
    machine = Machine(clock, {"ahead": 1.0}, FEW, ["auto_1"])
    for epoch in range(40):
        machine.epoch(range(10 * epoch, 10 * epoch + 7))
    assert machine.trained == [10 * epoch + index for epoch in range(40) for index in range(7)]
    assert machine.choices[0].plan.name == "ahead"


def test_an_epoch_that_is_given_up_disturbs_nothing(clock: Clock) -> None:
    machine = Machine(clock, {"ahead": 1.0}, FEW)
    for epoch in range(30):
        source = iter(range(100 * epoch, 100 * epoch + 50))
        for _ in range(8):
            machine.program.begin(source)
            machine.program.begin_step()
            machine.clock.now += 1.0
            machine.program.end_step()
            machine.program.finish()
        machine.program.abandon()
    assert machine.choices


def test_where_iterations_become_slower_plans_are_tried_again_if_asked_to(clock: Clock) -> None:
    for above, again in ((None, 1), (2.0, 2)):
        machine = Machine(clock, {"serial": 2, "ahead": 1}, Exploration(3, 2, 0, above))
        machine.epoch(range(100))
        machine.seconds = {"serial": 4, "ahead": 50}
        machine.epoch(range(50))
        machine.epoch(range(100))
        assert len(machine.choices) == again
        assert machine.plans[-1] == ("ahead" if again == 1 else "serial")


def test_a_plan_that_was_found_must_be_faster_beyond_noise() -> None:
    by_hand = ["serial", "base"]
    steady = {"serial": [9.0] * 5, "base": [5.0] * 5}
    assert fastest({**steady, "auto": [4.0] * 5}, by_hand) == "auto"
    assert fastest({**steady, "auto": [4.98] * 5}, by_hand) == "base"
    assert fastest({**steady, "auto": [4.0, 4.0, 4.0, 6.0, 6.0]}, by_hand) == "base"
    assert fastest({**steady, "auto": [4.0, 4.0, 4.0, 4.0, 6.0]}, by_hand) == "auto"


@pytest.mark.parametrize(
    "arguments", [{"iterations": 0}, {"rounds": 0}, {"found": -1}, {"replan_above": 1.0}, {"replan_above": 0.5}]
)
def test_numbers_that_make_no_exploration_are_refused(arguments: dict[str, Any]) -> None:
    with pytest.raises(PlanError, match="needed"):
        Exploration(**arguments)
