"""A program that chooses its plan during training: every plan trains the same batches to the same values.

    plan         serial      serial    base      prefetch  auto_1    base   prefetch   ... (rounds)     the fastest one
                 traced: times of tasks, for the planner
                             plans are timed in turns, with the user's loader, hooks and loggers
                                                                     too slow plans are dropped

Before a change of plan, the batches in flight are trained, so that batches stay in order. An iteration is timed only if
the pipeline was full throughout: iterations at the start and end of an epoch do not count.
"""

from __future__ import annotations

import statistics
import time
from collections import deque
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist
from lightning.pytorch.utilities.rank_zero import rank_zero_info

from lightning_pipe.engine import PipelinePlan, PlanError, SWPipeline, TrainingContext
from lightning_pipe.engine.common.options import check_whole_number
from lightning_pipe.engine.observe.device_clock import DeviceClock
from lightning_pipe.engine.observe.trace import TraceRecorder, median_task_seconds
from lightning_pipe.engine.planning.plan_choice import (
    choose_measured_plan,
    interquartile_mean,
    max_generated_plans,
    select_survivors,
)
from lightning_pipe.engine.ranks.object_collectives import all_gather_objects, run_on_rank
from lightning_pipe.engine.runtime.devices import DeviceStreams
from lightning_pipe.loops.programs.program import TrainingProgram

# Called with the seconds of each task, by name, and the seconds of an iteration outside of tasks. Returns further plans
# to try, best first.
Proposal = Callable[[Mapping[str, float], float], Sequence[PipelinePlan]]

_KEPT = 200  # number of timed iterations that are kept to detect a slower machine


@dataclass(frozen=True)
class PlanSearchOptions:
    """Size of the search for the fastest plan.

    All iterations of the search train the model like any other iteration. The search costs only the extra time of the
    slower plans.

    Args:
        iterations: number of timed iterations of each plan in each round (default 8). Increase it if iteration times
            are noisy.
        rounds: number of rounds in which every plan is timed (default 6).
        max_generated: maximum number of plans from the planner, in addition to the hand-written ones (default 3). It is
            further limited to the number of plans that the rounds can distinguish from noise
            (:func:`~lightning_pipe.engine.planning.plan_choice.max_generated_plans`): 0 with fewer than 5 rounds,
            including *extra_rounds*.
        replan_above: factor of the iteration time above which the search runs again at the start of an epoch (default
            None). The time in the previous epoch is compared with the time when the plan was chosen. ``None`` disables
            replanning.
        extra_rounds: maximum number of rounds after *rounds*, in which only plans that may still be the fastest are
            timed (:func:`~lightning_pipe.engine.planning.plan_choice.select_survivors`; default 18).

    Raises:
        PlanError: a value is not a whole number or too small, or *replan_above* is not above 1.
    """

    iterations: int = 8
    rounds: int = 6
    max_generated: int = 3
    replan_above: float | None = None
    extra_rounds: int = 18

    def __post_init__(self) -> None:
        for name, least in (("iterations", 1), ("rounds", 1), ("max_generated", 0), ("extra_rounds", 0)):
            check_whole_number(f"{name} of an exploration", getattr(self, name), least, error=PlanError)
        above = self.replan_above
        if above is not None and (not isinstance(above, int | float) or isinstance(above, bool) or not above > 1):
            raise PlanError(f"replan_above is {above!r}; expected a factor above 1, or None")


@dataclass(frozen=True)
class PlanChoice:
    """Chosen plan and the measurements of the search.

    Args:
        plan: the fastest plan.
        measured: seconds per iteration in each round, keyed by the name of the plan; mean over ranks. Plans with fewer
            rounds were dropped because they were too slow.
        hand_written: names of the plans that were not found by the planner.
        task_seconds: seconds of each task when tasks run serially, keyed by the name of the task.
    """

    plan: PipelinePlan
    measured: Mapping[str, Sequence[float]]
    hand_written: Sequence[str]
    task_seconds: Mapping[str, float]


@dataclass(frozen=True)
class _Block:
    """Consecutive iterations under one plan."""

    plan: PipelinePlan
    traced: bool = False


class AutoProgram(TrainingProgram):
    """Times plans in the first iterations, and continues with the fastest one. Every rank makes the same calls.

    The first of *plans* is the serial plan, which is traced. Only the first rank calls *propose*. Every rank calls
    *chosen* when a plan is chosen. Further arguments are those of :class:`TrainingProgram` without the pipeline.
    """

    def __init__(
        self,
        plans: Sequence[PipelinePlan],
        propose: Proposal,
        device: torch.device,
        group: dist.ProcessGroup | None,
        exploration: PlanSearchOptions,
        chosen: Callable[[PlanChoice], None],
        **arguments: Any,
    ) -> None:
        self._hand_written = list(plans)
        self._propose = propose
        self._device = device
        self._group = group
        self._exploration = exploration
        self._chosen = chosen
        self._pipelines: dict[str, SWPipeline] = {}
        super().__init__(self._get_pipeline_of_plan(plans[0]), **arguments)
        self._source: Iterator[Any] | None = None
        self._clock = _HostOrDeviceClock(DeviceClock(device) if DeviceStreams(device, ()).available else None)
        # State of the current block.
        self._begun: Any = None  # start time of the current iteration
        self._to_skip = 0  # number of iterations that are not timed
        self._left = 0  # number of iterations still to be timed
        self._timed: deque[tuple[Any, Any]] = deque(maxlen=_KEPT)  # start and end of timed iterations
        self._trace: TraceRecorder | None = None  # trace of tasks
        self._draining = False  # True while only the batches in flight are trained
        self._start_exploration()
        plans_text, least, most = self._estimate_search_length()
        rank_zero_info(f"Trying {plans_text}, which takes about {least:,} to {most:,} batches of this training.")

    def begin_next_batch(self, source: Iterator[Any]) -> TrainingContext:
        self._record_iteration_time()
        if source is not self._source:
            self._source = source
            self._replan_if_slower()
            self._to_skip = max(self._to_skip, 1)  # includes the start of the loader's workers
        if not self._draining and self._left == 0:
            self._draining = True
        while self._draining:
            try:
                return super().begin_next_batch(iter(()))
            except StopIteration:
                self._draining = False
                self._end_timing_block()
        if self.pipeline.plan.max_stage and not self.pipeline.in_flight:
            # Iterations take less or more time than usual until the pipeline is full.
            self._to_skip = self.pipeline.plan.pipeline_depth + 1
        if self._blocks and self._blocks[0].traced:
            self._adopt_callback_trace()
        timed = self._choice is None or self._exploration.replan_above is not None
        begun = self._clock.now() if timed else None
        ctx = super().begin_next_batch(source)
        self._begun = begun
        return ctx

    def abandon_batches(self) -> int:
        self._begun = None
        return super().abandon_batches()

    def close(self) -> None:
        if self._pipelines and self._choice is None:
            _, least, most = self._estimate_search_length()
            rank_zero_info(
                f"Training ended before a plan was chosen, under plan {self.pipeline.plan.name!r}. The search takes"
                f" about {least:,} to {most:,} batches; those at the start and end of an epoch do not count. Train"
                " longer, or reduce iterations, rounds, max_generated or extra_rounds of the option auto.exploration."
            )
        for pipeline in self._pipelines.values():
            pipeline.close()
        self._pipelines.clear()
        super().close()

    def _estimate_search_length(self) -> tuple[str, int, int]:
        """Description of the plans, and the fewest and most batches that the search needs, about."""
        sizes = self._exploration
        blocks = [sizes.iterations + 2 * plan.max_stage + 2 for plan in self._hand_written]
        of_round = sum(blocks) + sizes.max_generated * max(blocks)
        plans_text = f"{len(blocks)} plans and up to {sizes.max_generated} variants"
        return plans_text, of_round * sizes.rounds, of_round * (sizes.rounds + sizes.extra_rounds)

    # ------------------------------------------------------------------ blocks of iterations

    def _start_exploration(self) -> None:
        self._choice: PlanChoice | None = None
        self._by_name: dict[str, PipelinePlan] = {}
        self._times: dict[str, list[float]] = {}
        self._seconds_of_task: dict[str, float] = {}
        self._blocks = deque([_Block(self._hand_written[0], traced=True)])
        self._begin_timing_block()

    def _begin_timing_block(self) -> None:
        block = self._blocks[0]
        self.pipeline = self._get_pipeline_of_plan(block.plan)
        self._draining = False
        self._begun = None
        self._to_skip = block.plan.pipeline_depth + 1
        self._left = self._exploration.iterations
        self._timed.clear()
        if block.traced:
            self.pipeline.start_trace()
            self._trace = self.pipeline.trace
            self._traces = [self._trace]

    def _adopt_callback_trace(self) -> None:
        """Use the trace of a callback that has started its own recording and thereby replaced this program's trace."""
        trace = self.pipeline.trace
        if trace is None:  # the callback has stopped its recording
            self.pipeline.start_trace()
            self._trace = trace = self.pipeline.trace
        if trace not in self._traces:
            self._traces.append(trace)

    def _record_iteration_time(self) -> None:
        """Record the time of the iteration that ends here, if it counts."""
        begun, self._begun = self._begun, None
        if begun is None:
            return
        if self._to_skip:
            self._to_skip -= 1
            return
        if len(self.pipeline.in_flight) < self.pipeline.plan.max_stage:
            return  # the data have ended, so the iteration fetched no batch
        self._timed.append((begun, self._clock.now()))
        if self._choice is None:
            self._left -= 1

    def _end_timing_block(self) -> None:
        block = self._blocks.popleft()
        seconds = self._typical_seconds()
        if block.traced:
            self._find_plans(seconds)
        else:
            (seconds,) = self._mean_of_ranks([seconds])
            self._times.setdefault(block.plan.name, []).append(seconds)
        if not self._blocks:
            self._blocks.extend(map(_Block, self._select_next_round_plans()))
        if self._blocks:
            self._begin_timing_block()
        else:
            self._choose()

    def _select_next_round_plans(self) -> list[PipelinePlan]:
        """Return the plans to time in the next round, rotated by one each round; an empty list ends the search."""
        done = max(map(len, self._times.values()), default=0)
        names = list(self._by_name)
        if done >= self._exploration.rounds:
            more = done < self._exploration.rounds + self._exploration.extra_rounds
            names = select_survivors(self._times, self._list_hand_written_plan_names()) if more else []
        first = done % len(names) if names else 0
        return [self._by_name[name] for name in names[first:] + names[:first]]

    def _find_plans(self, seconds: float) -> None:
        names = list(self.pipeline.plan.tasks)
        self._adopt_callback_trace()
        trace, self._trace = self._trace, None
        if self.pipeline.trace is trace:  # a callback may have started its own recording
            self.pipeline.stop_trace()
        traces, self._traces = self._traces, []
        task_times = median_task_seconds(
            span for recorded in traces if recorded is not None for span in recorded.spans()
        )
        *mean_times, seconds = self._mean_of_ranks([*(task_times.get(name, 0.0) for name in names), seconds])
        self._seconds_of_task = dict(zip(names, mean_times, strict=True))
        proposed: list[PipelinePlan] = []
        rounds = self._exploration.rounds + self._exploration.extra_rounds
        if most := min(self._exploration.max_generated, max_generated_plans(rounds)):
            beside = max(0.0, seconds - sum(mean_times))
            # Ranks on unequal machines would propose unequal plans.
            specs = run_on_rank(
                lambda: [plan.spec for plan in self._propose(self._seconds_of_task, beside)],
                "the first rank could not propose plans",
                self._group,
            )
            tasks = self.pipeline.plan.tasks.values()
            proposed = [PipelinePlan.from_spec(spec, tasks) for spec in specs[:most]]
        self._by_name = {plan.name: plan for plan in [*self._hand_written, *proposed]}

    def _list_hand_written_plan_names(self) -> list[str]:
        return [plan.name for plan in self._hand_written]

    def _choose(self) -> None:
        hand_written = self._list_hand_written_plan_names()
        winner = self._by_name[choose_measured_plan(self._times, hand_written)]
        self._choice = PlanChoice(winner, self._times, hand_written, self._seconds_of_task)
        self._blocks = deque([_Block(winner)])
        self._begin_timing_block()
        self._left = -1  # until training ends
        for name in [name for name in self._pipelines if name != winner.name]:
            self._pipelines.pop(name).close()
        self._chosen(self._choice)

    def _replan_if_slower(self) -> None:
        """Restart the search if iterations have become slower than *replan_above* allows."""
        above, choice = self._exploration.replan_above, self._choice
        if above is None or choice is None or len(self._timed) < self._exploration.iterations:
            return
        (current_seconds,) = self._mean_of_ranks([self._typical_seconds()])
        self._timed.clear()
        if current_seconds > above * interquartile_mean(choice.measured[choice.plan.name]):
            self._start_exploration()

    # ------------------------------------------------------------------ helpers

    def _get_pipeline_of_plan(self, plan: PipelinePlan) -> SWPipeline:
        pipeline = self._pipelines.get(plan.name)
        if pipeline is not None and _get_plan_schedule(pipeline.plan) != _get_plan_schedule(plan):
            self._pipelines.pop(plan.name).close()  # every search gives the same names to the plans that it finds
        if plan.name not in self._pipelines:
            self._pipelines[plan.name] = SWPipeline(plan, self._device, self._group)
        return self._pipelines[plan.name]

    def _typical_seconds(self) -> float:
        """Return the typical time of the timed iterations."""
        return interquartile_mean(self._clock.compute_elapsed_seconds(self._timed))

    def _mean_of_ranks(self, values: list[float]) -> list[float]:
        """Average over ranks, so that all ranks choose the same plan."""
        return [statistics.fmean(of_ranks) for of_ranks in zip(*all_gather_objects(values, self._group), strict=True)]


class _HostOrDeviceClock:
    """Clock for start and end of iterations. Uses the device's clock if it has one, because the host runs ahead."""

    def __init__(self, of_device: DeviceClock | None) -> None:
        self._of_device = of_device

    def now(self) -> Any:
        return time.perf_counter() if self._of_device is None else self._of_device.record_event()

    def compute_elapsed_seconds(self, marks: Collection[tuple[Any, Any]]) -> list[float]:
        """Return the seconds between the marks of each pair, after the device has reached all end marks."""
        if self._of_device is None:
            return [end - begin for begin, end in marks]
        for _, end in marks:
            end.synchronize()
        return [begin.elapsed_time(end) / 1e3 for begin, end in marks]


def _get_plan_schedule(plan: PipelinePlan) -> tuple[Any, ...]:
    return tuple(plan.schedule.items()), plan.order
