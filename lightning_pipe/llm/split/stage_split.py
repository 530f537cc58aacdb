"""Cuts a module's model into stages, each rank keeping its own, and puts what it keeps in the model's place.

A model is cut by its layers, whose forward then runs on every stage with other stages' modules passing through; or its
forward is traced, and the trace is cut::

    unsplit model, without memory ──► which stage holds what ──► this rank's values ──► stages ──► shared with others
                                 └──► shapes that stages exchange
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Protocol

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.pipelining import SplitPoint

from lightning_pipe.engine import SetupError
from lightning_pipe.engine.ranks.together import on_all_ranks
from lightning_pipe.llm.measure.layer_bench import LossOf, Pieces, stand_in
from lightning_pipe.llm.measure.layer_costs import CostUnit, measure_costs
from lightning_pipe.llm.model.deferred import DeferredInit, fake_copy
from lightning_pipe.llm.model.derived_config import derive_config
from lightning_pipe.llm.model.hf_experts import has_routers, skip_experts
from lightning_pipe.llm.model.hf_weights import PretrainedWeights, load_into
from lightning_pipe.llm.model.module_config import ModuleConfig
from lightning_pipe.llm.model.shapes import StageShapes
from lightning_pipe.llm.model.stage_module import (
    StageModule,
    is_causal_lm,
    make_stage,
    prune,
    run_empty,
    shallow_copy,
    tied_parameters,
)
from lightning_pipe.llm.model.tied import TiedParameter, find_tied, name_copies
from lightning_pipe.llm.parallel.apply_parallel import StageParallelism
from lightning_pipe.llm.parallel.attention_mode import CheckedAttention
from lightning_pipe.llm.split.by_name import split_by_options
from lightning_pipe.llm.split.options import SplitOptions
from lightning_pipe.llm.split.traced_split import TracedSplit, join_stages, split_into_equal_size, trace_split

__all__ = ["Example", "SplitModel", "split_model"]


@dataclass(frozen=True)
class Example:
    """A micro-batch to trace a model with, or to measure its layers with.

    Attributes:
        args: of the model.
        kwargs: of the model.
        loss_of: from its output, and the part of the model that gave it, a scalar loss.
        num_microbatches: of a step, whose activations a stage keeps.
    """

    args: tuple[Any, ...]
    kwargs: Mapping[str, Any]
    loss_of: LossOf
    num_microbatches: int = 1


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
        has_routers: whether any stage has a mixture of experts, on whatever rank.
    """

    kept: nn.Module
    stages: Mapping[int, StageModule]
    names: tuple[str, ...]
    shapes: StageShapes
    tied: tuple[TiedParameter, ...] = ()
    has_routers: bool = False


def split_model(
    model: nn.Module,
    record: DeferredInit | None,
    *,
    config: ModuleConfig | None,
    num_stages: int,
    mine: Sequence[int],
    options: SplitOptions,
    device: torch.device,
    parallelism: StageParallelism,
    pretrained: PretrainedWeights | None = None,
    example: Callable[[], Example] | None = None,
    stand_ins: bool = False,
) -> SplitModel:
    """Split *model*; it is used up, but for stand-ins. Every rank calls this.

    Args:
        model: the whole one; real, or made under ``deferred_init``.
        record: of the latter.
        config: what it is made of; found out where None.
        num_stages: of all ranks.
        mine: this rank's stages.
        options: where to cut.
        device: where the rank's part goes.
        parallelism: how stages are shared with other ranks, and run.
        pretrained: what a model made under ``deferred_init`` is filled with, on all ranks; None for its initial values.
        example: makes a micro-batch on the CPU; None where there is none.
        stand_ins: give this rank's stages other values, small ones, and leave the model as it is: to try a split out.

    Raises:
        SetupError: the model cannot be split so.
    """
    cut = _cut(model, config, num_stages, options, parallelism, example)
    for one in cut.tied:
        if options.tied_embeddings == "refuse":
            raise SetupError(
                f"the parameters {' and '.join(one.names)} are one and the same, and go to stages"
                f" {' and '.join(map(str, one.stages))}. Give each its own (in a Hugging Face config:"
                " tie_word_embeddings=False), or set split.tied_embeddings to 'sum'"
            )
    shapes = cut.shapes(model)
    names = tuple(name for name, _ in model.named_parameters())
    routers = has_routers(model)
    if not stand_ins:
        _fill(model, record, cut.holds(mine), device, pretrained)
    stages = {index: cut.stage(model, index) for index in sorted(mine)}

    def place() -> None:
        if stand_ins:
            stand_in(nn.ModuleList(stages.values()), device)
        for stage in stages.values():
            stage.to(device)

    # One rank's memory may be full, while others go on to collectives.
    on_all_ranks(place, f"the stages cannot be put on device {str(device)!r}", dist.group.WORLD)
    for stage in stages.values():
        cut.parallelise(stage)
    return SplitModel(cut.join(model, stages), stages, names, shapes, cut.tied, routers)


def _fill(
    model: nn.Module,
    record: DeferredInit | None,
    keep: Callable[[str], bool],
    device: torch.device,
    pretrained: PretrainedWeights | None,
) -> None:
    """Give this rank's part of the model its values, the same whichever rank holds it."""
    if record is None:
        _share_first_rank_s_values(model)
        return
    record.materialise(model, keep=keep, device=device)
    if pretrained is not None:
        failed = f"the weights in {str(pretrained.folder)!r} cannot be loaded"
        on_all_ranks(lambda: load_into(model, pretrained), failed, dist.group.WORLD)


class _Cut(Protocol):
    """Knows which stage holds what."""

    tied: tuple[TiedParameter, ...]

    def shapes(self, model: nn.Module) -> StageShapes:
        """Of what stages exchange."""

    def holds(self, mine: Sequence[int]) -> Callable[[str], bool]:
        """Whether one of these stages needs the parameter or buffer of this name."""

    def stage(self, model: nn.Module, index: int) -> StageModule:
        """One of them, over the model's values."""

    def parallelise(self, stage: StageModule) -> None:
        """Share it with other ranks."""

    def join(self, model: nn.Module, stages: Mapping[int, StageModule]) -> nn.Module:
        """Stages as one module, under the names of the model."""


def _cut(
    model: nn.Module,
    config: ModuleConfig | None,
    num_stages: int,
    options: SplitOptions,
    parallelism: StageParallelism,
    example: Callable[[], Example] | None,
) -> _Cut:
    if config is None and not options.traces:
        try:
            config = derive_config(model)
        except SetupError:
            if example is None:
                raise
    if config is None or options.traces:
        if example is None:
            raise SetupError(
                "split.split_spec or split.split_policy is given, so the model is traced, which needs a batch to trace"
                " it with; needed is example_micro_batch() of the module"
            )
        return _TracedCut(model, num_stages, options, parallelism, example())
    return _LayerCut(model, config, num_stages, options, parallelism, example)


class _LayerCut:
    """By layers."""

    def __init__(
        self,
        model: nn.Module,
        config: ModuleConfig,
        num_stages: int,
        options: SplitOptions,
        parallelism: StageParallelism,
        example: Callable[[], Example] | None,
    ) -> None:
        config.check(model)
        self._config = config
        self._num_stages = num_stages
        self._parallelism = parallelism
        self._fqns = split_by_options(config, num_stages, options, lambda unit: _measured(model, config, unit, example))
        self._plan = parallelism.check(model, config)
        self.tied = tuple(find_tied(tied_parameters(model), self._fqns))

    def shapes(self, model: nn.Module) -> StageShapes:
        fake, mode = fake_copy(model)
        skip_experts(fake)

        def check(hidden: Tensor, keywords: Mapping[str, Any]) -> None:
            # A causal LM's hidden states are known without a batch: it is checked where it is cut.
            if not is_causal_lm(fake):
                run_empty(fake, self._config, hidden, **keywords)

        stages = [self.stage(shallow_copy(fake), index).eval() for index in range(self._num_stages)]
        sizes = self._parallelism.dimensions
        if sizes.cp == 1:
            return StageShapes(stages, mode, check)
        how = sizes.cp, sizes.cp_method, sizes.tp
        return StageShapes([CheckedAttention(stage, self._config.layers, *how) for stage in stages], mode, check)

    def holds(self, mine: Sequence[int]) -> Callable[[str], bool]:
        kept = [name for index in mine for name in self._fqns[index]]
        prefixes = tuple(f"{name}." for name in [*kept, *self._config.always_keep_fqns])
        return lambda name: name.startswith(prefixes)

    def stage(self, model: nn.Module, index: int) -> StageModule:
        return make_stage(shallow_copy(model), self._config, self._fqns[index], index, self._num_stages)

    def parallelise(self, stage: StageModule) -> None:
        name_copies(stage.module, self.tied)
        self._parallelism.apply(stage, self._config, self._plan)

    def join(self, model: nn.Module, stages: Mapping[int, StageModule]) -> nn.Module:
        if len(stages) == 1:
            (only,) = (stage.module for stage in stages.values())
            return only
        kept = [name for index in stages for name in self._fqns[index]]
        part = shallow_copy(model)
        prune(part, self._config, kept)
        for name in self._config.always_keep_fqns:
            part.set_submodule(name, next(iter(stages.values())).module.get_submodule(name))
        for index, stage in stages.items():
            for name in self._fqns[index]:
                part.set_submodule(name, stage.module.get_submodule(name))
        for one in self.tied:
            # Where a stage keeps its copy under the first name, unless another has the module itself.
            holder = one.names[0].rpartition(".")[0]
            for stage in stages.values() if not one.names[0].startswith(tuple(f"{name}." for name in kept)) else ():
                if one.names[0] in dict(stage.module.named_parameters()):
                    part.set_submodule(holder, stage.module.get_submodule(holder))
        return part


class _TracedCut:
    """By the split points of a trace."""

    def __init__(
        self,
        model: nn.Module,
        num_stages: int,
        options: SplitOptions,
        parallelism: StageParallelism,
        example: Example,
    ) -> None:
        parallelism.refuse_traced()
        self._parallelism = parallelism
        spec, policy = options.split_spec, options.split_policy
        self._traced: TracedSplit = trace_split(
            model,
            example.args,
            example.kwargs,
            split_spec=None if spec is None else {name: _split_point(name, at) for name, at in spec.items()},
            split_policy=split_into_equal_size(num_stages) if policy == "equal_size" else policy,
            num_stages=num_stages,
        )
        self.tied = self._traced.shared

    def shapes(self, model: nn.Module) -> StageShapes:
        fake, mode = fake_copy(model)
        return StageShapes([self.stage(fake, index).eval() for index in range(self._traced.num_stages)], mode)

    def holds(self, mine: Sequence[int]) -> Callable[[str], bool]:
        return {name for index in mine for name in self._traced.names(index)}.__contains__

    def stage(self, model: nn.Module, index: int) -> StageModule:
        return self._traced.make_stage(model, index)

    def parallelise(self, stage: StageModule) -> None:
        self._parallelism.apply_to_layers(stage, stage.module.layer_names)  # type: ignore[arg-type]

    def join(self, model: nn.Module, stages: Mapping[int, StageModule]) -> nn.Module:
        return join_stages(list(stages.values()))


def _measured(
    model: nn.Module, config: ModuleConfig, unit: CostUnit, example: Callable[[], Example] | None
) -> Pieces[float]:
    """What the model's pieces cost; every rank calls this."""
    if example is None:
        raise SetupError(
            f"the split is by {unit}, which is measured with a batch; needed is example_micro_batch() of the module, or"
            " balance='layers'"
        )
    given = example()
    return measure_costs(
        model,
        config,
        given.args,
        given.kwargs,
        given.loss_of,
        unit=unit,
        microbatches=given.num_microbatches,
        group=dist.group.WORLD,
    )


def _split_point(name: str, given: SplitPoint | str) -> SplitPoint:
    points = {"beginning": SplitPoint.BEGINNING, "end": SplitPoint.END}
    if isinstance(given, SplitPoint):
        return given
    if str(given).lower() not in points:
        raise SetupError(
            f"split_spec says {given!r} for {name}; needed is SplitPoint.BEGINNING or END, or 'beginning' or 'end'"
        )
    return points[str(given).lower()]


def _share_first_rank_s_values(model: nn.Module) -> None:
    """Every rank has made the whole model, and may have drawn other numbers."""
    for tensor in [*model.parameters(), *model.buffers()]:
        dist.broadcast(tensor.detach(), src=0)
