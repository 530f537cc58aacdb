"""PyTorch's pipeline schedules by name, and the stages that each rank holds under them.

This module implements no schedule: it resolves a name, a class or a file of actions to a :class:`ScheduleSpec`. From
that, :mod:`~lightning_pipe.llm.schedules.checks` checks the options, :mod:`~lightning_pipe.llm.schedules.execution`
builds and runs the schedule, and :mod:`~lightning_pipe.llm.schedules.simulation` simulates it.

Sources: ``torch.distributed.pipelining.schedules`` of torch 2.14; GPipe (arXiv 1811.06965), 1F1B and interleaved 1F1B
(arXiv 2104.04473), breadth-first (arXiv 2211.05953), zero bubble and ZBV (arXiv 2401.10241), DualPipe (arXiv
2412.19437) cut in half.
"""

from __future__ import annotations

import csv
import inspect
import io
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, Literal, get_args

from torch.distributed.pipelining.schedules import (
    PipelineScheduleMulti,
    PipelineScheduleSingle,
    Schedule1F1B,
    ScheduleDualPipeV,
    ScheduleGPipe,
    ScheduleInterleaved1F1B,
    ScheduleInterleavedZeroBubble,
    ScheduleLoopedBFS,
    ScheduleZBVZeroBubble,
)

from lightning_pipe._compat.pipelining import (
    Action,
    RuntimeSchedule,
    Schedule,
    ranks_by_stage,
    set_schedule_actions,
    set_schedule_communication,
    split_overlapped_actions,
)
from lightning_pipe.engine.common.errors import SetupError
from lightning_pipe.engine.common.options import check_booleans, check_whole_number
from lightning_pipe.engine.common.safe_text import escape_unprintable
from lightning_pipe.engine.plans.user_files import read_text

Placement = Literal["single", "loop", "v"]


@dataclass(frozen=True)
class ScheduleOptions:
    """Communication of schedules with several stages on each rank, under PyTorch's names.

    Args:
        defer_pp_recv: post each receive directly before the computation that needs it, instead of as early as possible
            (default False). For platforms where a pending receive blocks other communication, such as FSDP's.
        max_active_stages: number of the stages on a rank whose parameters FSDP has gathered at a time (default 3):
            those that compute next. A larger number hides more of the gathering, and takes more memory. It makes no
            difference with fewer stages, or without FSDP.

    Raises:
        SetupError: a value has the wrong type or range.
    """

    defer_pp_recv: bool = False
    max_active_stages: int = 3

    def __post_init__(self) -> None:
        check_booleans(defer_pp_recv=self.defer_pp_recv)
        check_whole_number("schedule_options.max_active_stages", self.max_active_stages, 1)


@dataclass(frozen=True)
class ScheduleSpec:
    """A schedule that PyTorch can run."""

    name: str  # key of :data:`SCHEDULES`, the name of a user's class, or the path of a file
    schedule_class: type[Schedule]  # class that is constructed
    placement: Placement  # stages of rank r of P: "single" r; "loop" r, r + P, r + 2 P, ...; "v" r and 2 P - 1 - r
    path: Path | None = None  # path of the CSV file of actions; None (default) for a schedule that is not from a file
    options: ScheduleOptions = ScheduleOptions()


# ``llm_auto_pipeline`` chooses among all of them.
SCHEDULES: dict[str, ScheduleSpec] = {
    spec.name: spec
    for spec in (
        ScheduleSpec("gpipe", ScheduleGPipe, "single"),
        ScheduleSpec("1f1b", Schedule1F1B, "single"),
        ScheduleSpec("looped_bfs", ScheduleLoopedBFS, "loop"),
        ScheduleSpec("interleaved_1f1b", ScheduleInterleaved1F1B, "loop"),
        ScheduleSpec("interleaved_zero_bubble", ScheduleInterleavedZeroBubble, "loop"),
        ScheduleSpec("zbv_zero_bubble", ScheduleZBVZeroBubble, "v"),
        ScheduleSpec("dualpipev", ScheduleDualPipeV, "v"),
    )
}


def resolve_schedule_spec(schedule: str | type | Path, options: ScheduleOptions = ScheduleOptions()) -> ScheduleSpec:
    """Find the schedule of a name, class or file, and add its options."""
    spec = _find_schedule_spec(schedule)
    if options != ScheduleOptions() and not issubclass(spec.schedule_class, RuntimeSchedule):
        raise SetupError(
            f"schedule_options are {options}, and schedule {spec.name} does not run in PyTorch's runtime for several"
            " stages on each rank, which has these options. Remove them, or use a schedule such as interleaved_1f1b"
        )
    return replace(spec, options=options)


def _find_schedule_spec(schedule: str | type | Path) -> ScheduleSpec:
    if isinstance(schedule, type):
        return _make_schedule_spec_from_class(schedule)
    if isinstance(schedule, Path) or schedule.lower().endswith(".csv"):
        return _make_schedule_spec_from_file(Path(schedule))
    by_name = {_normalize_schedule_name(name): spec for name, spec in SCHEDULES.items()}
    spec = by_name.get(_normalize_schedule_name(schedule).removeprefix("schedule"))
    if spec is None:
        raise SetupError(
            f"schedule is {schedule!r}; expected one of {', '.join(SCHEDULES)}. Choose one of these, a class derived"
            " from PyTorch's PipelineScheduleSingle or PipelineScheduleMulti, or the path of a .csv file of actions"
        )
    return spec


def _normalize_schedule_name(name: str) -> str:
    return name.lower().replace("_", "").replace("-", "")


def _make_schedule_spec_from_class(schedule: type) -> ScheduleSpec:
    for spec in SCHEDULES.values():
        if spec.schedule_class is schedule:
            return spec
    if not issubclass(schedule, PipelineScheduleSingle | PipelineScheduleMulti) or inspect.isabstract(schedule):
        raise SetupError(
            f"schedule is the class {schedule.__qualname__}; expected one that derives from PyTorch's"
            " PipelineScheduleSingle or PipelineScheduleMulti and implements _step_microbatches. Choose such a class,"
            f" or one of the names {', '.join(SCHEDULES)}"
        )
    if issubclass(schedule, PipelineScheduleSingle):
        return ScheduleSpec(schedule.__qualname__, schedule, "single")
    specs = [ScheduleSpec(schedule.__qualname__, schedule, placement) for placement in get_args(Placement)[1:]]
    return next((spec for spec in specs if _schedule_matches_placement(spec)), specs[0])


def _schedule_matches_placement(spec: ScheduleSpec) -> bool:
    """Return True if a class lists its actions for the stages of the spec's placement."""
    try:
        actions = list_actions(spec, 2, 4, 2)  # the smallest case that all of PyTorch's schedules support
        return map_action_stages_to_ranks(actions, "it") == map_stages_to_ranks(spec.placement, 2, 4)
    except SetupError:
        return False


def _make_schedule_spec_from_file(path: Path) -> ScheduleSpec:
    subject = f"the schedule in {path}"
    ranks = map_action_stages_to_ranks(read_actions(path), subject)
    pp_size, num_stages = max(ranks.values()) + 1, len(ranks)
    placements: list[Placement] = ["single"] if num_stages == pp_size else ["loop", "v"]
    for placement in placements:
        if num_stages % pp_size == 0 and ranks == map_stages_to_ranks(placement, pp_size, num_stages):
            return ScheduleSpec(str(path), RuntimeSchedule, placement, path)
    raise make_stage_placement_error(subject, ranks, pp_size)


def make_stage_placement_error(subject: str, ranks: Mapping[int, int], pp_size: int) -> SetupError:
    """Error of a schedule that places stages in none of the supported ways."""
    return SetupError(
        f"{subject} has its stages {', '.join(f'{s} on rank {r}' for s, r in sorted(ranks.items()))};"
        f" expected, for rank r of {pp_size}, stage r; or r, r + {pp_size}, ...; or r and {2 * pp_size - 1} - r. Place"
        " the stages in one of these ways"
    )


def read_actions(path: Path) -> dict[int, list[Action]]:
    """Read the actions of each rank from a CSV file in PyTorch's format.

    Empty fields, which mean idling, are skipped.
    """
    try:
        text = read_text(path, str(path), "name a file of actions")
        rows = csv.reader(io.StringIO(text, newline=""))
        actions = {rank: [a for field in row if (a := Action.from_str(field))] for rank, row in enumerate(rows)}
    except (RuntimeError, ValueError, csv.Error) as error:
        raise SetupError(
            f"the schedule in {path} cannot be read: {escape_unprintable(str(error)[:500])}. Write one row for each"
            " rank, with actions such as 0F0 or 1B2: stage, kind of action, micro-batch"
        ) from error
    messages = [str(action) for row in actions.values() for action in row if not action.is_compute_op]
    if messages:
        raise SetupError(
            f"the schedule in {path} has {messages[0]}; expected computations only, to which PyTorch adds the"
            " communication. Remove all other actions"
        )
    idle = [rank for rank, row in actions.items() if not row]
    if idle or not actions:
        raise SetupError(
            f"the schedule in {path} has no actions for rank(s) {idle or 0}; expected actions for every rank. Add a row"
            " for each rank"
        )
    return actions


def map_action_stages_to_ranks(actions: Mapping[int, Sequence[Action]], subject: str) -> dict[int, int]:
    """Rank of each stage that is listed."""
    ranks: dict[int, int] = {}
    for rank, row in actions.items():
        for action in row:
            for sub_action in action.sub_actions or (action,):
                if ranks.setdefault(sub_action.stage_index, rank) != rank:
                    raise SetupError(
                        f"{subject} has stage {sub_action.stage_index} on ranks {ranks[sub_action.stage_index]} and"
                        f" {rank}; expected each stage on one rank. Move its actions to one row"
                    )
    return ranks


def map_stages_to_ranks(placement: Placement, pp_size: int, num_stages: int) -> dict[int, int]:
    """Rank of each stage."""
    return ranks_by_stage(pp_size, num_stages, style="v" if placement == "v" else "loop")


def count_stages_per_rank(spec: ScheduleSpec, pp_size: int, stages_per_rank: int | None = None) -> int:
    """Number of stages that each rank holds."""
    required, why = {"single": (1, "one stage"), "v": (2, "two stages"), "loop": (None, "")}[spec.placement]
    if spec.path is not None:
        ranks = map_action_stages_to_ranks(read_actions(spec.path), f"the schedule in {spec.path}")
        rows = max(ranks.values()) + 1
        if rows != pp_size:
            raise SetupError(
                f"the schedule in {spec.path} is for {rows} ranks, and the pipeline has {pp_size}. Use a file with a"
                " row for each rank"
            )
        required, why = len(ranks) // rows, f"{len(ranks) // rows} stage(s), as in the file"
    count = stages_per_rank if stages_per_rank is not None else required or 2
    if count < 1 or count != (required or count):
        raise SetupError(
            f"stages_per_rank is {count}; schedule {spec.name} needs {why or 'at least one stage'} on each rank"
        )
    return count


def stages_of_rank(spec: ScheduleSpec, rank: int, pp_size: int, stages_per_rank: int | None = None) -> tuple[int, ...]:
    """Stages that a rank holds, first to last."""
    num_stages = pp_size * count_stages_per_rank(spec, pp_size, stages_per_rank)
    return tuple(
        stage for stage, holder in map_stages_to_ranks(spec.placement, pp_size, num_stages).items() if holder == rank
    )


def instantiate_schedule(
    spec: ScheduleSpec,
    stages: Sequence[Any],
    num_microbatches: int,
    loss_fn: Callable[..., Any] | None = None,
    *,
    overlap: bool = False,
) -> Schedule:
    """Construct PyTorch's schedule object, with unscaled gradients."""
    make: Callable[..., Any] = spec.schedule_class
    stage_or_stages = stages[0] if issubclass(spec.schedule_class, PipelineScheduleSingle) else list(stages)
    try:
        schedule = make(stage_or_stages, num_microbatches, loss_fn=loss_fn, scale_grads=False)
        if spec.path is not None:
            set_schedule_actions(schedule, read_actions(spec.path))
        elif spec.schedule_class is ScheduleDualPipeV and not overlap:
            split_overlapped_actions(schedule)
        if spec.options != ScheduleOptions():
            set_schedule_communication(schedule, spec.options.defer_pp_recv, spec.options.max_active_stages)
    except Exception as error:
        raise SetupError(
            f"schedule {spec.name} cannot be built with {num_microbatches} micro-batches and {stages[0].num_stages}"
            f" stages: {type(error).__name__}: {error}"
        ) from error
    assert isinstance(schedule, Schedule)
    return schedule


class _PlaceholderStage:
    """Stub with the attributes of a stage that schedules' constructors read; a real stage needs a process group."""

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


def list_actions(
    spec: ScheduleSpec, pp_size: int, num_microbatches: int, stages_per_rank: int | None = None
) -> dict[int, list[Action]]:
    """Actions that a schedule lists for each rank, without idling and with overlapped actions one after the other."""
    num_stages = pp_size * count_stages_per_rank(spec, pp_size, stages_per_rank)
    local_stages = stages_of_rank(spec, 0, pp_size, stages_per_rank)
    stages = [_PlaceholderStage(index, num_stages, pp_size) for index in local_stages]
    schedule = instantiate_schedule(spec, stages, num_microbatches)
    listed: Mapping[int, Sequence[Action | None]] = getattr(schedule, "pipeline_order", None) or {}
    if not listed and isinstance(schedule, PipelineScheduleMulti):
        raise SetupError(
            f"schedule {spec.name} lists no actions, so it would do nothing. Set pipeline_order in its constructor"
        )
    rows = {rank: [action for action in row if action is not None] for rank, row in listed.items()}
    return {
        rank: [sub_action for action in row for sub_action in action.sub_actions or (action,)]
        for rank, row in rows.items()
    }
