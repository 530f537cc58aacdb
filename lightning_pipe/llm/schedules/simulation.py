"""What a schedule does when, without running it: its actions, and their timeline if each took as long as is said.

Where communication and overhead are not said a timeline is a bound: what is lost against it are those two. It is not
the simulator of ``engine/planning``: ranks that share no resource and do a fixed list of actions once need no clock and
no steady state, but one pass over the actions.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from itertools import accumulate
from typing import Literal

from torch.distributed.pipelining.schedules import (
    PipelineScheduleMulti,
    Schedule1F1B,
    _Action,
    _ComputationType,
    _PipelineSchedule,
)

from lightning_pipe.engine.common.errors import SetupError
from lightning_pipe.engine.observe.timeline import Bar, microbatch_bar
from lightning_pipe.llm.schedules.named import (
    ScheduleSpec,
    construct_schedule,
    count_stages,
    read_actions,
    stages_of_rank,
)

__all__ = ["KINDS", "Actions", "Kind", "ScheduleTimeline", "actions_of", "simulate"]

Kind = Literal["forward", "backward", "input_backward", "weight_backward"]
Actions = Mapping[int, Sequence[_Action]]

KINDS: dict[_ComputationType, Kind] = {
    _ComputationType.FORWARD: "forward",
    _ComputationType.FULL_BACKWARD: "backward",
    _ComputationType.BACKWARD_INPUT: "input_backward",
    _ComputationType.BACKWARD_WEIGHT: "weight_backward",
}


class _StandIn:
    """As much of a stage as a schedule's constructor looks at; a real one needs a process group."""

    def __init__(self, stage_index: int, num_stages: int, pp_size: int) -> None:
        self.stage_index = stage_index
        self.num_stages = num_stages
        self.group_rank = 0
        self.group_size = pp_size
        self.is_first = stage_index == 0
        self.is_last = stage_index == num_stages - 1
        self.has_backward = False
        self.submod = None
        self.stage_index_to_group_rank: dict[int, int] = {}


def actions_of(
    spec: ScheduleSpec, pp_size: int, num_microbatches: int, stages_per_rank: int | None = None
) -> dict[int, list[_Action]]:
    """What each rank computes, in order: forwards and backwards only. Needs no process group.

    Args:
        spec: the schedule.
        pp_size: ranks of the pipeline.
        num_microbatches: of a step.
        stages_per_rank: None for the schedule's own number.

    Returns:
        By rank; empty for a user's class of one stage a rank that does not list its actions.

    Raises:
        SetupError: the schedule cannot be constructed, or one of several stages a rank lists no actions.
    """
    num_stages = pp_size * count_stages(spec, pp_size, stages_per_rank)
    stages = [_StandIn(index, num_stages, pp_size) for index in stages_of_rank(spec, 0, pp_size, stages_per_rank)]
    schedule = construct_schedule(spec, stages, num_microbatches)
    listed = read_actions(spec.path) if spec.path is not None else _listed(spec, schedule)
    computed = {rank: list(_computations(actions)) for rank, actions in listed.items()}
    if isinstance(schedule, Schedule1F1B):
        # What runs begins with micro-batch 0 everywhere; the list of torch 2.13 says 1 to m for the last rank.
        computed = {rank: _count_forwards(actions) for rank, actions in computed.items()}
    return computed


def _listed(spec: ScheduleSpec, schedule: _PipelineSchedule) -> Mapping[int, Sequence[_Action | None]]:
    listed: Mapping[int, Sequence[_Action | None]] = getattr(schedule, "pipeline_order", None) or {}
    if not listed and isinstance(schedule, PipelineScheduleMulti):
        raise SetupError(
            f"schedule {spec.name} lists no actions, and would do nothing; set pipeline_order in its constructor"
        )
    return listed


def _computations(actions: Iterable[_Action | None]) -> Iterable[_Action]:
    for action in actions:
        if action is not None and action.is_compute_op:
            yield from action.sub_actions or (action,)


def _count_forwards(actions: Sequence[_Action]) -> list[_Action]:
    """The same with forwards numbered in their order; they are of one stage."""
    count = iter(range(len(actions)))
    forward = _ComputationType.FORWARD
    return [a._replace(microbatch_index=next(count)) if a.computation_type is forward else a for a in actions]


@dataclass(frozen=True)
class ScheduleTimeline:
    """When each rank does what; it begins at 0.

    Attributes:
        spans: by rank, in order; times are in the unit of the durations.
    """

    spans: Mapping[int, Sequence[Bar]]

    @property
    def makespan(self) -> float:
        """From 0 to the end of the last action of any rank."""
        return max((spans[-1].end for spans in self.spans.values() if spans), default=0.0)

    def busy(self, rank: int) -> float:
        """How long a rank computes."""
        return sum(span.end - span.start for span in self.spans[rank])

    def idle(self, rank: int) -> float:
        """How long a rank does not compute, until the last of all ranks is done."""
        return self.makespan - self.busy(rank)

    @property
    def bubble_fraction(self) -> float:
        """The share of all ranks' time that they are idle: for GPipe and 1F1B of even stages (P - 1) / (m + P - 1)."""
        total = len(self.spans) * self.makespan
        return sum(self.idle(rank) for rank in self.spans) / total if total else 0.0

    def peak_live(self, rank: int) -> int:
        """The most micro-batches whose activations a rank holds at a time: m for GPipe, P - rank for 1F1B.

        A micro-batch counts once for each stage of the rank, from the start of its forward to the end of the backward
        that computes its weights' gradients.
        """
        steps = {"forward": 1, "input_backward": 0}
        return max(accumulate(steps.get(span.kind, -1) for span in self.spans[rank]), default=0)


def simulate(
    actions: Actions,
    durations: Mapping[tuple[int, Kind], float],
    messages: Mapping[tuple[int, int], float] | None = None,
    overhead: float = 0.0,
) -> ScheduleTimeline:
    """The timeline of actions done as early as can be, each rank in its order.

    Args:
        actions: by rank, as :func:`actions_of` gives them.
        durations: of each stage's forward, backward, input_backward and weight_backward, as far as they occur, in any
            unit. A schedule that splits the backward does all of it on stage 0 in weight_backward.
        messages: from one rank to another, how long what a stage gives is on its way, in the same unit. Neither rank
            is busy with it. By default no time at all.
        overhead: how long a rank does something else before each action.

    Raises:
        SetupError: a duration is missing, or the ranks wait for each other in a circle.
    """
    rank_of = {action.stage_index: rank for rank, row in actions.items() for action in row}
    num_stages, on_its_way = 1 + max(rank_of, default=0), messages or {}
    spans: dict[int, list[Bar]] = {rank: [] for rank in actions}
    ends: dict[tuple[int, Kind, int], float] = {}
    left = sum(map(len, actions.values()))
    while left:
        before = left
        for rank, row in actions.items():
            while len(spans[rank]) < len(row):
                action = row[len(spans[rank])]
                kind, microbatch = KINDS[action.computation_type], action.microbatch_index or 0
                arrived = _arrivals(action.stage_index, kind, microbatch, num_stages, ends)
                if arrived is None:
                    break
                ready = max((end + on_its_way.get((rank_of[at], rank), 0.0) for at, end in arrived), default=0.0)
                start = max(ready, (spans[rank][-1].end if spans[rank] else 0.0) + overhead)
                end = start + _duration(durations, action.stage_index, kind)
                spans[rank].append(microbatch_bar(action.stage_index, kind, microbatch, start, end, rank))
                ends[action.stage_index, kind, microbatch] = end
                left -= 1
        if left == before:
            stuck = {rank: str(row[len(spans[rank])]) for rank, row in actions.items() if len(spans[rank]) < len(row)}
            raise SetupError(
                "the schedule cannot go on: "
                + ", ".join(f"rank {rank} waits with {action}" for rank, action in stuck.items())
                + ". Each needs what a neighbour would do later; reorder the actions"
            )
    return ScheduleTimeline(spans)


def _arrivals(
    stage: int, kind: Kind, microbatch: int, num_stages: int, ends: Mapping[tuple[int, Kind, int], float]
) -> list[tuple[int, float]] | None:
    """Of everything that an action needs, on which stage and when it was done; None while something has not been."""
    needs: list[tuple[int, tuple[Kind, ...]]] = []
    if kind == "forward":
        if stage > 0:
            needs.append((stage - 1, ("forward",)))
    elif kind == "weight_backward":
        needs.append((stage, ("input_backward",)))
    else:
        needs.append((stage, ("forward",)))
        if stage < num_stages - 1:
            needs.append((stage + 1, ("backward", "input_backward")))
    found = [(at, ends[at, one, microbatch]) for at, kinds in needs for one in kinds if (at, one, microbatch) in ends]
    return found if len(found) == len(needs) else None


def _duration(durations: Mapping[tuple[int, Kind], float], stage: int, kind: Kind) -> float:
    if (stage, kind) not in durations:
        raise SetupError(
            f"durations lack ({stage}, {kind!r}), which the schedule does; there are {', '.join(map(str, durations))}"
        )
    return durations[stage, kind]
