"""Cuts a module's model into stages, each rank keeping its own, and puts what it keeps in the model's place."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh

from lightning_pipe.engine import SetupError
from lightning_pipe.llm.data_parallel import parallelise_stage
from lightning_pipe.llm.deferred import DeferredInit, fake_copy
from lightning_pipe.llm.shapes import StageShapes
from lightning_pipe.llm.split import ModuleConfig, derive_config, split_at, split_evenly
from lightning_pipe.llm.stage_module import (
    StageModule,
    is_causal_lm,
    make_stage,
    prune,
    run_empty,
    shallow_copy,
    tied_parameters,
)
from lightning_pipe.llm.tied import TiedParameter, find_tied, name_copies

__all__ = ["SplitModel", "split_model"]


@dataclass(frozen=True)
class SplitModel:
    """A rank's part of a model.

    Attributes:
        kept: the model with this rank's modules alone, under their names in the whole one; in the others' place are
            modules without parameters.
        stages: what the pipeline runs, by stage, made of the same modules.
        names: the parameters of the whole model, in its order.
        shapes: of what stages exchange.
        tied: parameters that several stages hold, on whatever ranks.
    """

    kept: nn.Module
    stages: Mapping[int, StageModule]
    names: tuple[str, ...]
    shapes: StageShapes
    tied: tuple[TiedParameter, ...] = ()


def split_model(
    model: nn.Module,
    record: DeferredInit | None,
    *,
    config: ModuleConfig | None,
    num_stages: int,
    mine: Sequence[int],
    layers_per_stage: Sequence[int] | None,
    weights: tuple[int, int],
    device: torch.device,
    data_mesh: DeviceMesh | None = None,
    reshard_after_forward: bool = False,
    sum_tied: bool = True,
) -> SplitModel:
    """Split *model*; it is used up.

    Args:
        model: the whole one; real, or made under ``deferred_init``.
        record: of the latter.
        config: what it is made of; found out where None.
        num_stages: of all ranks.
        mine: this rank's stages.
        layers_per_stage: how many layers each stage has; None for an even split.
        weights: how many layers the modules before and after the layers count for, in an even split.
        device: where the rank's part goes.
        data_mesh: of the ranks that hold the same stages for other data; None for this one alone.
        reshard_after_forward: whether these let gathered parameters go after each forward.
        sum_tied: whether stages may hold copies of one parameter.

    Raises:
        SetupError: the model cannot be split so.
    """
    if config is None:
        config = derive_config(model)
    config.check(model)
    fqns = (
        split_evenly(config, num_stages, *weights)
        if layers_per_stage is None
        else split_at(config, list(layers_per_stage))
    )
    if len(fqns) != num_stages:
        raise SetupError(
            f"layers_per_stage says {len(fqns)} stages; the schedule has {num_stages}: give one number each"
        )
    tied = tuple(find_tied(tied_parameters(model), fqns))
    _check_tied(tied, mine, data_mesh, sum_tied)
    fake, mode = fake_copy(model)

    def check(hidden: Tensor, keywords: Mapping[str, Any]) -> None:
        # A causal LM's hidden states are known without a batch: it is checked where it is cut.
        if not is_causal_lm(fake):
            run_empty(fake, config, hidden, **keywords)

    shapes = StageShapes(
        [make_stage(shallow_copy(fake), config, names, index, num_stages).eval() for index, names in enumerate(fqns)],
        mode,
        check,
    )
    names = tuple(name for name, _ in model.named_parameters())
    kept = [name for index in mine for name in fqns[index]]
    if record is None:
        _share_first_rank_s_values(model)
    else:
        prefixes = tuple(f"{name}." for name in [*kept, *config.always_keep_fqns])
        record.materialise(model, keep=lambda name: name.startswith(prefixes), device=device)
    stages = {
        index: make_stage(shallow_copy(model), config, fqns[index], index, num_stages).to(device)
        for index in sorted(mine)
    }
    for stage in stages.values():
        name_copies(stage.module, tied)
        if data_mesh is not None:
            parallelise_stage(stage, config, data_mesh, reshard_after_forward=reshard_after_forward)
    if len(stages) == 1:
        (part,) = (stage.module for stage in stages.values())
    else:
        part = shallow_copy(model)
        prune(part, config, kept)
        part.to(device)
        for index, stage in stages.items():
            for name in fqns[index]:
                part.set_submodule(name, stage.module.get_submodule(name))
        for one in tied:
            # Where a stage keeps its copy under the first name, unless another has the module itself.
            holder = one.names[0].rpartition(".")[0]
            for stage in stages.values() if not one.names[0].startswith(tuple(f"{name}." for name in kept)) else ():
                if one.names[0] in dict(stage.module.named_parameters()):
                    part.set_submodule(holder, stage.module.get_submodule(holder))
    return SplitModel(part, stages, names, shapes, tied)


def _check_tied(
    tied: Sequence[TiedParameter], mine: Sequence[int], data_mesh: DeviceMesh | None, sum_tied: bool
) -> None:
    for one in tied:
        if not sum_tied:
            raise SetupError(
                f"the parameters {' and '.join(one.names)} are one and the same, and go to stages"
                f" {' and '.join(map(str, one.stages))}. Give each its own (in a Hugging Face config:"
                " tie_word_embeddings=False), or set tied_embeddings to 'sum'"
            )


def _share_first_rank_s_values(model: nn.Module) -> None:
    """Every rank has made the whole model, and may have drawn other numbers."""
    for tensor in [*model.parameters(), *model.buffers()]:
        dist.broadcast(tensor.detach(), src=0)
