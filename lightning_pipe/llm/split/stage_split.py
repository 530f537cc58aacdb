"""Split of a module's model into stages, of which each rank keeps its own.

A model is cut by its layers: its forward runs on every stage, and modules of other stages pass their input through::

    unsplit model ──► modules of each stage ──► this rank's values ──► stages ──► parallelized stages
                 └──► shapes that stages exchange
"""

from __future__ import annotations

import zlib
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from itertools import product
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn

from lightning_pipe.engine import SetupError
from lightning_pipe.engine.ranks.object_collectives import all_reduce_any, run_on_all_ranks, run_on_rank
from lightning_pipe.llm.losses.balance_loss import BalanceLoss
from lightning_pipe.llm.measure.layer_bench import LossOf, ModelPieceResults, randomize_module_tensors
from lightning_pipe.llm.measure.layer_costs import CostUnit, measure_layer_costs
from lightning_pipe.llm.model.derived_config import derive_pp_module_config, refine_module_config_by_trial_run
from lightning_pipe.llm.model.hf_experts import has_routers, make_experts_pass_through
from lightning_pipe.llm.model.hf_weights import PretrainedWeights, load_pretrained_weights
from lightning_pipe.llm.model.lora import is_adapted, make_model_view_without_adapters
from lightning_pipe.llm.model.meta_tensors import fake_copy, initialize_modules
from lightning_pipe.llm.model.module_config import PPModuleConfig, is_inside
from lightning_pipe.llm.model.routing_replay import MoEBlockInfo, find_moe_blocks
from lightning_pipe.llm.model.shapes import StageShapes, bypass_data_dependent_layer
from lightning_pipe.llm.model.slots import build_stand_ins
from lightning_pipe.llm.model.stage_module import (
    StageModule,
    check_no_ops_outside_modules,
    copy_model_sharing_tensors,
    is_causal_lm,
    make_stage_module,
    replace_modules_of_other_stages,
    tied_parameters,
)
from lightning_pipe.llm.model.tied import TiedParameter, find_parameters_tied_across_stages, rename_tied_copies
from lightning_pipe.llm.parallel.apply_parallel import StageParallelism
from lightning_pipe.llm.parallel.sdpa_intercept import AttentionCheckedStage
from lightning_pipe.llm.split.options import SplitOptions
from lightning_pipe.llm.split.stage_fqns import assign_modules_to_stages


@dataclass(frozen=True)
class ExampleMicrobatch:
    """A micro-batch for measuring the layers of a model.

    Attributes:
        args: positional arguments of the model.
        kwargs: keyword arguments of the model.
        loss_fn: function of the model's output, and of the part of the model that returned it, that returns a scalar
            loss.
        num_microbatches: number of micro-batches in a step, whose activations a stage keeps.
    """

    args: tuple[Any, ...]
    kwargs: Mapping[str, Any]
    loss_fn: LossOf
    num_microbatches: int = 1


@dataclass(frozen=True)
class SplitModel:
    """A rank's part of a model.

    Attributes:
        local_model: the model with only this rank's modules, under their names in the whole model. Modules without
            parameters replace the others.
        stages: stage modules that the pipeline runs, by stage index. They share the modules of ``local_model``.
        names: names of the whole model's parameters, in its order.
        shapes: shapes of the tensors that stages exchange.
        tied: parameters that several stages hold, on any rank.
        has_routers: True if a stage on any rank has a mixture of experts.
        mixtures: mixtures of the whole model that can replay choices of experts.
    """

    local_model: nn.Module
    stages: Mapping[int, StageModule]
    names: tuple[str, ...]
    shapes: StageShapes
    tied: tuple[TiedParameter, ...] = ()
    has_routers: bool = False
    mixtures: tuple[MoEBlockInfo, ...] = ()


def split_model(
    model: nn.Module,
    *,
    config: PPModuleConfig | None,
    num_stages: int,
    local_stages: Sequence[int],
    options: SplitOptions,
    device: torch.device,
    parallelism: StageParallelism,
    pretrained: PretrainedWeights | None = None,
    example: Callable[[], ExampleMicrobatch] | None = None,
    placeholders: bool = False,
) -> SplitModel:
    """Split *model*, which must not be used afterwards unless ``placeholders`` is set. Every rank must call this."""
    cut = _ModelSplitter(
        model, derive_pp_module_config(model) if config is None else config, num_stages, options, parallelism, example
    )
    for parameter in cut.tied:
        if options.tied_embeddings == "refuse":
            raise SetupError(
                f"the parameters {' and '.join(parameter.names)} are one and the same, and go to stages"
                f" {' and '.join(map(str, parameter.stages))}. Untie them (in a Hugging Face config:"
                " tie_word_embeddings=False), or set split.tied_embeddings to 'sum'"
            )
    shapes = cut.shapes(model)
    names = tuple(name for name, _ in model.named_parameters())
    routers = has_routers(model) or (is_causal_lm(model) and BalanceLoss.from_model(model) is not None)
    mixtures = cut.list_replayable_moe_blocks(model)
    if not placeholders:
        cut.load_or_initialize(model, cut.make_local_name_predicate(local_stages), pretrained)
    stages = {index: cut.stage(model, index) for index in sorted(local_stages)}

    def place() -> None:
        if placeholders:
            randomize_module_tensors(nn.ModuleList(stages.values()), device)
        for stage in stages.values():
            stage.to(device)

    # All ranks must fail together: one rank may run out of memory while the others continue to collectives.
    run_on_all_ranks(place, f"the stages cannot be moved to device {str(device)!r}", dist.group.WORLD)
    for stage in stages.values():
        cut.parallelize(stage)
    return SplitModel(cut.join_stages(model, stages), stages, names, shapes, cut.tied, routers, mixtures)


class _ModelSplitter:
    """Assignment of a model's modules to stages."""

    def __init__(
        self,
        model: nn.Module,
        config: PPModuleConfig,
        num_stages: int,
        options: SplitOptions,
        parallelism: StageParallelism,
        example: Callable[[], ExampleMicrobatch] | None,
    ) -> None:
        config.check_against_model(model)
        config = self._config = refine_module_config_by_trial_run(model, config)
        if parallelism.dimensions.cp > 1 and is_causal_lm(model) and BalanceLoss.from_model(model) is not None:
            raise SetupError(
                f"the config has output_router_logits=True, and parallel.cp is {parallelism.dimensions.cp}; expected 1,"
                " since a rank knows the routers' choices for its part of the sequences only. Set"
                " output_router_logits=False, or parallel.cp to 1"
            )
        self._num_stages = num_stages
        self._parallelism = parallelism
        self._fqns = assign_modules_to_stages(
            config, num_stages, options, lambda unit: _measure_split_costs(model, config, unit, example)
        )
        self._check_end_stages_have_layers(model)
        self._plan = parallelism.check_model(model, config)
        self.tied = tuple(find_parameters_tied_across_stages(tied_parameters(model), self._fqns))

    def list_replayable_moe_blocks(self, model: nn.Module) -> tuple[MoEBlockInfo, ...]:
        """Mixtures of the whole model that can replay choices of experts."""
        return tuple(find_moe_blocks(model, self._config.layer_fqns)) if self._parallelism.can_replay_routing else ()

    def _check_end_stages_have_layers(self, model: nn.Module) -> None:
        """Check that hidden states can enter and leave at layers where the model's own forward changes them."""
        trial, layers = self._config.trial, self._config.layer_fqns
        if trial is not None and (
            (layers[0] not in self._fqns[0] and not trial.starts_plain)
            or (layers[-1] not in self._fqns[-1] and not trial.ends_plain)
        ):
            raise SetupError(
                f"{type(model).__name__} has operations of its own before its first or after its last layer, which only"
                " a stage with that layer can run; expected a first and a last stage with at least one layer each."
                " Change split.layers_per_stage or split.layer_ranges"
            )

    def shapes(self, model: nn.Module) -> StageShapes:
        """Shapes of the tensors that stages exchange."""
        fake, mode = fake_copy(model)
        make_experts_pass_through(fake)

        def check_no_outside_ops(hidden: Tensor | tuple[Tensor, ...], keywords: Mapping[str, Any]) -> None:
            if not is_causal_lm(fake):
                check_no_ops_outside_modules(fake, self._config, hidden, **keywords)

        stages = [self.stage(copy_model_sharing_tensors(fake), index).eval() for index in range(self._num_stages)]
        slots = build_stand_ins(fake, self._config, ()) if self._config.trial is not None else {}
        for stage, name in product(stages, self._config.layer_fqns if slots else ()):
            bypass_data_dependent_layer(stage.module.get_submodule(name), slots[name])
        sizes = self._parallelism.dimensions
        if sizes.cp == 1:
            return StageShapes(stages, mode, check_no_outside_ops)
        how = sizes.cp, sizes.cp_method, sizes.tp
        return StageShapes(
            [AttentionCheckedStage(stage, self._config.layer_fqns, *how) for stage in stages],
            mode,
            check_no_outside_ops,
        )

    def make_local_name_predicate(self, local_stages: Sequence[int]) -> Callable[[str], bool]:
        """Predicate that is True for names of parameters and buffers that any of these stages needs."""
        fqns = [name for index in local_stages for name in self._fqns[index]]
        needed = {*fqns, *self._config.always_keep_fqns}
        # A buffer outside of all listed modules belongs to the forward itself.
        listed = {*self._config.module_fqns, *self._config.always_keep_fqns}
        return lambda name: is_inside(name, needed) or not is_inside(name, listed)

    def load_or_initialize(
        self, model: nn.Module, keep: Callable[[str], bool], pretrained: PretrainedWeights | None
    ) -> None:
        """Set the values of the tensors that this rank keeps; they do not depend on which rank keeps a tensor."""
        world = dist.group.WORLD
        if pretrained is not None:
            failed = f"the weights in {str(pretrained.folder)!r} cannot be loaded"
            run_on_all_ranks(
                lambda: load_pretrained_weights(make_model_view_without_adapters(model), pretrained, keep),
                failed,
                world,
            )
        elif any(parameter.is_meta for parameter in model.parameters()):
            if is_adapted(model):
                raise SetupError(
                    f"the {type(model).__name__} with adapters was built on the meta device; expected the CPU, since"
                    " peft gives adapters their initial values. Build it on the CPU, or from pretrained weights"
                )
            names = (*self._config.module_fqns, *self._config.always_keep_fqns)
            seed = run_on_rank(lambda: int(torch.randint(2**62, ())), "the model cannot be initialized", world)
            failed = "the model on the meta device cannot be initialized"
            run_on_all_ranks(lambda: initialize_modules(model, names, keep, seed), failed, world)
        else:
            _broadcast_model_if_ranks_differ(model)

    def stage(self, model: nn.Module, index: int) -> StageModule:
        return make_stage_module(
            copy_model_sharing_tensors(model), self._config, self._fqns[index], index, self._num_stages
        )

    def parallelize(self, stage: StageModule) -> None:
        rename_tied_copies(stage.module, self.tied)
        self._parallelism.apply(stage, self._config, self._plan)

    def join_stages(self, model: nn.Module, stages: Mapping[int, StageModule]) -> nn.Module:
        """Join stages into one module with the model's names."""
        if len(stages) == 1:
            (only,) = (stage.module for stage in stages.values())
            return only
        fqns = [name for index in stages for name in self._fqns[index]]
        part = copy_model_sharing_tensors(model)
        replace_modules_of_other_stages(part, self._config, fqns)
        for name in self._config.always_keep_fqns:
            part.set_submodule(name, next(iter(stages.values())).module.get_submodule(name))
        for index, stage in stages.items():
            for name in self._fqns[index]:
                part.set_submodule(name, stage.module.get_submodule(name))
        for parameter in self.tied:
            # A stage with only a copy has it under the first name (`rename_tied_copies`). If another stage of this
            # rank holds the module with that name, the module is already in place.
            holder = parameter.names[0].rpartition(".")[0]
            for stage in (
                stages.values() if not parameter.names[0].startswith(tuple(f"{name}." for name in fqns)) else ()
            ):
                if parameter.names[0] in dict(stage.module.named_parameters()):
                    part.set_submodule(holder, stage.module.get_submodule(holder))
        return part


def _measure_split_costs(
    model: nn.Module, config: PPModuleConfig, unit: CostUnit, example: Callable[[], ExampleMicrobatch] | None
) -> ModelPieceResults[float]:
    """Measured costs of the model's pieces. Every rank must call this."""
    if example is None:
        raise SetupError(
            f"split.balance is '{unit}', which is measured with a batch, but the module has no example_micro_batch()."
            " Define it on the module, or set split.balance to 'layers'"
        )
    sample = example()
    return measure_layer_costs(
        model,
        config,
        sample.args,
        sample.kwargs,
        sample.loss_fn,
        unit=unit,
        microbatches=sample.num_microbatches,
        group=dist.group.WORLD,
    )


def _broadcast_model_if_ranks_differ(model: nn.Module) -> None:
    """Broadcast rank 0's values if ranks have others, such as after other random numbers in the module's __init__."""
    tensors = [tensor.detach() for tensor in (*model.parameters(), *model.buffers())]
    checksums = [_compute_tensor_checksum(tensor) for tensor in tensors]
    first = run_on_rank(lambda: checksums, "the model's values cannot be compared", dist.group.WORLD)
    if all_reduce_any([checksums != first], dist.group.WORLD)[0]:
        for tensor in tensors:
            dist.broadcast(tensor, src=0)


def _compute_tensor_checksum(tensor: Tensor) -> int:
    plain = tensor.cpu().resolve_conj().resolve_neg().contiguous()
    return zlib.crc32(plain.flatten().view(torch.uint8).numpy().data)
