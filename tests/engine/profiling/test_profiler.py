"""A profile says what each task costs an iteration, trains nothing, and refuses what it cannot measure.

Time is a clock that tasks move on, so that figures are exact.
"""

from __future__ import annotations

import io
import time
from dataclasses import replace
from typing import Any

import pytest
import torch
from rich.console import Console

from lightning_pipe.engine import (
    DeclaredIO,
    IterContext,
    PipelinePlan,
    PipelineTask,
    PlanError,
    ProfileResult,
    SetupError,
    State,
    SWPipeline,
    TaskError,
    TaskProfile,
    TaskProfiler,
    TaskSchedule,
)
from lightning_pipe.engine.profiling.profile import THIS_MACHINE


class Clock:
    """Stands still but for what tasks take."""

    def __init__(self) -> None:
        self.now = 0.0

    def __call__(self) -> float:
        return self.now


@pytest.fixture
def clock(monkeypatch: pytest.MonkeyPatch) -> Clock:
    made = Clock()
    monkeypatch.setattr(time, "perf_counter", made)
    return made


def taking(clock: Clock, name: str, seconds: float, *reads: str, **options: Any) -> PipelineTask:
    """A task that takes some time, and adds one to what it reads."""

    def run(ctx: IterContext) -> None:
        clock.now += seconds
        setattr(ctx, name, sum(getattr(ctx, field) for field in reads) + torch.ones(1))

    return PipelineTask(name, run, reads=reads, writes=[name], **options)


def chain(clock: Clock) -> SWPipeline:
    tasks = [taking(clock, "a", 1.0), taking(clock, "b", 2.0, "a"), taking(clock, "c", 4.0, "b")]
    return SWPipeline(PipelinePlan([(task, _HERE) for task in tasks], name="chain"))


_HERE = TaskSchedule()


def test_in_a_serial_plan_each_task_is_exposed_by_all_of_its_time(clock: Clock) -> None:
    result = TaskProfiler(chain(clock), [0, 1], rounds=3, iterations=4).profile_many()
    assert result.seconds == pytest.approx(7.0)
    assert (result.plan, result.rounds, result.iterations) == ("chain", 3, 4)
    assert result.task_seconds == pytest.approx({"a": 1.0, "b": 2.0, "c": 4.0})
    assert result.exposed == pytest.approx({"a": 1.0, "b": 2.0, "c": 4.0})
    for one in result.tasks.values():
        assert (one.low, one.high) == pytest.approx((one.exposed, one.exposed))
        assert one.included_tasks == ()


def test_a_machine_that_gets_slower_changes_nothing_of_what_tasks_cost(clock: Clock) -> None:
    """Each pair is measured at one time, and each is a little slower than the one before."""
    rounds = [0]

    def drifting(ctx: IterContext) -> None:
        rounds[0] += 1
        clock.now += 10.0 + rounds[0] // 30

    tasks = [PipelineTask("drifts", drifting, writes=["d"]), taking(clock, "fixed", 2.0)]
    pipeline = SWPipeline(PipelinePlan([(task, _HERE) for task in tasks]))
    found = TaskProfiler(pipeline, [0], rounds=9, iterations=5).profile("fixed")
    assert found.exposed == pytest.approx(2.0, abs=0.5)


def test_tasks_whose_work_goes_with_another_are_named(clock: Clock) -> None:
    def forward(ctx: IterContext) -> None:
        clock.now += 1.0
        ctx.work = [3.0]

    def backward(ctx: IterContext) -> None:
        clock.now += ctx.work.pop() if ctx.work else 0.0

    # What is kept of the work is that it is done.
    done = DeclaredIO(lambda ctx: None, lambda ctx, _: setattr(ctx, "work", []), ("work",))
    tasks = [
        PipelineTask("forward", forward, [done], writes=["work"]),
        PipelineTask("backward", backward, reads=["work"], writes=["work"]),
        taking(clock, "other", 1.0),
    ]
    pipeline = SWPipeline(PipelinePlan([(task, _HERE) for task in tasks]))
    result = TaskProfiler(pipeline, [0], rounds=2, iterations=3).profile_many(["forward", "other"])
    assert result.tasks["forward"].exposed == pytest.approx(4.0)
    assert result.tasks["forward"].included_tasks == ("backward",)
    assert result.tasks["other"].included_tasks == ()


def test_each_batch_is_replayed_with_what_it_was_captured_with(clock: Clock) -> None:
    found: list[tuple[int, int]] = []

    def first(ctx: IterContext) -> None:
        ctx.seen = ctx.batch

    def second(ctx: IterContext) -> None:
        found.append((ctx.batch, ctx.seen))

    tasks = [
        PipelineTask("first", first, reads=["batch"], writes=["seen"]),
        PipelineTask("second", second, reads=["batch", "seen"]),
    ]
    ahead = TaskSchedule(stage=1)
    pipeline = SWPipeline(PipelinePlan([(tasks[0], ahead), (tasks[1], _HERE)]))
    TaskProfiler(pipeline, [10, 20, 30], rounds=2, iterations=5).profile_many()
    assert {batch for batch, _ in found} == {10, 20, 30}
    assert all(batch == seen for batch, seen in found)


class Weight:
    """What a task trains, and a keeper of it."""

    def __init__(self) -> None:
        self.value = 0
        self.kept = 0

    def snapshot(self) -> int:
        self.kept += 1
        return self.value

    def restore(self, kept: int) -> None:
        self.value = kept


def training(weight: Weight) -> SWPipeline:
    def step(ctx: IterContext) -> None:
        weight.value += 1

    return SWPipeline(PipelinePlan({PipelineTask("step", step, writes=[State("weight")]): _HERE}))


def test_what_was_trained_is_put_back_also_after_an_error(clock: Clock) -> None:
    weight = Weight()
    pipeline = training(weight)
    TaskProfiler(pipeline, [0], weight, rounds=2, iterations=2).profile_many()
    assert weight.value == 0
    assert weight.kept >= 1
    assert (pipeline.shortcut_tasks, pipeline.in_flight) == ((), ())

    def fail(ctx: IterContext) -> None:
        weight.value += 1
        raise ValueError("no such column")

    failing = SWPipeline(PipelinePlan({PipelineTask("step", fail, writes=[State("weight")]): _HERE}))
    with pytest.raises(TaskError, match="no such column"):
        TaskProfiler(failing, [0], weight).profile_many()
    assert weight.value == 0


def test_an_effect_that_is_not_declared_is_noticed(clock: Clock) -> None:
    shelf = [0]

    def put(ctx: IterContext) -> None:
        shelf[0] += 1

    def take(ctx: IterContext) -> None:
        ctx.found = torch.tensor(shelf[0])
        shelf[0] = 0

    def of(*io: DeclaredIO) -> TaskProfiler:
        state = State("shelf")
        tasks = [
            PipelineTask("put", put, io, writes=[state]),
            PipelineTask("take", take, reads=[state], writes=["found"]),
        ]
        return TaskProfiler(SWPipeline(PipelinePlan([(task, _HERE) for task in tasks])), [0], rounds=1, iterations=1)

    with pytest.raises(
        SetupError, match=r"'put' has effects that it does not declare.*'take' wrote a different 'found'"
    ):
        of().profile_many()
    declared = DeclaredIO(lambda ctx: shelf[0], lambda ctx, kept: shelf.__setitem__(0, kept))
    of(declared).check_task_replay("put")
    assert of(declared).profile_many().exposed["put"] == 0.0


def test_a_task_that_cannot_be_replayed_has_its_own_time_alone(clock: Clock) -> None:
    tasks = [
        taking(clock, "a", 1.0),
        taking(clock, "schedule", 5.0, "a", not_replayable="its neighbors would wait"),
    ]
    profiler = TaskProfiler(SWPipeline(PipelinePlan([(task, _HERE) for task in tasks])), [0], rounds=1, iterations=2)
    result = profiler.profile_many()
    assert result.exposed == pytest.approx({"a": 1.0})
    assert result.tasks["schedule"] == TaskProfile(5.0, unmeasured_reason="not replayed: its neighbors would wait")
    with pytest.raises(PlanError, match="'schedule' cannot be replayed, since its neighbors would wait"):
        profiler.profile("schedule")


def test_what_cannot_be_profiled_is_refused(clock: Clock) -> None:
    pipeline = chain(clock)
    with pytest.raises(PlanError, match="a profile has 0 batches"):
        TaskProfiler(pipeline, [])
    with pytest.raises(PlanError, match="0 rounds and"):
        TaskProfiler(pipeline, [0], rounds=0)
    profiler = TaskProfiler(pipeline, [0])
    for ask in (profiler.profile, lambda name: profiler.profile_many([name])):
        with pytest.raises(PlanError, match="no task 'd'; its tasks are a, b, c"):
            ask("d")
    pipeline.begin_period(iter([0]))
    with pytest.raises(PlanError, match="is open"):
        profiler.profile("a")


def test_a_result_is_read_back_from_its_text() -> None:
    tasks = {
        "a": TaskProfile(1e-3, 5e-4, 4e-4, 6e-4, ("b",)),
        "b": TaskProfile(2e-3, unmeasured_reason="not replayed: so"),
    }
    result = ProfileResult("serial", 3e-3, tasks, 7, 10)
    assert ProfileResult.from_json(result.to_json()) == result
    odd = [result.to_json().replace("0.0004", text) for text in ("null", "NaN", "1e999")]
    for text in (
        *odd,
        result.to_json().replace("7", "1e400"),
        "",
        "{}",
        '{"tasks": 3}',
        '{"plan": "serial", "seconds": "long", "tasks": {}}',
        "[1]",
    ):
        with pytest.raises(PlanError, match="this is not a profile"):
            ProfileResult.from_json(text)


def test_the_report_has_a_line_for_each_task() -> None:
    tasks = {
        "start_sparse_dist": TaskProfile(0.1, 5e-4, -4e-4, 6e-4, ("b",)),
        "b": TaskProfile(2e-3, unmeasured_reason="not replayed: so"),
    }
    console = Console(record=True, width=80, markup=False)
    console.print(ProfileResult("serial", 2e-3, tasks, 7, 10).report())
    text = console.export_text()
    assert "…" not in text
    assert "plan serial: 2.000 ms an iteration (7 rounds of 10" in text
    lines = [line.split() for line in text.splitlines()]
    assert ["start_sparse_dist", "100.000", "0.500", "-0.400", "..", "0.600", "-", "100", "%"] in lines
    assert ["b", "2.000", "-"] in lines
    assert "start_sparse_dist: exposed time includes b" in text
    assert "b: not replayed: so" in text


@pytest.mark.parametrize(
    ("one", "share", "hidden"),
    [
        (TaskProfile(2e-3, 1e-3, 9e-4, 1.1e-3), "10.0 %", "50 %"),
        (TaskProfile(2e-3, 2.5e-3, 2.2e-3, 2.9e-3), "25.0 %", "-"),  # more than its own time
        (TaskProfile(1.4e-3, -4.9e-3, -5e-3, -4.8e-3), "-", "-"),  # less than nothing
        (TaskProfile(1.4e-3, 3e-3, 0.4e-3, 8e-3), "30.0 %", "-"),
        (TaskProfile(1.4e-3, 3e-3, -0.4e-3, 8e-3), "-", "-"),
        (TaskProfile(2e-3, -1e-5, -5e-5, 5e-5), "0.0 %", "100 %"),
    ],
)
def test_shares_are_said_where_they_are_known(one: TaskProfile, share: str, hidden: str) -> None:
    assert ProfileResult("plan", 1e-2, {"a": one}, 7, 10).format_share_cells(one) == (share, hidden)


def test_tasks_are_ranked_by_the_least_that_they_cost() -> None:
    tasks = {
        "wide": TaskProfile(1.4e-3, 4e-3, 0.4e-3, 8e-3),
        "sure": TaskProfile(3e-3, 2.5e-3, 2.2e-3, 2.9e-3),
        "doubtful": TaskProfile(1e-3, 5e-3, -1e-3, 9e-3),
        "not measured": TaskProfile(1e-3),
    }
    profile = ProfileResult("plan", 1e-2, tasks, 7, 10)
    assert profile.exposed_tasks == ["sure", "wide"]
    assert profile.noise_warning == ""
    noisy = replace(profile, tasks={**tasks, "b": tasks["doubtful"], "c": tasks["doubtful"]})
    assert noisy.noise_warning.startswith("3 of 5 intervals contain 0 and are wide: too noisy to rank")


# ---------------------------------------------------------------------- summary

SURE = {"A": TaskProfile(0.004, 0.004, 0.003, 0.005), "B": TaskProfile(0.006, 0.0, -0.0001, 0.0001)}
NOISE = {"A": TaskProfile(0.004, 0.001, -0.003, 0.005), "B": TaskProfile(0.006, 0.0, -0.004, 0.004)}
HERE = {THIS_MACHINE: {"serial": 0.012, "base": 0.010, "prefetch": 0.008}, "elsewhere": {"serial": 0.02, "base": 0.01}}


@pytest.mark.parametrize(
    ("profile", "lines"),
    [
        (
            ProfileResult("base", 0.01, SURE, 7, 10, predicted=HERE),
            [
                "The tasks of a step take 10.0 ms under the plan base; longest of the measured tasks: B 60 %, A 40 %.",
                "A step would be shorter without A (30 to 50 %). The plan hides B.",
                "Predicted: a plan can hide 4.0 of the serial plan's 12.0 ms; base hides 2.0 ms.",
                "Next: try the plan 'prefetch'.",
                "Predicted for the same step with a core for each rank, under serial / base: elsewhere 20.0 / 10.0 ms.",
            ],
        ),
        (
            ProfileResult("prefetch", 0.009, SURE, 7, 10, predicted=HERE),
            [
                *["The tasks of a step take 9.0 ms", "A step would be", "Predicted: a plan can hide 4.0"],
                "Next: make A faster; no other plan hides more.",
                "Predicted for the same step",
            ],
        ),
        (
            ProfileResult("base", 0.01, NOISE, 7, 10, busy=0.97, predicted=HERE),
            [
                "The tasks of a step take 10.0 ms",
                "2 of 2 intervals contain 0 and are wide: too noisy to rank these tasks",
                "The cores of this machine are busy for 97 % of the time: a step waits for them, which",
                "Predicted for the same step",
            ],
        ),
        (
            ProfileResult("base", 0.01, NOISE, 7, 10, predicted=HERE),
            [
                "The tasks of a step take 10.0 ms",
                "2 of 2 intervals",
                "Predicted: a plan can hide",
                "Predicted for the same step",
            ],
        ),
        (
            ProfileResult("base", 0.015, SURE, 7, 10, predicted=HERE),
            [
                *["The tasks of a step take 15.0 ms", "A step would be shorter"],
                "A simulation of this plan gives 10.0 ms a step, too far from the measured time",
            ],
        ),
        (
            ProfileResult("p", 0.01, {"A": TaskProfile(0.004, 0.006, 0.001, 0.02), "B": SURE["A"]}, 7, 10),
            ["The tasks of a step take 10.0 ms", "A step would be shorter without B (30 to 50 %)."],
        ),
        (
            ProfileResult("p", 0.01, SURE, 1, 10),
            ["The tasks of a step take 10.0 ms", "Fewer than 3 rounds give no intervals"],
        ),
        (
            ProfileResult("p", 0.0, SURE, 7, 10),
            ["The tasks of a step take 0.000 ms under the plan p.", "No task was replayed"],
        ),
        (
            ProfileResult("p", 0.01, {"A": TaskProfile(0.004)}),
            ["The tasks of a step take 10.0 ms", "No task was replayed"],
        ),
    ],
    ids=[
        "another plan",
        "this plan",
        "busy cores",
        "noise",
        "wrong simulation",
        "wide interval",
        "one round",
        "no time",
        "own times",
    ],
)
def test_a_summary_has_at_most_five_lines_and_says_what_to_try_next(profile: ProfileResult, lines: list[str]) -> None:
    summary = profile.summarize()
    assert len(summary) <= 5
    assert [line.startswith(begin) for line, begin in zip(summary, lines, strict=True)] == [True] * len(lines), summary
    assert ProfileResult.from_json(profile.to_json()) == profile


def test_the_table_is_left_out_if_its_intervals_rank_no_task_and_none_was_asked_for() -> None:
    def printed(profile: ProfileResult, table: bool | None = None) -> str:
        console = Console(width=200, record=True, file=io.StringIO())
        console.print(profile.report(table))
        return console.export_text()

    sure, noisy = ProfileResult("p", 0.01, SURE, 7, 10), ProfileResult("p", 0.01, NOISE, 7, 10)
    assert "95 %" in printed(sure)
    assert "95 %" not in printed(sure, table=False)
    assert "95 %" not in printed(noisy)
    assert "95 %" in printed(noisy, table=True)
