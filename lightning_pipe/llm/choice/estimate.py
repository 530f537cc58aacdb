"""Whether a way to train in stages fits the memory, and what its bubble will be, without running anything.

What takes how long is not known without a run; how many floating-point operations it has is. A bubble is a share of
time, so it comes out alike where all operations are about as fast.
"""

from __future__ import annotations

from dataclasses import dataclass

from lightning_pipe.engine.common.errors import SetupError
from lightning_pipe.llm.choice.schedule_choice import (
    Measurements,
    ScheduleCandidate,
    SchedulePrediction,
    layer_counts,
    predict,
)
from lightning_pipe.llm.measure.layer_bench import Pieces
from lightning_pipe.llm.measure.layer_profile import Footprint, LayerWork
from lightning_pipe.llm.measure.rank_memory import Sharing
from lightning_pipe.llm.model.module_config import ModuleConfig
from lightning_pipe.llm.schedules.checks import check_microbatches
from lightning_pipe.llm.schedules.named import SCHEDULES, count_stages
from lightning_pipe.llm.split.by_name import split_evenly

__all__ = ["Refused", "compare", "estimate", "operations_of"]


@dataclass(frozen=True)
class Refused:
    """A schedule that cannot be used.

    Attributes:
        schedule: its name.
        reason: why not.
    """

    schedule: str
    reason: str


def operations_of(footprints: Pieces[Footprint]) -> Pieces[LayerWork]:
    """Floating-point operations of each piece, in the place of seconds."""
    return Pieces.of(lambda one: one.operations, footprints)


def estimate(
    candidate: ScheduleCandidate,
    pp_size: int,
    footprints: Pieces[Footprint],
    optimizer_bytes: Pieces[int],
    sharing: Sharing | None = None,
) -> SchedulePrediction:
    """Memory of each rank, and the bubble of ranks that do as many operations a second, with messages for nothing.

    Args:
        candidate: a way to train.
        pp_size: ranks of the pipeline.
        footprints: of one of its micro-batches.
        optimizer_bytes: states of optimisers for each piece.
        sharing: of stages, with other ranks.

    Returns:
        With ``seconds`` that are operations of a rank, those during which it waits counted as if it worked.
    """
    count = candidate.num_microbatches
    known = Measurements(
        {count: operations_of(footprints)}, {count: footprints}, optimizer_bytes, sharing=sharing or Sharing()
    )
    return predict(candidate, pp_size, known)


def compare(
    config: ModuleConfig,
    pp_size: int,
    num_microbatches: int,
    footprints: Pieces[Footprint],
    optimizer_bytes: Pieces[int],
    sharing: Sharing | None = None,
) -> list[SchedulePrediction | Refused]:
    """The same of all of PyTorch's schedules, each with its own number of stages, of as many layers as can be."""
    found: list[SchedulePrediction | Refused] = []
    for spec in SCHEDULES.values():
        try:
            per_rank = count_stages(spec, pp_size)
            check_microbatches(spec, num_microbatches, pp_size, per_rank)
            layers = layer_counts(config, split_evenly(config, pp_size * per_rank))
        except SetupError as error:
            found.append(Refused(spec.name, str(error)))
        else:
            candidate = ScheduleCandidate(spec, per_rank, num_microbatches, layers)
            found.append(estimate(candidate, pp_size, footprints, optimizer_bytes, sharing))
    return found
