"""What a strategy's configuration needs on each rank, from a module whose model is never made."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from lightning.pytorch.plugins import DoublePrecision, HalfPrecision, MixedPrecision, Precision

from lightning_pipe.engine import SetupError
from lightning_pipe.llm.choice.estimate import Refused, compare, estimate, operations_of
from lightning_pipe.llm.choice.schedule_choice import (
    ScheduleCandidate,
    SchedulePrediction,
    layer_counts,
)
from lightning_pipe.llm.measure.layer_bench import Pieces
from lightning_pipe.llm.measure.layer_costs import CostUnit, memory_costs, time_costs
from lightning_pipe.llm.model.deferred import deferred_init
from lightning_pipe.llm.schedules.checks import check_microbatches
from lightning_pipe.llm.split.by_name import split_by_options
from lightning_pipe.strategies.language_model.pipeline_module import PipelineModule
from lightning_pipe.strategies.language_model.stage_choice import (
    footprints_of,
    layers_of,
    microbatches_of,
    optimizer_states,
    sharing_of,
)
from lightning_pipe.strategies.language_model.strategy import LLMPipelineStrategy

__all__ = ["StageEstimate", "estimate_stages", "precision_plugin"]


@dataclass(frozen=True)
class StageEstimate:
    """What a configuration comes to.

    Attributes:
        configured: of the strategy as it is.
        others: of all schedules, where they were asked for.
        rows: of a micro-batch.
        length: of its sequences.
        notes: what else there is to say.
    """

    configured: SchedulePrediction
    others: tuple[SchedulePrediction | Refused, ...]
    rows: int
    length: int
    notes: tuple[str, ...]


def precision_plugin(given: Any) -> Precision:
    """Lightning's plugin for the trainer's ``precision``.

    Raises:
        SetupError: one that is not known here.
    """
    name = {"None": "32-true", "32": "32-true", "64": "64-true"}.get(str(given), str(given))
    if name in ("16-mixed", "bf16-mixed"):
        return MixedPrecision(name, "cpu")  # type: ignore[arg-type]
    if name == "bf16-true":
        return HalfPrecision("bf16-true")
    known = {"32-true": Precision, "64-true": DoublePrecision}
    if name not in known:
        raise SetupError(
            f"the trainer's precision is {given!r}, of which there is no estimate; needed is '32-true', 'bf16-mixed',"
            " '16-mixed' or 'bf16-true'"
        )
    return known[name]()


def estimate_stages(
    strategy: LLMPipelineStrategy,
    module: PipelineModule,
    batch: Any,
    world_size: int,
    precision: Precision,
    *,
    all_schedules: bool = False,
) -> StageEstimate:
    """What each rank will need, and the bubble to expect. Nothing is trained, and no process started.

    Args:
        strategy: not set up.
        module: whose model is not built yet; it is built without memory.
        batch: of training, on any device; its values do not matter.
        world_size: devices times nodes.
        precision: of the trainer.
        all_schedules: whether to compare with all of PyTorch's.

    Raises:
        SetupError: what the strategy would refuse; a model that is traced.
    """
    settings = strategy.settings(world_size)
    plan, sharing = settings.plan, sharing_of(settings)
    check_microbatches(plan.spec, plan.num_microbatches, plan.pipeline_size, plan.stages_per_rank)
    if module.model is None:
        with precision.module_init_context(), deferred_init():
            module.configure_model()
    if plan.split.traces:
        raise SetupError(
            "split.split_spec or split.split_policy is given, so the model is traced; needed for an estimate is one"
            " that is cut by its layers: leave them out"
        )
    config = layers_of(module)
    item = microbatches_of(module, batch, plan.num_microbatches, settings)[0]
    footprints = footprints_of(module, config, item, settings, precision)
    states, notes = optimizer_states(module, config, settings.offload)

    def costs(unit: CostUnit) -> Pieces[float]:
        """As the strategy will split, with operations in the place of seconds."""
        if unit == "memory":
            return memory_costs(footprints, states, plan.num_microbatches)
        return time_costs(operations_of(footprints))

    layers = layer_counts(config, split_by_options(config, plan.num_stages, plan.split, costs))
    candidate = ScheduleCandidate(plan.spec, plan.stages_per_rank, plan.num_microbatches, layers)
    size = plan.pipeline_size
    if settings.sizes.ep > 1:
        notes.append("experts that ranks share are counted as if each rank had all of them")
    others = compare(config, size, plan.num_microbatches, footprints, states, sharing) if all_schedules else []
    rows, length = next(iter(item.values())).shape[:2]
    return StageEstimate(
        estimate(candidate, size, footprints, states, sharing), tuple(others), rows, length, tuple(notes)
    )
