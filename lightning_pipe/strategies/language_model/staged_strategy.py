"""Base strategy for modules in stages: splitting, placement on ranks, and checkpoints."""

from __future__ import annotations

import os
from collections.abc import Callable, Generator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from lightning.pytorch.plugins import MixedPrecision
from lightning.pytorch.trainer.states import TrainerFn
from torch.distributed.device_mesh import DeviceMesh

from lightning_pipe.engine import SetupError
from lightning_pipe.engine.ranks.agreement import check_agreement
from lightning_pipe.llm.model.compiled_layers import keep_backward_buffers
from lightning_pipe.llm.model.hf_weights import PretrainedWeights
from lightning_pipe.llm.parallel.dimensions import ParallelDims
from lightning_pipe.llm.run.options import LLMOptions, option_pairs
from lightning_pipe.llm.run.recorder import StageRecorder
from lightning_pipe.llm.run.runner import PipelineRunner
from lightning_pipe.llm.run.stage_parts import PartsMaker, StageParts, StagePlan, StageSettings
from lightning_pipe.llm.schedules.checks import check_microbatches, splits_backward
from lightning_pipe.llm.schedules.named import ScheduleSpec
from lightning_pipe.strategies.checkpoint_folder import FolderCheckpointStrategy
from lightning_pipe.strategies.language_model.pipeline_module import PipelineModule
from lightning_pipe.strategies.language_model.stage_checkpoint import load_stage_checkpoint, save_stage_checkpoint
from lightning_pipe.strategies.running_work import Running, RunningStages


class StagedStrategy(FolderCheckpointStrategy):
    """Sets up stages, and writes and reads their checkpoints.

    Args:
        options: checked options of the strategy.
        others: other arguments that must be equal on all ranks, by name.
        async_checkpoints: see :class:`FolderCheckpointStrategy` (default False).
        arguments: other arguments of :class:`FolderCheckpointStrategy`.
    """

    def __init__(
        self, options: LLMOptions, others: Mapping[str, Any], *, async_checkpoints: bool = False, **arguments: Any
    ) -> None:
        super().__init__(async_checkpoints=async_checkpoints, **arguments)
        self._options = options
        compared = {**others, "async_checkpoints": async_checkpoints}
        self._agreed = [*option_pairs("", options), *((name, repr(value)) for name, value in compared.items())]
        self._maker: PartsMaker | None = None
        self._known: dict[int, StageParts] = {}
        self._parts: StageParts | None = None
        self._weights: PretrainedWeights | None = None
        self._restore_buffers: Callable[[], None] | None = None

    def setup_environment(self) -> None:
        super().setup_environment()
        # This check comes first, since the code below would hang if ranks differed.
        check_agreement(self._agreed, "pipeline's configuration", dist.group.WORLD, error=SetupError)
        settings = self.settings(self.world_size)
        self._check_plan(settings.plan, settings.sizes)
        plugin = self.precision_plugin
        scaler = plugin.scaler if isinstance(plugin, MixedPrecision) else None
        self._maker = PartsMaker.of(settings, self.root_device, scaler)

    def settings(self, world_size: int) -> StageSettings:
        """Settings of the strategy on *world_size* ranks."""
        sizes = self._options.parallel.fit(world_size)
        return self._options.settings(self._first_plan(sizes), sizes)

    def _first_plan(self, sizes: ParallelDims) -> StagePlan:
        """Default plan for cutting and scheduling models, which does not depend on the model."""
        return self._options.plan(sizes)

    def _check_plan(self, plan: StagePlan, sizes: ParallelDims) -> None:
        """Refuse plans that would hang or train on wrong gradients, and set compiler options that the plan requires."""
        check_microbatches(plan.spec, plan.num_microbatches, plan.pipeline_size, plan.stages_per_rank)
        if self._restore_buffers is None and splits_backward(plan.spec) is not False:
            # Of compiled layers, and of functions that a model compiles, as FlexAttention.
            self._restore_buffers = keep_backward_buffers()
        self._options.check_schedule(plan.spec, sizes)

    @property
    def device_mesh(self) -> DeviceMesh:
        """Device mesh with the dimensions ``pipeline``, ``replicate`` and ``shard`` (data), and ``tensor``."""
        return self._parts_maker.meshes.root

    @property
    def _parts_maker(self) -> PartsMaker:
        if self._maker is None:
            raise SetupError("The device mesh does not exist yet. Use it after the trainer has set up the strategy.")
        return self._maker

    @property
    def runner(self) -> PipelineRunner:
        """Runner of this rank's stages."""
        return self._made.runner

    def running(self) -> Running:
        """Information for callbacks, available after the trainer has set up the strategy."""
        return Running(
            title=f"schedule {self.schedule_spec.name}",
            record=lambda keep: StageRecorder(self.runner, self.device_mesh, keep),
            stages=RunningStages(
                self.runner, self.schedule_spec, self.num_microbatches, self.stages_per_rank, self.device_mesh
            ),
        )

    @property
    def plan(self) -> StagePlan:
        """Plan by which the current model is cut and scheduled."""
        return self._parts_maker.settings.plan if self._parts is None else self._parts.plan

    @property
    def schedule_spec(self) -> ScheduleSpec:
        """Schedule of the current model."""
        return self._options.schedule if self._parts is None else self._parts.plan.spec

    @property
    def pipeline_size(self) -> int:
        """Number of ranks in a pipeline."""
        return self._parts_maker.meshes.dimensions.pp

    @property
    def num_microbatches(self) -> int:
        """Number of micro-batches that a batch is cut into."""
        return self.plan.num_microbatches

    @property
    def stages_per_rank(self) -> int:
        """Number of stages on each rank."""
        return self.plan.stages_per_rank

    @property
    def distributed_sampler_kwargs(self) -> dict[str, Any]:
        """Arguments of Lightning's sampler, with one replica per group of ranks that read the same data."""
        parts = self._parts_maker.meshes.same_batch
        mine = next(index for index, ranks in enumerate(parts) if self.global_rank in ranks)
        return {"num_replicas": len(parts), "rank": mine}

    def process_dataloader(self, dataloader: object) -> object:
        """Give samplers that lack a generator a common seed, so that the ranks of a pipeline shuffle in the same order.

        The order does not depend on the states of the ranks' random generators.
        """
        batches = getattr(dataloader, "batch_sampler", None)
        samplers: tuple[Any, ...] = (getattr(dataloader, "sampler", None), batches, getattr(batches, "sampler", None))
        module = self.lightning_module
        # The epoch is added so that loaders that are rebuilt in each epoch, or for another fit, shuffle differently.
        seed = int(os.environ.get("PL_GLOBAL_SEED", 0)) + (0 if module is None else module.trainer.current_epoch)
        for sampler in samplers:
            # Random and weighted samplers, and user-defined samplers with a ``generator`` attribute.
            if getattr(sampler, "generator", self) is None:
                sampler.generator = torch.Generator().manual_seed(seed)
        return super().process_dataloader(dataloader)

    @contextmanager
    def model_sharded_context(self) -> Generator[None, None, None]:
        """Context in which modules are built, with equal values on all ranks."""
        module = self.lightning_module
        self._weights = None
        if isinstance(module, PipelineModule) and module.model is None:
            self._weights = module.pretrained_weights()
        with self._parts_maker.building():
            yield

    def _split(self, module: PipelineModule) -> None:
        """Split the module unless this was done before. A trainer can run several modules in turn."""
        parts = self._known.get(id(module.model))
        if parts is None:
            self._parts_maker.check(module)
            if self.precision_plugin.precision == "16-true":
                raise SetupError(
                    "The trainer's precision is '16-true', with which gradients of summed losses overflow without a"
                    " loss scale. Use '16-mixed', 'bf16-mixed', 'bf16-true' or '32-true'."
                )
            weights, self._weights = self._weights, None
            parts = self._parts_maker.make(module, self._plan_for(module), weights)
            self._known[id(parts.split.kept)] = parts
        self._parts = parts

    def _plan_for(self, module: PipelineModule) -> StagePlan:
        """Plan for a module that has not been cut yet."""
        return self._parts_maker.settings.plan

    @property
    def _made(self) -> StageParts:
        if self._parts is None:
            raise SetupError("The stages do not exist yet. Use them after the trainer has set up the strategy.")
        return self._parts

    def describe_stages(self) -> None:
        """Print what each rank holds (modules, parameters, bytes), on the first rank. Every rank must call this."""
        self._made.describe()

    @property
    def ranks_of_one_batch(self) -> list[list[int]]:
        """Groups of ranks that read the same batches."""
        return self._parts_maker.meshes.same_batch

    @property
    def ranks_share_data(self) -> bool:  # type: ignore[override]
        """True if all ranks belong to one pipeline, which reads one stream of batches."""
        return len(self._parts_maker.meshes.same_batch) == 1

    # ------------------------------------------------------------------ checkpoints

    def save_checkpoint(self, checkpoint: dict[str, Any], filepath: str | Path, storage_options: Any = None) -> None:
        """Write a checkpoint folder (``torch.distributed.checkpoint``), into which every rank writes its stages."""
        module = self.lightning_module
        assert module is not None
        order = [f"model.{name}" for name in self._made.split.names]
        path = self._agreed_path(filepath, storage_options)
        save_stage_checkpoint(checkpoint, path, module, self.optimizers, order, self._write_folder)

    def load_checkpoint(self, checkpoint_path: str | Path, weights_only: bool | None = None) -> dict[str, Any]:
        """Read a folder that :meth:`save_checkpoint` wrote, with the same or other stages."""
        module = self.lightning_module
        assert module is not None
        fitting = module.trainer.state.fn == TrainerFn.FITTING
        optimizers = self.optimizers if fitting else None
        strict, weights_only = module.strict_loading, self._allowed(weights_only)
        return load_stage_checkpoint(checkpoint_path, module, optimizers, strict=strict, weights_only=weights_only)

    def teardown(self) -> None:
        if self._restore_buffers is not None:
            self._restore_buffers()
            self._restore_buffers = None
        super().teardown()
