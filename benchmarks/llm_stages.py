"""A transformer in stages without a Trainer, for the other benchmarks."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn

from benchmarks.llm_step_time import VOCABULARY, Decoder
from lightning_pipe.llm.losses.cross_entropy import summed_cross_entropy
from lightning_pipe.llm.model.derived_config import derive_pp_module_config
from lightning_pipe.llm.model.meta_tensors import fake_copy
from lightning_pipe.llm.model.shapes import StageShapes
from lightning_pipe.llm.model.stage_module import copy_model_sharing_tensors, make_stage_module
from lightning_pipe.llm.run.schedule_runner import ScheduleRunner, StageInputs
from lightning_pipe.llm.schedules.specs import count_stages_per_rank, resolve_schedule_spec, stages_of_rank
from lightning_pipe.llm.split.stage_fqns import split_by_layer_counts


def make_runner(name: str, width: int, layers: int) -> tuple[ScheduleRunner, dict[int, nn.Module]]:
    """This rank's part of a pipeline over all ranks with an equal number of layers per stage, and its stages."""
    spec, ranks = resolve_schedule_spec(name), dist.get_world_size()
    count = ranks * count_stages_per_rank(spec, ranks)
    torch.manual_seed(1)
    model = Decoder(width, layers)
    config = derive_pp_module_config(model)
    names = split_by_layer_counts(config, [layers // count] * count)
    fake, mode = fake_copy(model)
    shapes = StageShapes(
        [
            make_stage_module(copy_model_sharing_tensors(fake), config, stage_names, index, count)
            for index, stage_names in enumerate(names)
        ],
        mode,
    )
    stages: dict[int, nn.Module] = {
        index: make_stage_module(copy_model_sharing_tensors(model), config, names[index], index, count)
        for index in stages_of_rank(spec, dist.get_rank(), ranks)
    }
    group = dist.group.WORLD
    assert group is not None
    return ScheduleRunner(stages, count, spec, group, torch.device("cpu"), shapes), stages


def make_micro_batches(count: int, rows: int, length: int) -> list[StageInputs]:
    """Random micro-batches, the same on every rank."""
    tokens = torch.randint(VOCABULARY, (count, rows, length + 1), generator=torch.Generator().manual_seed(0))
    return [
        StageInputs((micro_batch[:, :-1].contiguous(),), {}, {"labels": micro_batch[:, 1:].contiguous()})
        for micro_batch in tokens
    ]


def loss_of(output: Tensor, target: Mapping[str, Any]) -> Tensor:
    """Cross-entropy summed over tokens."""
    return summed_cross_entropy(output, target["labels"])
