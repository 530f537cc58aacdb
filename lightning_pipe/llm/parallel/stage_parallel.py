"""What is done to a rank's stages once they have their values, in the order in which it must be done."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any, Literal

from torch import nn

from lightning_pipe.engine import SetupError
from lightning_pipe.llm.model.activation_checkpoint import checkpoint_layers
from lightning_pipe.llm.model.compiled_layers import compile_layers
from lightning_pipe.llm.model.module_config import ModuleConfig
from lightning_pipe.llm.model.stage_module import StageModule
from lightning_pipe.llm.parallel.context_ranks import ContextMethod
from lightning_pipe.llm.parallel.data_parallel import parallelise_stage
from lightning_pipe.llm.parallel.dimensions import StageMeshes
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
        reshard_after_forward: whether FSDP lets gathered parameters go after each forward.
        activations: what layers compute again in backward: all, all but the results of matrix multiplications, nothing.
        checkpoint_every: only each so many layers.
        compile_options: of ``torch.compile`` for each layer; None not to compile.
        context_method: how ranks share sequences.
    """

    meshes: StageMeshes | None = None
    reshard_after_forward: bool = False
    activations: Literal["full", "selective"] | None = None
    checkpoint_every: int = 1
    compile_options: Mapping[str, Any] | None = field(default=None)
    context_method: ContextMethod = "ulysses"

    @property
    def tensor_size(self) -> int:
        return 1 if self.meshes is None else self.meshes.dimensions.tensor

    @property
    def context_size(self) -> int:
        return 1 if self.meshes is None else self.meshes.dimensions.context

    def check(self, model: nn.Module, config: ModuleConfig) -> TensorPlan:
        """See, on the unsplit model, that it can be done; the plan of tensor parallelism, where there is any.

        Raises:
            SetupError: the same on every rank.
        """
        if self.context_size > 1 and self.context_method == "ring":
            check_ring()
        if self.meshes is not None and self.meshes.dimensions.expert > 1:
            check_experts(model, self.meshes.dimensions.expert)
        if self.activations == "selective" and self.meshes is not None and self.meshes.expert_data is not None:
            raise SetupError(
                "activation_checkpointing is 'selective', and experts are shared by fewer ranks than have their data,"
                " so that FSDP works inside of the layers, which selective checkpointing cannot run again; use 'full',"
                " or as many ranks in expert_parallel_size as share a stage's data"
            )
        if self.tensor_size == 1:
            return {}
        plan = derive_tensor_plan(model, config)
        resolve_tensor_plan(model, config, plan, self.tensor_size)
        return plan

    def refuse_traced(self) -> None:
        """Refuse what needs the model's own code, of which a trace has only the operations.

        Raises:
            SetupError: tensor, context or expert parallelism.
        """
        expert_size = 1 if self.meshes is None else self.meshes.dimensions.expert
        if max(self.tensor_size, self.context_size, expert_size) > 1:
            raise SetupError(
                f"tensor_parallel_size is {self.tensor_size}, context_parallel_size is {self.context_size} and"
                f" expert_parallel_size is {expert_size}, but the model is cut by tracing it, which leaves operations"
                " in the place of modules; needed is 1 for all three, or a model that is cut by its layers"
                " (get_pp_module_config)"
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
                stage, meshes.expert, meshes.expert_data, reshard_after_forward=self.reshard_after_forward
            )
        self.apply_to_layers(stage, config.layers)

    def apply_to_layers(self, stage: StageModule, layers: tuple[str, ...]) -> None:
        """The part of it that needs to know the names of layers only."""
        self.checkpoint(stage, layers)
        if self.compile_options is not None:
            compile_layers(stage, layers, **self.compile_options)
        if self.meshes is not None and self.meshes.data is not None:
            parallelise_stage(stage, layers, self.meshes.data, reshard_after_forward=self.reshard_after_forward)

    def checkpoint(self, stage: StageModule, layers: tuple[str, ...]) -> None:
        """Let layers compute again in backward what they would keep."""
        if self.activations is not None:
            checkpoint_layers(stage, layers, self.activations, self.checkpoint_every)

    def is_checkpointed(self, index: int) -> bool:
        """Whether a layer does so, by its index in the whole model."""
        return self.activations is not None and index % self.checkpoint_every == 0
