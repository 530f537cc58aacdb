"""Assignment of a model's modules to pipeline stages, by fully-qualified name (FQN).

Layers keep their order and their names, so a stage's checkpoint keys are those of the unsplit model.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from itertools import accumulate, pairwise

from lightning_pipe.engine.common.errors import SetupError
from lightning_pipe.engine.common.options import check_whole_number
from lightning_pipe.engine.planning.contiguous_partition import partition_contiguously
from lightning_pipe.llm.measure.layer_bench import ModelPieceResults
from lightning_pipe.llm.measure.layer_costs import CostUnit
from lightning_pipe.llm.model.module_config import PPModuleConfig
from lightning_pipe.llm.split.options import SplitOptions


def split_layers_evenly(
    config: PPModuleConfig, num_stages: int, input_weight: int = 1, output_weight: int = 1
) -> list[list[str]]:
    """Split into stages with the same number of layers, counting input and output modules as layers.

    The ``num_layers + input_weight + output_weight`` effective layers are divided evenly over the stages, and the
    remainder goes to the first stages, one layer each. This is the rule of torchtitan's and xorl's
    ``generate_llm_fqn_per_model_part``. A weight has no effect if the model has no such modules.
    """
    _check_num_stages(config, num_stages)
    for name, weight in (("input_weight", input_weight), ("output_weight", output_weight)):
        check_whole_number(name, weight, 0)
    extra_work = [0] * num_stages
    extra_work[0] += input_weight if config.input_fqns else 0
    extra_work[-1] += output_weight if config.output_fqns else 0
    share, remainder = divmod(config.num_layers + sum(extra_work), num_stages)
    counts = [share + (stage < remainder) - extra for stage, extra in enumerate(extra_work)]
    for stage, count in enumerate(counts):
        if count < 0:
            raise SetupError(
                f"{config.num_layers} layers with input_weight={input_weight} and output_weight={output_weight} over"
                f" {num_stages} stages leave {count} layers for stage {stage}; expected 0 or more for each stage. Use"
                " fewer stages or smaller weights, or set split.layers_per_stage"
            )
    return split_by_layer_counts(config, counts)


def split_by_layer_counts(config: PPModuleConfig, layers_per_stage: Sequence[int]) -> list[list[str]]:
    """Split into stages of the given numbers of layers."""
    counts = list(layers_per_stage)
    _check_num_stages(config, len(counts))
    if not all(isinstance(count, int) and count >= 0 for count in counts) or sum(counts) != config.num_layers:
        raise SetupError(
            f"split.layers_per_stage is {counts}; expected whole numbers, 0 or more, that add up to the model's"
            f" {config.num_layers} layers"
        )
    empty = [stage for stage in range(len(counts)) if _is_stage_empty(config, stage, counts)]
    if empty:
        raise SetupError(
            f"split.layers_per_stage {counts} leaves stage {', '.join(map(str, empty))} empty; expected at least one"
            " layer on every stage. Only a first stage with input modules and a last stage with output modules may have"
            " no layer"
        )
    ends = [0, *accumulate(counts)]
    stages = [[config.get_layer_fqn(index) for index in range(first, end)] for first, end in pairwise(ends)]
    stages[0] = [*config.input_fqns, *stages[0]]
    stages[-1] = [*stages[-1], *config.output_fqns]
    return stages


def split_by_layer_ranges(config: PPModuleConfig, ranges: Sequence[Sequence[int]]) -> list[list[str]]:
    """Split into stages of the given ranges of layers."""
    pairs = [tuple(bounds) for bounds in ranges]
    ends = [0, *(bounds[-1] if bounds else 0 for bounds in pairs)]
    if pairs != list(pairwise(ends)) or ends[-1] != config.num_layers:
        raise SetupError(
            f"split.layer_ranges is {pairs}; expected pairs (first layer, one past the last layer), each starting where"
            f" the previous pair ends, from 0 to the model's {config.num_layers} layers"
        )
    return split_by_layer_counts(config, [end - first for first, end in pairwise(ends)])


def split_by_cost(
    config: PPModuleConfig,
    num_stages: int,
    layer_costs: Sequence[float],
    input_cost: float = 0.0,
    output_cost: float = 0.0,
) -> list[list[str]]:
    """Split so that the most expensive stage costs the least, since the slowest stage limits the pipeline.

    Ties go to the most even split (least sum of squared costs), then to the split with the earliest cuts.
    """
    _check_num_stages(config, num_stages)
    costs = [input_cost, *layer_costs, output_cost]
    if len(layer_costs) != config.num_layers or not all(math.isfinite(cost) and cost >= 0 for cost in costs):
        raise SetupError(
            f"layer_costs has {len(layer_costs)} numbers, and with input_cost and output_cost they range from"
            f" {min(costs)} to {max(costs)}; expected one for each of the model's {config.num_layers} layers, all"
            " finite and not negative"
        )

    def compute_stage_cost(stage: int, first: int, end: int) -> float:
        around = (input_cost if stage == 0 else 0.0) + (output_cost if stage == num_stages - 1 else 0.0)
        return math.fsum([around, *layer_costs[first:end]])

    may_be_empty = [stage for stage in range(num_stages) if not _is_stage_empty(config, stage, [0] * num_stages)]
    counts = partition_contiguously(
        config.num_layers, num_stages, compute_stage_cost, most_even=True, may_be_empty=may_be_empty
    )
    return split_by_layer_counts(config, counts)


def assign_modules_to_stages(
    config: PPModuleConfig,
    num_stages: int,
    options: SplitOptions,
    measured: Callable[[CostUnit], ModelPieceResults[float]],
) -> list[list[str]]:
    """Split according to the options."""
    if options.layers_per_stage is not None:
        stages = split_by_layer_counts(config, options.layers_per_stage)
    elif options.layer_ranges is not None:
        stages = split_by_layer_ranges(config, options.layer_ranges)
    elif options.balance == "layers":
        stages = split_layers_evenly(config, num_stages, options.input_weight, options.output_weight)
    else:
        costs = measured(options.balance)
        stages = split_by_cost(config, num_stages, costs.layers, costs.input or 0.0, costs.output)
    if len(stages) != num_stages:
        raise SetupError(
            f"split.layers_per_stage or split.layer_ranges has {len(stages)} entries, but the schedule has"
            f" {num_stages} stages. Give one entry for each stage"
        )
    return stages


def _check_num_stages(config: PPModuleConfig, num_stages: int) -> None:
    if not 1 <= num_stages <= config.num_layers:
        layers = "1 layer" if config.num_layers == 1 else f"{config.num_layers} layers"
        raise SetupError(
            f"{layers} cannot go to {num_stages} stages; expected 1 to {config.num_layers} stage(s)."
            " Lower parallel.pp or the number of stages on each rank"
        )


def _is_stage_empty(config: PPModuleConfig, stage: int, counts: Sequence[int]) -> bool:
    extra_modules = (config.input_fqns if stage == 0 else ()) + (config.output_fqns if stage == len(counts) - 1 else ())
    return counts[stage] == 0 and not extra_modules
