"""Applies the parallel dimensions to the stages of a rank that have their values, in the required order."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from torch import nn

from lightning_pipe.engine import SetupError
from lightning_pipe.llm.model.activation_checkpoint import ActivationCheckpoint, checkpoint_layers
from lightning_pipe.llm.model.compiled_layers import compile_layers
from lightning_pipe.llm.model.module_config import ModuleConfig
from lightning_pipe.llm.model.stage_module import StageModule
from lightning_pipe.llm.parallel.data_parallel import parallelise_stage
from lightning_pipe.llm.parallel.dimensions import ParallelDims, StageMeshes
from lightning_pipe.llm.parallel.expert_parallel import check_experts, parallelise_experts
from lightning_pipe.llm.parallel.ring_attention import check_ring
from lightning_pipe.llm.parallel.tensor_parallel import parallelise_tensors
from lightning_pipe.llm.parallel.tensor_plan import TensorPlan, derive_tensor_plan, resolve_tensor_plan

__all__ = ["StageParallelism"]


@dataclass(frozen=True)
class StageParallelism:
    """How a rank's stages are shared with other ranks, and how their layers are run.

    Attributes:
        meshes: of all ranks; None for one rank alone.
        activation_checkpoint: layers that compute again in backward; None for no layer.
        compile_options: options of ``torch.compile`` for each layer; None not to compile.
    """

    meshes: StageMeshes | None = None
    activation_checkpoint: ActivationCheckpoint | None = None
    compile_options: Mapping[str, Any] | None = None

    @property
    def dimensions(self) -> ParallelDims:
        """Sizes of the meshes, and how parameters and sequences are shared over them."""
        return ParallelDims(pp=1) if self.meshes is None else self.meshes.dimensions

    def check(self, model: nn.Module, config: ModuleConfig) -> TensorPlan:
        """See, on the unsplit model, that it can be done; the plan of tensor parallelism, where there is any.

        Raises:
            SetupError: the same on every rank.
        """
        sizes, checkpoint = self.dimensions, self.activation_checkpoint
        if sizes.cp > 1 and sizes.cp_method == "ring":
            check_ring()
        if sizes.ep > 1:
            check_experts(model, sizes.ep)
        selective = checkpoint is not None and checkpoint.mode == "selective"
        if selective and self.meshes is not None and self.meshes.expert_data is not None:
            raise SetupError(
                "activation_checkpoint.mode is 'selective', and experts are shared by fewer ranks than have their data,"
                " so that FSDP works inside of the layers, which selective checkpointing cannot run again; use 'full',"
                " or as many ranks in parallel.ep as share a stage's data"
            )
        if sizes.tp == 1:
            return {}
        plan = derive_tensor_plan(model, config)
        resolve_tensor_plan(model, config, plan, sizes.tp)
        return plan

    def refuse_traced(self) -> None:
        """Refuse what needs the model's own code, of which a trace has only the operations.

        Raises:
            SetupError: tensor, context or expert parallelism.
        """
        sizes = self.dimensions
        if max(sizes.tp, sizes.cp, sizes.ep) > 1:
            raise SetupError(
                f"parallel.tp is {sizes.tp}, parallel.cp is {sizes.cp} and parallel.ep is {sizes.ep}, but the model is"
                " cut by tracing it, which leaves operations in the place of modules; expected 1 for all three, or a"
                " model that is cut by its layers (get_pp_module_config)"
            )

    def apply(self, stage: StageModule, config: ModuleConfig, plan: TensorPlan) -> None:
        """Do it to a stage, in place.

        Args:
            stage: with its values.
            config: of the unsplit model.
            plan: that :meth:`check` gave.
        """
        meshes = self.meshes
        if meshes is not None and meshes.tensor is not None:
            parallelise_tensors(stage, config, meshes.tensor, plan)
        if meshes is not None and meshes.expert is not None:
            parallelise_experts(
                stage, meshes.expert, meshes.expert_data, reshard_after_forward=self.dimensions.reshard_after_forward
            )
        self.apply_to_layers(stage, config.layers)

    def apply_to_layers(self, stage: StageModule, layers: tuple[str, ...]) -> None:
        """The part of it that needs to know the names of layers only."""
        self.checkpoint(stage, layers)
        if self.compile_options is not None:
            compile_layers(stage, layers, **self.compile_options)
        if self.meshes is not None and self.meshes.data is not None:
            reshard = self.dimensions.reshard_after_forward
            parallelise_stage(stage, layers, self.meshes.data, reshard_after_forward=reshard)

    def checkpoint(self, stage: StageModule, layers: tuple[str, ...]) -> None:
        """Let layers compute again in backward what they would keep."""
        if self.activation_checkpoint is not None:
            checkpoint_layers(stage, layers, self.activation_checkpoint.mode, self.activation_checkpoint.every)

    def is_checkpointed(self, index: int) -> bool:
        """Whether a layer does so, by its index in the whole model."""
        return self.activation_checkpoint is not None and index % self.activation_checkpoint.every == 0
