"""Cost of each layer of a model, in seconds or bytes, by which ``split_by_cost`` distributes layers over stages.

Each piece gets one number, computed from the results of ``layer_profile``. The cost of a stage without modules, such as
building a mask, is subtracted.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping
from typing import Any, Literal

import torch.distributed as dist
from torch import nn

from lightning_pipe.engine.ranks.object_collectives import run_on_rank
from lightning_pipe.llm.measure.layer_bench import LossOf, ModelPieceResults
from lightning_pipe.llm.measure.layer_profile import Footprint, LayerWork, measure_footprints, measure_layer_times
from lightning_pipe.llm.model.module_config import PPModuleConfig

CostUnit = Literal["time", "memory"]


def compute_time_costs(work: ModelPieceResults[LayerWork]) -> ModelPieceResults[float]:
    """Time of forward and backward of each piece."""
    return _subtract_empty_stage_cost(ModelPieceResults.map(lambda piece: piece.forward + piece.backward, work))


def compute_memory_costs(
    footprints: ModelPieceResults[Footprint], states: ModelPieceResults[int], live_microbatches: int
) -> ModelPieceResults[float]:
    """Memory of each piece: parameters, gradients, buffers, optimizer states, and activations kept for backward.

    A piece's output counts for the piece itself, not for the next one.
    """

    def sum_piece_bytes(footprint: Footprint, state_bytes: int) -> float:
        return (
            footprint.parameters
            + footprint.gradients
            + footprint.buffers
            + state_bytes
            + live_microbatches * footprint.after_forward
        )

    return _subtract_empty_stage_cost(ModelPieceResults.map(sum_piece_bytes, footprints, states))


def _subtract_empty_stage_cost(costs: ModelPieceResults[float]) -> ModelPieceResults[float]:
    return ModelPieceResults.map(lambda cost: max(cost - costs.empty, 0.0), costs)


def measure_layer_costs(
    model: nn.Module,
    config: PPModuleConfig,
    args: tuple[Any, ...],
    kwargs: Mapping[str, Any],
    loss_of: LossOf,
    *,
    unit: CostUnit = "time",
    microbatches: int = 1,
    optimizer_states: int = 2,
    group: dist.ProcessGroup | None = None,
    clock: Callable[[], float] = time.perf_counter,
) -> ModelPieceResults[float]:
    """Measure the cost of the input modules, of each layer and of the output modules, with one micro-batch."""

    def measure_on_this_rank() -> ModelPieceResults[float]:
        if unit == "time":
            return compute_time_costs(
                measure_layer_times(model, config, args, kwargs, loss_of, parts=False, clock=clock)
            )
        footprints = measure_footprints(model, config, args, kwargs, loss_of)
        states = ModelPieceResults.map(lambda footprint: optimizer_states * footprint.gradients, footprints)
        return compute_memory_costs(footprints, states, microbatches)

    failed = "the first rank could not measure what layers cost"
    return measure_on_this_rank() if group is None else run_on_rank(measure_on_this_rank, failed, group)
