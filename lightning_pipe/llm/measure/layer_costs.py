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
from lightning_pipe.llm.measure.layer_bench import LossOf, PieceResults
from lightning_pipe.llm.measure.layer_profile import Footprint, LayerWork, measure_footprints, measure_layer_times
from lightning_pipe.llm.model.module_config import ModuleConfig

CostUnit = Literal["time", "memory"]


def time_costs(work: PieceResults[LayerWork]) -> PieceResults[float]:
    """Time of forward and backward of each piece."""
    return _beyond_empty(PieceResults.map(lambda piece: piece.forward + piece.backward, work))


def memory_costs(
    footprints: PieceResults[Footprint], states: PieceResults[int], live_microbatches: int
) -> PieceResults[float]:
    """Memory of each piece: parameters, gradients, buffers, optimizer states, and activations kept for backward.

    A piece's output counts for the piece itself, not for the next one.
    """

    def cost(footprint: Footprint, state_bytes: int) -> float:
        return (
            footprint.parameters
            + footprint.gradients
            + footprint.buffers
            + state_bytes
            + live_microbatches * footprint.after_forward
        )

    return _beyond_empty(PieceResults.map(cost, footprints, states))


def _beyond_empty(costs: PieceResults[float]) -> PieceResults[float]:
    return PieceResults.map(lambda cost: max(cost - costs.empty, 0.0), costs)


def measure_costs(
    model: nn.Module,
    config: ModuleConfig,
    args: tuple[Any, ...],
    kwargs: Mapping[str, Any],
    loss_of: LossOf,
    *,
    unit: CostUnit = "time",
    microbatches: int = 1,
    optimizer_states: int = 2,
    group: dist.ProcessGroup | None = None,
    clock: Callable[[], float] = time.perf_counter,
) -> PieceResults[float]:
    """Measure the cost of the input modules, of each layer and of the output modules, with one micro-batch."""

    def measured() -> PieceResults[float]:
        if unit == "time":
            return time_costs(measure_layer_times(model, config, args, kwargs, loss_of, parts=False, clock=clock))
        footprints = measure_footprints(model, config, args, kwargs, loss_of)
        states = PieceResults.map(lambda footprint: optimizer_states * footprint.gradients, footprints)
        return memory_costs(footprints, states, microbatches)

    failed = "the first rank could not measure what layers cost"
    return measured() if group is None else run_on_rank(measured, failed, group)
