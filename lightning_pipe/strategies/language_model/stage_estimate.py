"""Estimate of a configuration's memory and bubble, from a module whose model is built without memory.

Durations are unknown without a run, but numbers of floating-point operations are not. A bubble is a share of time, so
the estimate is right if all operations run at about the same speed.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Any

from lightning.pytorch.plugins import DoublePrecision, HalfPrecision, MixedPrecision, Precision

from lightning_pipe.engine import SetupError
from lightning_pipe.llm.choice.schedule_choice import (
    Measurements,
    ScheduleCandidate,
    SchedulePrediction,
    layer_counts,
    predict_schedule,
)
from lightning_pipe.llm.measure.layer_bench import ModelPieceResults
from lightning_pipe.llm.measure.layer_costs import CostUnit, compute_memory_costs, compute_time_costs
from lightning_pipe.llm.measure.layer_profile import Footprint, LayerWork, measure_footprints
from lightning_pipe.llm.measure.rank_memory import ShardCounts
from lightning_pipe.llm.model.hf_weights import deferred_weight_loading
from lightning_pipe.llm.model.meta_tensors import parameters_on_meta
from lightning_pipe.llm.model.module_config import PPModuleConfig
from lightning_pipe.llm.schedules.checks import check_microbatches
from lightning_pipe.llm.schedules.specs import SCHEDULES, count_stages_per_rank
from lightning_pipe.llm.split.stage_fqns import assign_modules_to_stages, split_layers_evenly
from lightning_pipe.strategies.language_model.pipeline_module import PipelineModule
from lightning_pipe.strategies.language_model.stage_choice import (
    estimate_optimizer_bytes,
    get_or_derive_module_config,
    get_stage_shard_counts,
    make_padded_microbatches,
    measure_pieces,
)
from lightning_pipe.strategies.language_model.strategy import LLMPipelineStrategy


@dataclass(frozen=True)
class UnsupportedScheduleReason:
    """A schedule that cannot be used."""

    schedule: str
    reason: str


@dataclass(frozen=True)
class StageEstimate:
    """Estimate for a configuration."""

    configured: SchedulePrediction
    other_schedules: tuple[SchedulePrediction | UnsupportedScheduleReason, ...]
    rows: int
    length: int
    notes: tuple[str, ...]


def make_precision_plugin(precision: Any) -> Precision:
    """Return Lightning's plugin for the trainer's ``precision``."""
    name = {"None": "32-true", "32": "32-true", "64": "64-true"}.get(str(precision), str(precision))
    if name in ("16-mixed", "bf16-mixed"):
        return MixedPrecision(name, "cpu")  # type: ignore[arg-type]
    if name == "bf16-true":
        return HalfPrecision("bf16-true")
    plugins = {"32-true": Precision, "64-true": DoublePrecision}
    if name not in plugins:
        raise SetupError(
            f"The trainer's precision {precision!r} has no estimate. Use '32-true', '64-true', 'bf16-mixed', '16-mixed'"
            " or 'bf16-true'."
        )
    return plugins[name]()


def estimate_stages(
    strategy: LLMPipelineStrategy,
    module: PipelineModule,
    batch: Any,
    world_size: int,
    precision: Precision,
    *,
    all_schedules: bool = False,
) -> StageEstimate:
    """Return the expected memory of each rank and the expected bubble, without training and without processes."""
    settings = strategy.settings(world_size)
    plan = settings.plan
    check_microbatches(plan.spec, plan.num_microbatches, plan.pipeline_size, plan.stages_per_rank)
    if module.model is None:
        with precision.module_init_context(), parameters_on_meta(), deferred_weight_loading():
            module.configure_model()
    config, sharing = get_or_derive_module_config(module), get_stage_shard_counts(settings, module)
    item = make_padded_microbatches(module, batch, plan.num_microbatches, settings)[0]
    footprints = measure_pieces(measure_footprints, module, config, settings, precision, item)
    states, notes = estimate_optimizer_bytes(module, config, settings.offload)

    def compute_piece_costs(unit: CostUnit) -> ModelPieceResults[float]:
        """Costs for splitting as the strategy does, with numbers of operations instead of seconds."""
        if unit == "memory":
            return compute_memory_costs(footprints, states, plan.num_microbatches)
        return compute_time_costs(get_flops_per_model_piece(footprints))

    layers = layer_counts(config, assign_modules_to_stages(config, plan.num_stages, plan.split, compute_piece_costs))
    candidate = ScheduleCandidate(plan.spec, plan.stages_per_rank, plan.num_microbatches, layers)
    size = plan.pipeline_size
    if settings.sizes.ep > 1:
        notes.append("tokens are assumed to be spread evenly over the experts")
    comparison = (
        compare_schedules(config, size, plan.num_microbatches, footprints, states, sharing) if all_schedules else []
    )
    rows, length = next(iter(item.values())).shape[:2]
    return StageEstimate(
        estimate_schedule_memory_and_bubble(candidate, size, footprints, states, sharing),
        tuple(comparison),
        rows,
        length,
        tuple(notes),
    )


def get_flops_per_model_piece(footprints: ModelPieceResults[Footprint]) -> ModelPieceResults[LayerWork]:
    """Floating-point operations of each piece, used instead of seconds."""
    return ModelPieceResults.map(lambda footprint: footprint.operations, footprints)


def estimate_schedule_memory_and_bubble(
    candidate: ScheduleCandidate,
    pp_size: int,
    footprints: ModelPieceResults[Footprint],
    optimizer_bytes: ModelPieceResults[int],
    sharing: ShardCounts | None = None,
) -> SchedulePrediction:
    """Estimate the memory of each rank, and the bubble for ranks of equal speed and messages that take no time."""
    count, shared = candidate.num_microbatches, sharing or ShardCounts()
    work = get_flops_per_model_piece(footprints)
    # Ranks of tensor parallelism share the products of layers, and each computes the whole head.
    layers = tuple(LayerWork(*(cost / shared.tensor for cost in layer)) for layer in work.layers)
    measurements = Measurements(
        {count: replace(work, layers=layers)}, {count: footprints}, optimizer_bytes, sharing=shared
    )
    return predict_schedule(candidate, pp_size, measurements)


def compare_schedules(
    config: PPModuleConfig,
    pp_size: int,
    num_microbatches: int,
    footprints: ModelPieceResults[Footprint],
    optimizer_bytes: ModelPieceResults[int],
    sharing: ShardCounts | None = None,
) -> list[SchedulePrediction | UnsupportedScheduleReason]:
    """Estimate all of PyTorch's schedules, each with its default number of stages and layers split evenly."""
    results: list[SchedulePrediction | UnsupportedScheduleReason] = []
    for spec in SCHEDULES.values():
        try:
            per_rank = count_stages_per_rank(spec, pp_size)
            check_microbatches(spec, num_microbatches, pp_size, per_rank)
            layers = layer_counts(config, split_layers_evenly(config, pp_size * per_rank))
        except SetupError as error:
            results.append(UnsupportedScheduleReason(spec.name, str(error)))
        else:
            candidate = ScheduleCandidate(spec, per_rank, num_microbatches, layers)
            results.append(
                estimate_schedule_memory_and_bubble(candidate, pp_size, footprints, optimizer_bytes, sharing)
            )
    return results
