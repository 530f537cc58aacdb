"""Actions of a schedule, and their simulated timeline for given durations, without running them.

Without times for messages and overhead, the timeline is a lower bound: the difference to a real step is the cost of
these two. It is not the simulator of ``engine/planning``: the ranks share no resource and run a fixed list of actions
once, so one pass over the actions is enough, without a clock or a steady state.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from itertools import accumulate
from typing import Literal

from torch.distributed.pipelining.schedules import Schedule1F1B

from lightning_pipe._compat.pipelining import Action, ComputationType
from lightning_pipe.engine.common.errors import SetupError
from lightning_pipe.engine.observe.timeline import Bar, microbatch_bar
from lightning_pipe.llm.schedules.specs import ScheduleSpec, list_actions

Kind = Literal["forward", "backward", "input_backward", "weight_backward"]
Actions = Mapping[int, Sequence[Action]]

KINDS: dict[ComputationType, Kind] = {
    ComputationType.FORWARD: "forward",
    ComputationType.FULL_BACKWARD: "backward",
    ComputationType.BACKWARD_INPUT: "input_backward",
    ComputationType.BACKWARD_WEIGHT: "weight_backward",
}


def list_compute_actions(
    spec: ScheduleSpec, pp_size: int, num_microbatches: int, stages_per_rank: int | None = None
) -> dict[int, list[Action]]:
    """Forwards and backwards of each rank, in order. It needs no process group."""
    listed = list_actions(spec, pp_size, num_microbatches, stages_per_rank)
    computed = {rank: [action for action in actions if action.is_compute_op] for rank, actions in listed.items()}
    if issubclass(spec.schedule_class, Schedule1F1B):
        # Every rank runs micro-batches from 0; torch 2.13 lists 1 to m for the last rank.
        computed = {rank: _renumber_forwards(actions) for rank, actions in computed.items()}
    return computed


def _renumber_forwards(actions: Sequence[Action]) -> list[Action]:
    """The same actions of one stage, with forwards numbered in order."""
    count = iter(range(len(actions)))
    forward = ComputationType.FORWARD
    return [a._replace(microbatch_index=next(count)) if a.computation_type is forward else a for a in actions]


@dataclass(frozen=True)
class ScheduleTimeline:
    """Simulated timeline of all ranks, starting at 0."""

    spans: Mapping[int, Sequence[Bar]]

    @property
    def makespan(self) -> float:
        """Time from 0 to the end of the last action of any rank."""
        return max((spans[-1].end for spans in self.spans.values() if spans), default=0.0)

    def busy(self, rank: int) -> float:
        """Time in which a rank computes."""
        return sum(span.end - span.start for span in self.spans[rank])

    def idle(self, rank: int) -> float:
        """Time in which a rank does not compute, until the last rank finishes."""
        return self.makespan - self.busy(rank)

    @property
    def bubble_fraction(self) -> float:
        """Idle share of all ranks' time: (P - 1) / (m + P - 1) for GPipe and 1F1B with even stages."""
        total = len(self.spans) * self.makespan
        return sum(self.idle(rank) for rank in self.spans) / total if total else 0.0

    def peak_live_microbatches(self, rank: int) -> int:
        """Maximum number of micro-batches whose activations a rank holds: m for GPipe, P - rank for 1F1B.

        A micro-batch counts once for each stage of the rank, from the start of its forward to the end of the backward
        that computes the gradients of its weights.
        """
        steps = {"forward": 1, "input_backward": 0}
        return max(accumulate(steps.get(span.kind, -1) for span in self.spans[rank]), default=0)


def simulate_schedule(
    actions: Actions,
    durations: Mapping[tuple[int, Kind], float],
    messages: Mapping[tuple[int, int], float] | None = None,
    overhead: float = 0.0,
) -> ScheduleTimeline:
    """Simulate actions that start as early as possible, in the order of each rank."""
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
                arrived = _get_dependency_end_times(action.stage_index, kind, microbatch, num_stages, ends)
                if arrived is None:
                    break
                ready = max(
                    (end + on_its_way.get((rank_of[source], rank), 0.0) for source, end in arrived), default=0.0
                )
                start = max(ready, (spans[rank][-1].end if spans[rank] else 0.0) + overhead)
                end = start + durations[action.stage_index, kind]
                spans[rank].append(microbatch_bar(action.stage_index, kind, microbatch, start, end, rank))
                ends[action.stage_index, kind, microbatch] = end
                left -= 1
        if left == before:
            stuck = {rank: str(row[len(spans[rank])]) for rank, row in actions.items() if len(spans[rank]) < len(row)}
            raise SetupError(
                "the schedule deadlocks: "
                + ", ".join(f"rank {rank} waits with {action}" for rank, action in stuck.items())
                + ". Each action depends on a later action of a neighbor. Reorder the actions"
            )
    return ScheduleTimeline(spans)


def _get_dependency_end_times(
    stage: int, kind: Kind, microbatch: int, num_stages: int, ends: Mapping[tuple[int, Kind, int], float]
) -> list[tuple[int, float]] | None:
    """Stage and end of each dependency of an action; None while a dependency is not done."""
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
    arrived = [
        (source, ends[source, needed_kind, microbatch])
        for source, kinds in needs
        for needed_kind in kinds
        if (source, needed_kind, microbatch) in ends
    ]
    return arrived if len(arrived) == len(needs) else None
