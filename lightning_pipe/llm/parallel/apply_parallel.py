"""Applies the parallel dimensions to a rank's materialized stages, in the required order."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from torch import nn

from lightning_pipe.engine import SetupError
from lightning_pipe.llm.model.activation_checkpoint import ActivationCheckpoint, apply_activation_checkpoint
from lightning_pipe.llm.model.compiled_layers import compile_layers
from lightning_pipe.llm.model.lora import is_adapted
from lightning_pipe.llm.model.module_config import PPModuleConfig
from lightning_pipe.llm.model.routing_replay import install_moe_block_tracking
from lightning_pipe.llm.model.stage_module import StageModule
from lightning_pipe.llm.parallel.data_parallel import apply_data_parallel
from lightning_pipe.llm.parallel.expert_parallel import apply_expert_parallel, check_experts
from lightning_pipe.llm.parallel.parallel_dims import ParallelDims, ParallelMeshes
from lightning_pipe.llm.parallel.sequence_parallel import check_sequence_parallel
from lightning_pipe.llm.parallel.tensor_parallel import apply_tensor_parallel
from lightning_pipe.llm.parallel.tensor_plan import TensorPlan, derive_tensor_plan, resolve_parallel_styles


@dataclass(frozen=True)
class StageParallelism:
    """Parallel dimensions of a rank's stages, and the execution options of their layers."""

    meshes: ParallelMeshes | None = None
    activation_checkpoint: ActivationCheckpoint | None = None
    compile_options: Mapping[str, Any] | None = None
    split_backward: bool = False

    @property
    def dimensions(self) -> ParallelDims:
        """Sizes of the meshes and the options of each dimension."""
        return ParallelDims(pp=1) if self.meshes is None else self.meshes.dimensions

    @property
    def can_replay_routing(self) -> bool:
        """True if layers are not compiled: a graph holds the choices of one call."""
        return self.compile_options is None

    def check_model(self, model: nn.Module, config: PPModuleConfig) -> TensorPlan:
        """Check that the unsplit model supports these dimensions, and derive its tensor-parallel plan."""
        sizes, checkpoint = self.dimensions, self.activation_checkpoint
        if sizes.ep > 1:
            check_experts(model, sizes.ep)
        selective = checkpoint is not None and checkpoint.mode == "selective"
        if selective and self.meshes is not None and self.meshes.expert_data is not None:
            raise SetupError(
                "activation_checkpoint.mode is 'selective', but several ranks hold the same experts, so FSDP runs"
                " inside the layers and selective checkpointing cannot recompute them. Use mode 'full', or set"
                " parallel.dp_replicate to 1 and parallel.ep to parallel.dp_shard times parallel.cp"
            )
        if sizes.tp == 1:
            return {}
        if is_adapted(model):
            raise SetupError(
                f"parallel.tp is {sizes.tp}, and the model has LoRA adapters, which a plan does not shard; expected 1."
                " Use parallel.dp_shard to share the weights of a layer"
            )
        plan = derive_tensor_plan(model, config)
        styles = resolve_parallel_styles(model, config, plan, sizes.tp)
        if sizes.sequence_parallel:
            check_sequence_parallel(model, config, plan, styles)
        return plan

    def apply(self, stage: StageModule, config: PPModuleConfig, plan: TensorPlan) -> None:
        """Apply all dimensions to a stage, in place."""
        meshes = self.meshes
        if self.can_replay_routing:
            install_moe_block_tracking(stage.module, config.layer_fqns)
        if meshes is not None and meshes.tensor is not None:
            apply_tensor_parallel(stage, config, meshes.tensor, plan, sequences=self.dimensions.sequence_parallel)
        if meshes is not None and meshes.expert is not None:
            apply_expert_parallel(
                stage, meshes.expert, meshes.expert_data, reshard_after_forward=self.dimensions.reshard_after_forward
            )
        self.apply_activation_checkpoint(stage, config.layer_fqns)
        if self.compile_options is not None:
            # PyTorch 2.14 cannot compile the backward of DTensors with sizes that vary (a RecursionError).
            options = {"dynamic": False} if meshes is not None and meshes.tensor is not None else {}
            compile_layers(
                stage, config.layer_fqns, split_backward=self.split_backward, **options | dict(self.compile_options)
            )
        if meshes is not None and meshes.data is not None:
            reshard = self.dimensions.reshard_after_forward
            apply_data_parallel(stage, config.layer_fqns, meshes.data, reshard_after_forward=reshard)

    def apply_activation_checkpoint(self, stage: StageModule, layers: tuple[str, ...]) -> None:
        """Enable activation checkpointing for the selected layers."""
        if self.activation_checkpoint is not None:
            apply_activation_checkpoint(
                stage, layers, self.activation_checkpoint.mode, self.activation_checkpoint.every_n_layers
            )

    def is_checkpointed(self, index: int) -> bool:
        """Return True if the layer at this index of the whole model is checkpointed."""
        return self.activation_checkpoint is not None and index % self.activation_checkpoint.every_n_layers == 0
