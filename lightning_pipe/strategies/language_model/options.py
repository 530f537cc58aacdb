"""What a strategy for language models is asked for, checked and given a number of ranks."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, fields, is_dataclass
from typing import Any

from lightning_pipe.engine import SetupError
from lightning_pipe.engine.common.options import check_choice, check_whole_number
from lightning_pipe.llm.batches.batching import Batching
from lightning_pipe.llm.model.activation_checkpoint import ActivationCheckpoint
from lightning_pipe.llm.parallel.apply_parallel import StageParallelism
from lightning_pipe.llm.parallel.dimensions import ParallelDims
from lightning_pipe.llm.schedules.checks import check_combination
from lightning_pipe.llm.schedules.named import ScheduleSpec, count_stages
from lightning_pipe.llm.split.options import SplitOptions
from lightning_pipe.strategies.language_model.stage_parts import StagePlan, StageSettings

__all__ = ["LLMOptions", "option_pairs"]


@dataclass(frozen=True)
class LLMOptions:
    """Arguments of ``LLMPipelineStrategy`` of the same names, checked.

    Raises:
        SetupError: a value of the wrong kind, or groups that exclude each other.
    """

    schedule: ScheduleSpec
    num_microbatches: int | None
    stages_per_rank: int | None
    parallel: ParallelDims
    split: SplitOptions
    batching: Batching
    activation_checkpoint: ActivationCheckpoint | None
    compile_layers: bool | Mapping[str, Any]
    offload_optimizer: bool

    def __post_init__(self) -> None:
        check_whole_number("num_microbatches", self.num_microbatches, 1, optional=True)
        check_whole_number("stages_per_rank", self.stages_per_rank, 1, optional=True)
        check_choice("offload_optimizer", self.offload_optimizer, (True, False))
        if not isinstance(self.compile_layers, bool | Mapping):
            raise SetupError(
                f"compile_layers is {self.compile_layers!r}; expected true, false, or options of torch.compile"
            )
        self.batching.length_multiple(self.parallel.length_multiple)

    @property
    def compile_options(self) -> Mapping[str, Any] | None:
        """Options of ``torch.compile`` for each layer; None not to compile."""
        if isinstance(self.compile_layers, bool):
            return {} if self.compile_layers else None
        return self.compile_layers

    def settings(self, plan: StagePlan, sizes: ParallelDims) -> StageSettings:
        """The settings that all modules of a trainer are run with."""
        parallelism = StageParallelism(None, self.activation_checkpoint, self.compile_options)
        return StageSettings(plan, sizes, parallelism, self.batching, self.offload_optimizer)

    def plan(self, sizes: ParallelDims) -> StagePlan:
        """How models are cut and scheduled, as far as that is known without one.

        Raises:
            SetupError: the schedule does not take so many stages a rank.
        """
        per_rank = count_stages(self.schedule, sizes.pp, self.stages_per_rank)
        return StagePlan(self.schedule, sizes.pp, per_rank, self.num_microbatches or 2 * sizes.pp, self.split)

    def check_schedule(self, spec: ScheduleSpec, sizes: ParallelDims) -> None:
        """Refuse a schedule that would train on wrong gradients with these options.

        Raises:
            SetupError: with what to use in its place.
        """
        check_combination(
            spec,
            sharding="fsdp" if sizes.dp_shard > 1 else "replicate" if sizes.dp_replicate * sizes.cp > 1 else None,
            reshard_after_forward=sizes.reshard_after_forward,
            compiled=self.compile_options is not None,
        )


def option_pairs(name: str, value: Any) -> list[tuple[str, str]]:
    """Names and texts of an option and, of a group, its fields: for ranks to compare."""
    if isinstance(value, ScheduleSpec):
        return [(name, repr(value.name))]
    if not is_dataclass(value):
        return [(name, getattr(value, "__qualname__", repr(value)))]
    return [
        pair
        for field in fields(value)
        for pair in option_pairs(f"{name}.{field.name}" if name else field.name, getattr(value, field.name))
    ]
