"""Options of the language model strategies: checks, and the settings that result for a number of ranks."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field, fields, is_dataclass
from functools import partial
from inspect import signature
from typing import Any, cast

import torch

from lightning_pipe.engine import SetupError
from lightning_pipe.engine.common.options import check_choice, check_names, check_whole_number, parse_option_group
from lightning_pipe.llm.batches.options import Batching
from lightning_pipe.llm.model.activation_checkpoint import ActivationCheckpoint
from lightning_pipe.llm.parallel.apply_parallel import StageParallelism
from lightning_pipe.llm.parallel.parallel_dims import ParallelDims
from lightning_pipe.llm.run.stage_parts import LLMPipelineSettings, StagePlan
from lightning_pipe.llm.schedules.checks import Sharding, check_schedule_sharding
from lightning_pipe.llm.schedules.specs import (
    ScheduleOptions,
    ScheduleSpec,
    count_stages_per_rank,
    resolve_schedule_spec,
)
from lightning_pipe.llm.split.options import SplitOptions

_GROUPS: dict[str, type[Any]] = {
    "parallel": ParallelDims,
    "split": SplitOptions,
    "batching": Batching,
    "activation_checkpoint": ActivationCheckpoint,
    "schedule_options": ScheduleOptions,
}


@dataclass(frozen=True)
class LLMOptions:
    """Checked arguments of ``LLMPipelineStrategy``, with the same names. Names and mappings are converted."""

    schedule: ScheduleSpec
    num_microbatches: int | None = None
    stages_per_rank: int | None = None
    parallel: ParallelDims = field(default_factory=ParallelDims)
    split: SplitOptions = field(default_factory=SplitOptions)
    batching: Batching = field(default_factory=Batching)
    activation_checkpoint: ActivationCheckpoint | None = None
    compile_layers: bool | Mapping[str, Any] = False
    offload_optimizer: bool = False
    schedule_options: ScheduleOptions = field(default_factory=ScheduleOptions)

    def __post_init__(self) -> None:
        set_field = partial(object.__setattr__, self)
        for name, kind in _GROUPS.items():
            value = getattr(self, name)
            if value is not None or name != "activation_checkpoint":
                set_field(name, parse_option_group(kind, name, value))
        set_field("schedule", resolve_schedule_spec(cast("Any", self.schedule), self.schedule_options))
        check_whole_number("num_microbatches", self.num_microbatches, 1, optional=True)
        check_whole_number("stages_per_rank", self.stages_per_rank, 1, optional=True)
        check_choice("offload_optimizer", self.offload_optimizer, (True, False))
        if not isinstance(self.compile_layers, bool | Mapping):
            raise SetupError(
                "`compile_layers` must be true, false, or a mapping of torch.compile options, got"
                f" {self.compile_layers!r}. Pass one of these."
            )
        check_names(
            "compile_layers", self.compile_options or {}, sorted(signature(torch.compile).parameters.keys() - {"model"})
        )
        self.batching.length_multiple(self.parallel.length_multiple)
        moved = [key for key in self.batching.padding_spec(0).pad_value_by_key() if self.batching.chunk_dims.get(key)]
        if moved and self.parallel.cp > 1:
            raise SetupError(
                f"batching.chunk_dims moves the rows of {', '.join(moved)}, and parallel.cp={self.parallel.cp} cuts"
                " sequences whose rows are dimension 0. Transpose them in model_inputs instead"
            )

    @property
    def compile_options(self) -> Mapping[str, Any] | None:
        """Options of ``torch.compile`` for each layer; None if layers are not compiled."""
        if isinstance(self.compile_layers, bool):
            return {} if self.compile_layers else None
        return self.compile_layers

    def build_llm_pipeline_settings(self, plan: StagePlan, sizes: ParallelDims) -> LLMPipelineSettings:
        """Settings shared by all modules of a trainer."""
        parallelism = StageParallelism(None, self.activation_checkpoint, self.compile_options)
        return LLMPipelineSettings(plan, sizes, parallelism, self.batching, self.offload_optimizer)

    def build_stage_plan(self, sizes: ParallelDims) -> StagePlan:
        """Default plan for cutting and scheduling models, which does not depend on the model."""
        per_rank = count_stages_per_rank(self.schedule, sizes.pp, self.stages_per_rank)
        return StagePlan(self.schedule, sizes.pp, per_rank, self.num_microbatches or 2 * sizes.pp, self.split)

    def check_schedule(self, spec: ScheduleSpec, sizes: ParallelDims) -> None:
        """Refuse a schedule that would train on wrong gradients with these options."""
        sharding: Sharding | None = (
            "fsdp" if sizes.dp_shard > 1 else "replicate" if sizes.dp_replicate * sizes.cp > 1 else None
        )
        check_schedule_sharding(spec, sharding, reshard_after_forward=sizes.reshard_after_forward)


def flatten_option_fields(name: str, value: Any) -> list[tuple[str, str]]:
    """Return pairs of name and text for an option, or for each field of an option group, for ranks to compare."""
    if isinstance(value, ScheduleSpec):
        return [(name, repr(value.name))]
    if not is_dataclass(value):
        return [(name, getattr(value, "__qualname__", repr(value)))]
    return [
        pair
        for field in fields(value)
        for pair in flatten_option_fields(f"{name}.{field.name}" if name else field.name, getattr(value, field.name))
    ]
