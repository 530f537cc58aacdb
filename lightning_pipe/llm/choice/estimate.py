"""Estimates the memory and the bubble of training in stages, without running the model.

Durations are unknown without a run, but numbers of floating-point operations are not. A bubble is a share of time, so
the estimate is right if all operations run at about the same speed.
"""

from __future__ import annotations

from dataclasses import dataclass, replace

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


@dataclass(frozen=True)
class Refused:
    """A schedule that cannot be used."""

    schedule: str
    reason: str


def operations_of(footprints: Pieces[Footprint]) -> Pieces[LayerWork]:
    """Floating-point operations of each piece, used instead of seconds."""
    return Pieces.of(lambda one: one.operations, footprints)


def estimate(
    candidate: ScheduleCandidate,
    pp_size: int,
    footprints: Pieces[Footprint],
    optimizer_bytes: Pieces[int],
    sharing: Sharing | None = None,
) -> SchedulePrediction:
    """Estimate the memory of each rank, and the bubble for ranks of equal speed and messages that take no time."""
    count, shared = candidate.num_microbatches, sharing or Sharing()
    work = operations_of(footprints)
    # Ranks of tensor parallelism share the products of layers, and each computes the whole head.
    layers = tuple(LayerWork(*(one / shared.tensor for one in layer)) for layer in work.layers)
    known = Measurements({count: replace(work, layers=layers)}, {count: footprints}, optimizer_bytes, sharing=shared)
    return predict(candidate, pp_size, known)


def compare(
    config: ModuleConfig,
    pp_size: int,
    num_microbatches: int,
    footprints: Pieces[Footprint],
    optimizer_bytes: Pieces[int],
    sharing: Sharing | None = None,
) -> list[SchedulePrediction | Refused]:
    """Estimate all of PyTorch's schedules, each with its default number of stages and layers split evenly."""
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
