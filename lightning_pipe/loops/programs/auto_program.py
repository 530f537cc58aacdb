"""A program that finds its plan while it trains: every plan trains the same batches to the same values.

    plan         serial      serial    base      prefetch  auto_1    base   prefetch   ... (rounds)     the fastest one
                 traced: what tasks take; plans are found
                             each is timed in turns, with the loader, hooks and loggers of the user
                                                                     what has lost too often drops out

Between two plans what is in flight is trained first, so that batches stay in order. An iteration is timed where the
pipeline was full all through: not where an epoch has just begun or is about to end.
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
from lightning_pipe.engine.observe.trace import Trace, task_seconds
from lightning_pipe.engine.planning.plan_choice import contenders, fastest, most_found, typical
from lightning_pipe.engine.ranks.together import gather
from lightning_pipe.engine.runtime.devices import DeviceStreams
from lightning_pipe.loops.programs.program import TrainingProgram

__all__ = ["AutoProgram", "Exploration", "PlanChoice", "Proposal"]

# What tasks take, by name, and what an iteration takes beside them, in seconds; gives plans to try, best first.
Proposal = Callable[[Mapping[str, float], float], Sequence[PipelinePlan]]

_KEPT = 200  # iterations by which a slower machine is told


@dataclass(frozen=True)
class Exploration:
    """How a plan is looked for.

    Args:
        iterations: timed of each plan in each round.
        rounds: in each of which every plan has its turn.
        found: plans of the planner's to try at most, beside the hand-written ones. No more than all rounds can show to
            be faster beyond noise (:func:`~lightning_pipe.engine.planning.plan_choice.most_found`): none in fewer than
            5 rounds.
        replan_above: look again at the begin of an epoch, where an iteration of the last one took this many times what
            it took when the plan was chosen; None never to.
        extra_rounds: at most, for those plans that may yet be the fastest after :attr:`rounds`
            (:func:`~lightning_pipe.engine.planning.plan_choice.contenders`). They train as every other iteration does,
            so that nothing is lost by them but what the slower ones of them take longer.

    Raises:
        PlanError: a number is too small, or none.
    """

    iterations: int = 8
    rounds: int = 6
    found: int = 3
    replan_above: float | None = None
    extra_rounds: int = 18

    def __post_init__(self) -> None:
        for name, least in (("iterations", 1), ("rounds", 1), ("found", 0), ("extra_rounds", 0)):
            check_whole_number(f"{name} of an exploration", getattr(self, name), least, error=PlanError)
        above = self.replan_above
        if above is not None and (not isinstance(above, int | float) or isinstance(above, bool) or not above > 1):
            raise PlanError(f"replan_above is {above!r}; expected a factor above 1, or None")


@dataclass(frozen=True)
class PlanChoice:
    """What was chosen, and why.

    Args:
        plan: the fastest one.
        measured: of each plan tried, by name, seconds an iteration in each round; the mean over ranks. Those with
            fewer rounds were too slow to go on.
        hand_written: names of those that were not found by the planner.
        own: what each task takes, in seconds, when they run one after the other.
    """

    plan: PipelinePlan
    measured: Mapping[str, Sequence[float]]
    hand_written: Sequence[str]
    own: Mapping[str, float]


@dataclass(frozen=True)
class _Block:
    """Some iterations under one plan."""

    plan: PipelinePlan
    traced: bool = False


class AutoProgram(TrainingProgram):
    """Tries plans in its first iterations, and goes on with the fastest. Every rank makes the same calls.

    Args:
        plans: hand-written ones over the same tasks; the first is the serial one, which is traced.
        propose: finds others.
        device: see :class:`~lightning_pipe.engine.SWPipeline`.
        group: of all ranks; they agree on what they have measured.
        exploration: how much is tried.
        chosen: called on every rank when a plan is chosen.
        arguments: those of :class:`TrainingProgram` but for the pipeline.
    """

    def __init__(
        self,
        plans: Sequence[PipelinePlan],
        propose: Proposal,
        device: torch.device,
        group: dist.ProcessGroup | None,
        exploration: Exploration,
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
        super().__init__(self._pipeline_of(plans[0]), **arguments)
        self._source: Iterator[Any] | None = None
        self._clock = _Clock(DeviceClock(device) if DeviceStreams(device, ()).available else None)
        # Of the present block:
        self._begun: Any = None  # when the iteration at work began,
        self._to_skip = 0  # iterations whose time does not count,
        self._left = 0  # iterations to time,
        self._timed: deque[tuple[Any, Any]] = deque(maxlen=_KEPT)  # when they began and ended,
        self._trace: Trace | None = None  # what is recorded of tasks,
        self._draining = False  # and whether it is over, but for what is in flight.
        self._explore()

    def begin(self, source: Iterator[Any]) -> TrainingContext:
        self._note_time()
        if source is not self._source:
            self._source = source
            self._begin_epoch()
            self._to_skip = max(self._to_skip, 1)  # the loader's workers start
        if not self._draining and self._left == 0:
            self._draining = True
        while self._draining:
            try:
                return super().begin(iter(()))
            except StopIteration:
                self._draining = False
                self._end_block()
        if self.pipeline.plan.max_stage and not self.pipeline.in_flight:
            # Until the pipeline is full, an iteration takes less or more than any other.
            self._to_skip = self.pipeline.plan.pipeline_depth + 1
        if self._blocks and self._blocks[0].traced:
            self._follow_trace()
        timed = self._choice is None or self._exploration.replan_above is not None
        begun = self._clock.now() if timed else None
        ctx = super().begin(source)
        self._begun = begun
        return ctx

    def abandon(self) -> int:
        self._begun = None
        return super().abandon()

    def close(self) -> None:
        if self._pipelines and self._choice is None:
            rank_zero_info(
                f"Training ended before a plan was chosen, under plan {self.pipeline.plan.name!r}: {self._progress()}."
                " Iterations where an epoch begins or ends do not count. Train longer, or set fewer iterations, rounds,"
                " found or extra_rounds in the strategy's exploration."
            )
        for pipeline in self._pipelines.values():
            pipeline.close()
        self._pipelines.clear()
        super().close()

    # ------------------------------------------------------------------ blocks of iterations

    def _progress(self) -> str:
        """How far the exploration has come."""
        exploration = self._exploration
        if not self._times:
            return f"of {exploration.iterations} iterations that tell what tasks take, {len(self._timed)} were done"
        plans = len(self._by_name)
        rounds = max(map(len, self._times.values()))
        return (
            f"of {exploration.rounds} rounds of {exploration.iterations} iterations under each of {plans} plans, and up"
            f" to {exploration.extra_rounds} for those that may be the fastest, {rounds} had begun"
        )

    def _explore(self) -> None:
        self._choice: PlanChoice | None = None
        self._by_name: dict[str, PipelinePlan] = {}
        self._times: dict[str, list[float]] = {}
        self._own: dict[str, float] = {}
        self._blocks = deque([_Block(self._hand_written[0], traced=True)])
        self._begin_block()

    def _begin_block(self) -> None:
        block = self._blocks[0]
        self.pipeline = self._pipeline_of(block.plan)
        self._draining = False
        self._begun = None
        self._to_skip = block.plan.pipeline_depth + 1
        self._left = self._exploration.iterations
        self._timed.clear()
        if block.traced:
            self.pipeline.start_trace()
            self._trace = self.pipeline.trace
            self._traces = [self._trace]

    def _follow_trace(self) -> None:
        """Keep the trace of a callback that records for itself, in the place of this program's."""
        trace = self.pipeline.trace
        if trace is None:  # the callback has ended
            self.pipeline.start_trace()
            self._trace = trace = self.pipeline.trace
        if trace not in self._traces:
            self._traces.append(trace)

    def _note_time(self) -> None:
        """Of the iteration that ends here."""
        begun, self._begun = self._begun, None
        if begun is None:
            return
        if self._to_skip:
            self._to_skip -= 1
            return
        if len(self.pipeline.in_flight) < self.pipeline.plan.max_stage:
            return  # the data have ended: there was nothing to fetch
        self._timed.append((begun, self._clock.now()))
        if self._choice is None:
            self._left -= 1

    def _end_block(self) -> None:
        block = self._blocks.popleft()
        seconds = self._typical_seconds()
        if block.traced:
            self._find_plans(seconds)
        else:
            (seconds,) = self._mean_of_ranks([seconds])
            self._times.setdefault(block.plan.name, []).append(seconds)
        if not self._blocks:
            self._blocks.extend(map(_Block, self._next_round()))
        if self._blocks:
            self._begin_block()
        else:
            self._choose()

    def _next_round(self) -> list[PipelinePlan]:
        """Plans to time in it, in another order each time; none to choose."""
        done = max(map(len, self._times.values()), default=0)
        names = list(self._by_name)
        if done >= self._exploration.rounds:
            more = done < self._exploration.rounds + self._exploration.extra_rounds
            names = contenders(self._times, self._names_by_hand()) if more else []
        first = done % len(names) if names else 0
        return [self._by_name[name] for name in names[first:] + names[:first]]

    def _find_plans(self, seconds: float) -> None:
        names = list(self.pipeline.plan.tasks)
        self._follow_trace()
        trace, self._trace = self._trace, None
        if self.pipeline.trace is trace:  # not where a callback has begun to record for itself
            self.pipeline.stop_trace()
        traces, self._traces = self._traces, []
        taken = task_seconds(span for one in traces if one is not None for span in one.spans())
        *own, seconds = self._mean_of_ranks([*(taken.get(name, 0.0) for name in names), seconds])
        self._own = dict(zip(names, own, strict=True))
        found: list[PipelinePlan] = []
        rounds = self._exploration.rounds + self._exploration.extra_rounds
        if most := min(self._exploration.found, most_found(rounds)):
            proposed = self._propose(self._own, max(0.0, seconds - sum(own)))
            known = [_schedule_of(plan) for plan in self._hand_written]
            found = [plan for plan in proposed if _schedule_of(plan) not in known][:most]
        self._by_name = {plan.name: plan for plan in [*self._hand_written, *found]}

    def _names_by_hand(self) -> list[str]:
        return [plan.name for plan in self._hand_written]

    def _choose(self) -> None:
        hand_written = self._names_by_hand()
        winner = self._by_name[fastest(self._times, hand_written)]
        self._choice = PlanChoice(winner, self._times, hand_written, self._own)
        self._blocks = deque([_Block(winner)])
        self._begin_block()
        self._left = -1  # to the end
        for name in [name for name in self._pipelines if name != winner.name]:
            self._pipelines.pop(name).close()
        self._chosen(self._choice)

    def _begin_epoch(self) -> None:
        """Look for a plan again, if iterations have become slower."""
        above, choice = self._exploration.replan_above, self._choice
        if above is None or choice is None or len(self._timed) < self._exploration.iterations:
            return
        (now,) = self._mean_of_ranks([self._typical_seconds()])
        self._timed.clear()
        if now > above * typical(choice.measured[choice.plan.name]):
            self._explore()

    # ------------------------------------------------------------------ what it stands on

    def _pipeline_of(self, plan: PipelinePlan) -> SWPipeline:
        known = self._pipelines.get(plan.name)
        if known is not None and _schedule_of(known.plan) != _schedule_of(plan):
            self._pipelines.pop(plan.name).close()  # found plans have the same names each time they are looked for
        if plan.name not in self._pipelines:
            self._pipelines[plan.name] = SWPipeline(plan, self._device, self._group)
        return self._pipelines[plan.name]

    def _typical_seconds(self) -> float:
        """Of the iterations that were timed."""
        return typical(self._clock.seconds(self._timed))

    def _mean_of_ranks(self, values: list[float]) -> list[float]:
        """The same on every rank, so that all choose alike."""
        return [statistics.fmean(of_ranks) for of_ranks in zip(*gather(values, self._group), strict=True)]


class _Clock:
    """When iterations begin and end: by the device where it has a clock, since the host goes ahead of it.

    Args:
        of_device: its clock; None for the host's.
    """

    def __init__(self, of_device: DeviceClock | None) -> None:
        self._of_device = of_device

    def now(self) -> Any:
        return time.perf_counter() if self._of_device is None else self._of_device.now()

    def seconds(self, marks: Collection[tuple[Any, Any]]) -> list[float]:
        """Between the two marks of each pair, of one stream; waits until the device has come to the last one."""
        if self._of_device is None:
            return [end - begin for begin, end in marks]
        for _, end in marks:
            end.synchronize()
        return [begin.elapsed_time(end) / 1e3 for begin, end in marks]


def _schedule_of(plan: PipelinePlan) -> tuple[Any, ...]:
    return tuple(plan.schedule.items()), plan.order
