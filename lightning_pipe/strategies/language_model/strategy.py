"""Strategy that trains a language model in pipeline stages under a Trainer."""

from __future__ import annotations

import os
import warnings
from collections.abc import Callable, Generator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any, cast

import lightning.pytorch as pl
import torch
import torch.distributed as dist
from lightning.fabric.utilities.apply_func import move_data_to_device
from lightning.pytorch.trainer.states import TrainerFn
from lightning.pytorch.utilities.model_helpers import is_overridden
from torch import Tensor
from torch.distributed.device_mesh import DeviceMesh
from torch.optim import Optimizer

from lightning_pipe._compat.fast_hooks import call_callback_hooks, call_module_hook
from lightning_pipe._compat.lightning import disable_distributed_sampler, is_accumulating, optimizers_to_device
from lightning_pipe._compat.torch import allow_empty_optimizers
from lightning_pipe._compat.zero_grad_first import ZeroGradFirstOptimization
from lightning_pipe.engine import InputError, SetupError, SWPipeline
from lightning_pipe.engine.ranks.agreement import check_agreement
from lightning_pipe.llm.batches.options import Batching
from lightning_pipe.llm.model.activation_checkpoint import ActivationCheckpoint
from lightning_pipe.llm.model.compiled_layers import disable_donated_buffers
from lightning_pipe.llm.model.hf_weights import PretrainedWeights
from lightning_pipe.llm.parallel.parallel_dims import ParallelDims
from lightning_pipe.llm.run.optimizer_checks import check_not_fused, check_optimizers_for_sharding
from lightning_pipe.llm.run.optimizer_offload import OptimizerStateOffload
from lightning_pipe.llm.run.options import LLMOptions, flatten_option_fields
from lightning_pipe.llm.run.preparation import BatchInPreparation
from lightning_pipe.llm.run.recorder import StageRecorder
from lightning_pipe.llm.run.schedule_runner import ScheduleRunner
from lightning_pipe.llm.run.stage_hooks import BatchResult
from lightning_pipe.llm.run.stage_parts import (
    LLMPipelineComponents,
    LLMPipelineComponentsBuilder,
    LLMPipelineSettings,
    StagePlan,
)
from lightning_pipe.llm.run.training_tasks import llm_evaluation_plan, llm_plan
from lightning_pipe.llm.schedules.checks import check_microbatches, splits_backward
from lightning_pipe.llm.schedules.specs import ScheduleOptions, ScheduleSpec
from lightning_pipe.llm.split.options import SplitOptions
from lightning_pipe.loops import EvaluationProgram, TrainingProgram
from lightning_pipe.loops.data.batch_source import UnevenPolicy
from lightning_pipe.loops.uneven_evaluation import UnevenEvaluation
from lightning_pipe.strategies.base import install_loops
from lightning_pipe.strategies.checkpoint_folder import FolderCheckpointStrategy
from lightning_pipe.strategies.language_model.pipeline_module import PipelineModule
from lightning_pipe.strategies.language_model.stage_checkpoint import load_stage_checkpoint, save_stage_checkpoint
from lightning_pipe.strategies.setup_checks import check_callbacks, get_grad_scaler
from lightning_pipe.strategies.strategy_info import PipelineInfo, StrategyInfo


class LLMPipelineStrategy(FolderCheckpointStrategy):
    """Cuts the model of a :class:`PipelineModule` into stages and trains it under a pipeline schedule.

    Each rank builds and holds only its own stages. The loss is a sum over tokens, and its gradients are divided once
    per step by the number of tokens in the whole batch: over all micro-batches, all data-parallel ranks and all
    accumulated batches.

    The pipeline dimension of the device mesh is the outermost one: with two stages and two data-parallel ranks, ranks
    0 and 1 hold stage 0.

    Option groups can be passed as the dataclass or, as in YAML, as a mapping of its fields.

    Args:
        schedule: schedule name, such as ``interleaved_1f1b`` (``lightning-pipe strategies`` prints all, as
            ``llm_NAME_pipeline``), one of PyTorch's schedule classes or its name, or the path of a CSV file of actions
            (default ``1f1b``).
        num_microbatches: number of micro-batches that a batch is cut into (default: twice the number of ranks in a
            pipeline).
        stages_per_rank: number of stages on each rank (default: 1, or 2 for schedules that use several).
        schedule_options: :class:`ScheduleOptions`, communication of schedules with several stages on each rank.
        parallel: :class:`ParallelDims`, number of ranks in each parallel dimension (default: one pipeline).
        split: :class:`SplitOptions`, places at which the model is cut (default: the same number of layers on each
            stage).
        batching: :class:`Batching`, padding, cutting and comparison of batches.
        activation_checkpoint: :class:`ActivationCheckpoint`, layers whose activations are recomputed in backward
            (default: none).
        compile_layers: True, or a mapping of ``torch.compile`` options, to compile each layer (default False).
        offload_optimizer: True to keep optimizer states on the host (default False).
        uneven_batches: behavior when some ranks have fewer training batches: ``shortest`` (default) ends the epoch
            with the shortest loader, ``error`` raises an error.
        uneven_evaluation: behavior when some pipelines have fewer batches to validate, test or predict. With ``join``
            (default), they take part in the batches of the other pipelines, so that each row is evaluated once.
            ``error`` refuses to validate and test, and keeps Lightning's sampler, which repeats rows.
        async_checkpoints: True to copy checkpoints that are saved during training to the host and to write them in the
            background (default False). The next save and the end of training wait for the write and raise its errors.
            Costs host memory for the copy.
        arguments: arguments of Lightning's ``DDPStrategy``: ``accelerator``, ``parallel_devices``,
            ``cluster_environment``, ``precision_plugin``, ``process_group_backend``, ``timeout``, ``start_method``.

    Raises:
        SetupError: If a value has the wrong type, or if options exclude each other.
        TypeError: If an argument is unknown.
    """

    evaluates_together = True
    logs_for_all = True

    def __init__(
        self,
        schedule: Any = "1f1b",
        *,
        num_microbatches: int | None = None,
        stages_per_rank: int | None = None,
        schedule_options: ScheduleOptions | Mapping[str, Any] | None = None,
        parallel: ParallelDims | Mapping[str, Any] | None = None,
        split: SplitOptions | Mapping[str, Any] | None = None,
        batching: Batching | Mapping[str, Any] | None = None,
        activation_checkpoint: ActivationCheckpoint | Mapping[str, Any] | None = None,
        compile_layers: bool | Mapping[str, Any] = False,
        offload_optimizer: bool = False,
        uneven_batches: UnevenPolicy = "shortest",
        uneven_evaluation: UnevenEvaluation = "join",
        async_checkpoints: bool = False,
        **arguments: Any,
    ) -> None:
        groups: dict[str, Any] = {"parallel": parallel, "split": split, "batching": batching}
        groups |= {"activation_checkpoint": activation_checkpoint, "compile_layers": compile_layers}
        groups["schedule_options"] = schedule_options
        options = LLMOptions(schedule, num_microbatches, stages_per_rank, **groups, offload_optimizer=offload_optimizer)
        super().__init__(async_checkpoints=async_checkpoints, **arguments)
        self._set_uneven_policies(uneven_batches, uneven_evaluation)
        self._options = options
        compared: dict[str, Any] = {"uneven_batches": uneven_batches, "uneven_evaluation": uneven_evaluation}
        compared["async_checkpoints"] = async_checkpoints
        self._compared_options = [
            *flatten_option_fields("", options),
            *((name, repr(value)) for name, value in compared.items()),
        ]
        self._maker: LLMPipelineComponentsBuilder | None = None
        self._parts_by_model: dict[int, LLMPipelineComponents] = {}
        self._parts: LLMPipelineComponents | None = None
        self._weights: PretrainedWeights | None = None
        self._restore_buffers: Callable[[], None] | None = None
        self._offloaded: list[OptimizerStateOffload] = []
        self._program: TrainingProgram | None = None
        self._evaluations: list[EvaluationProgram] = []
        self._prepared_batch: BatchInPreparation | None = None

    # ------------------------------------------------------------------ set-up

    def setup_environment(self) -> None:
        super().setup_environment()
        # This check comes first, since the code below would hang if ranks differed.
        check_agreement(self._compared_options, "pipeline's configuration", dist.group.WORLD, error_class=SetupError)
        settings = self.settings(self.world_size)
        self._check_plan(settings.plan, settings.sizes)
        self._maker = LLMPipelineComponentsBuilder.from_settings(
            settings, self.root_device, get_grad_scaler(self.precision_plugin)
        )

    def settings(self, world_size: int) -> LLMPipelineSettings:
        """Settings of the strategy on *world_size* ranks."""
        sizes = self._options.parallel.resolve(world_size)
        return self._options.build_llm_pipeline_settings(self._default_plan(sizes), sizes)

    def _default_plan(self, sizes: ParallelDims) -> StagePlan:
        """Default plan for cutting and scheduling models, which does not depend on the model."""
        return self._options.build_stage_plan(sizes)

    def _check_plan(self, plan: StagePlan, sizes: ParallelDims) -> None:
        """Refuse plans that would hang or train on wrong gradients, and set compiler options that the plan requires."""
        check_microbatches(plan.spec, plan.num_microbatches, plan.pipeline_size, plan.stages_per_rank)
        if self._restore_buffers is None and splits_backward(plan.spec) is not False:
            # Of compiled layers, and of functions that a model compiles, as FlexAttention.
            self._restore_buffers = disable_donated_buffers()
        self._options.check_schedule(plan.spec, sizes)

    @contextmanager
    def model_sharded_context(self) -> Generator[None, None, None]:
        """Context in which modules are built, with equal values on all ranks."""
        module = self.lightning_module
        self._weights = None
        if isinstance(module, PipelineModule) and module.model is None:
            self._weights = module.pretrained_weights()
        with self._components_builder.model_building():
            yield

    def _split(self, module: PipelineModule) -> None:
        """Split the module unless this was done before. A trainer can run several modules in turn."""
        parts = self._parts_by_model.get(id(module.model))
        if parts is None:
            self._components_builder.check_module(module)
            if self.precision_plugin.precision == "16-true":
                raise SetupError(
                    "The trainer's precision is '16-true', with which gradients of summed losses overflow without a"
                    " loss scale. Use '16-mixed', 'bf16-mixed', 'bf16-true' or '32-true'."
                )
            weights, self._weights = self._weights, None
            parts = self._components_builder.build(module, self._get_plan_for_module(module), weights)
            self._parts_by_model[id(parts.split.local_model)] = parts
        self._parts = parts

    def _get_plan_for_module(self, module: PipelineModule) -> StagePlan:
        """Plan for a module that has not been cut yet."""
        return self._components_builder.settings.plan

    def setup(self, trainer: pl.Trainer) -> None:
        assert self.accelerator is not None
        self.accelerator.setup(trainer)
        fitting = trainer.state.fn == TrainerFn.FITTING
        single = len(self._components_builder.meshes.same_batch) == 1
        if single:
            # A single pipeline reads all data in the order of its loaders. Lightning's sampler would shuffle it.
            disable_distributed_sampler(trainer)
        module = check_pipeline_module(self.lightning_module, fitting)
        if fitting:
            # WeightAveraging builds the module before it copies it, which suffices on one rank.
            check_callbacks(trainer, averages_weights=self.world_size == 1)
        self._split(module)
        self.precision_plugin.convert_module(module)
        self.model_to_device()
        for loop in (trainer.validate_loop, trainer.test_loop, trainer.predict_loop):
            loop.inference_mode = False  # buffers created in inference mode could not be used in training
        # Results of a batch are the same on every rank of a pipeline, and losses of PipelineModule on all ranks.
        names = ".*" if single else "(val|test)_loss"
        warnings.filterwarnings("ignore", rf"It is recommended to use `self\.log\('{names}', \.\.\., sync_dist=True")
        module._run_in_stages, module._predict_in_stages = self._run_batch, self._predict
        install_loops(trainer)
        if fitting:
            ZeroGradFirstOptimization.install(trainer, self._pipeline_components.runs.reset_step_token_count)
            with allow_empty_optimizers():
                self.setup_optimizers(trainer)
            check_optimizers_for_sharding(self.optimizers, self._components_builder.settings.sizes)
            if self._pipeline_components.scaling is not None:
                check_not_fused(self.optimizers)
                self._pipeline_components.scaling.patch_scaler()
            self._pipeline_components.gradients.check_tied_param_groups(self.optimizers)
            # The plugin's method would clip each stage by its own norm instead of the norm of the whole model.
            self.precision_plugin.clip_grad_by_norm = self._pipeline_components.gradients.clip_grad_norm  # type: ignore[assignment, method-assign]
        self.setup_precision_plugin()
        if fitting:
            optimizers_to_device(self.optimizers, self.root_device)
            offloaded = self.optimizers if self._options.offload_optimizer else []
            self._offloaded = [OptimizerStateOffload(optimizer) for optimizer in offloaded]

    # ------------------------------------------------------------------ stages and data of this rank

    @property
    def device_mesh(self) -> DeviceMesh:
        """Device mesh with the dimensions ``pipeline``, ``replicate`` and ``shard`` (data), and ``tensor``."""
        return self._components_builder.meshes.root

    @property
    def _components_builder(self) -> LLMPipelineComponentsBuilder:
        if self._maker is None:
            raise SetupError("The device mesh does not exist yet. Use it after the trainer has set up the strategy.")
        return self._maker

    @property
    def runner(self) -> ScheduleRunner:
        """Runner of this rank's stages."""
        return self._pipeline_components.runner

    def strategy_info(self) -> StrategyInfo:
        """Information for callbacks, available after the trainer has set up the strategy."""
        return StrategyInfo(
            title=f"schedule {self.schedule_spec.name}",
            make_recorder=lambda keep: StageRecorder(self.runner, self.device_mesh, keep),
            stages=PipelineInfo(
                self.runner, self.schedule_spec, self.num_microbatches, self.stages_per_rank, self.device_mesh
            ),
        )

    @property
    def plan(self) -> StagePlan:
        """Plan by which the current model is cut and scheduled."""
        return self._components_builder.settings.plan if self._parts is None else self._parts.plan

    @property
    def schedule_spec(self) -> ScheduleSpec:
        """Schedule of the current model."""
        return self._options.schedule if self._parts is None else self._parts.plan.spec

    @property
    def pipeline_size(self) -> int:
        """Number of ranks in a pipeline."""
        return self._components_builder.meshes.dimensions.pp

    @property
    def num_microbatches(self) -> int:
        """Number of micro-batches that a batch is cut into."""
        return self.plan.num_microbatches

    @property
    def stages_per_rank(self) -> int:
        """Number of stages on each rank."""
        return self.plan.stages_per_rank

    @property
    def _pipeline_components(self) -> LLMPipelineComponents:
        if self._parts is None:
            raise SetupError("The stages do not exist yet. Use them after the trainer has set up the strategy.")
        return self._parts

    def print_stages(self) -> None:
        """Print what each rank holds (modules, parameters, bytes), on the first rank. Every rank must call this."""
        self._pipeline_components.print_stages()

    @property
    def distributed_sampler_kwargs(self) -> dict[str, Any]:
        """Arguments of Lightning's sampler, with one replica per group of ranks that read the same data."""
        parts = self._components_builder.meshes.same_batch
        group_index = next(index for index, ranks in enumerate(parts) if self.global_rank in ranks)
        return {"num_replicas": len(parts), "rank": group_index}

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

    @property
    def same_batch_rank_groups(self) -> list[list[int]]:
        """Groups of ranks that read the same batches."""
        return self._components_builder.meshes.same_batch

    @property
    def all_ranks_share_data(self) -> bool:  # type: ignore[override]
        """True if all ranks belong to one pipeline, which reads one stream of batches."""
        return len(self._components_builder.meshes.same_batch) == 1

    # ------------------------------------------------------------------ the program

    def training_program(self, trainer: pl.Trainer, transfer: Callable[[Any], Any]) -> TrainingProgram:
        """Build the tasks and the plan. The training loop calls this method when training begins."""
        plan = llm_plan(transfer, self._pipeline_components.preparation.begin, self._store_prepared_batch)
        self._program = TrainingProgram(
            SWPipeline(plan, self.root_device),
            transfer="H2D",
            forward="ScheduleStep",
            backward="ScaleGradients",
            step="OptimStep",
        )
        return self._program

    def evaluation_program(self, trainer: pl.Trainer, transfer: Callable[[Any], Any], step: str) -> EvaluationProgram:
        """Build the tasks and the plan that evaluate the batches of one dataloader."""
        plan = llm_evaluation_plan(transfer, self._pipeline_components.preparation.begin, name=step)
        program = EvaluationProgram(SWPipeline(plan, self.root_device), transfer="H2D", step="ScheduleForward")
        self._evaluations.append(program)
        return program

    @property
    def pipeline(self) -> SWPipeline:
        """Pipeline of tasks that is running. Available while ``Trainer.fit`` runs."""
        return self._active_training_program.pipeline

    @property
    def _active_training_program(self) -> TrainingProgram:
        if self._program is None:
            raise SetupError("The training pipeline does not exist yet. Use it after Trainer.fit has begun training.")
        return self._program

    def _run_batch(self, batch: Any) -> BatchResult:
        result = self._pipeline_components.runs.run(batch, self._pop_prepared("run", batch))
        if self._coordinator is not None:
            # The loss is a mean over all pipelines, so ranks that do not have this batch log it too.
            self._coordinator.results.append(result.loss)
        return result

    def _predict(self, batch: Any) -> Any:
        return self._pipeline_components.runs.predict(batch, self._pop_prepared("predict", batch))

    def _store_prepared_batch(self, prepared: BatchInPreparation | None) -> None:
        self._prepared_batch = prepared

    def _pop_prepared(self, step: str, batch: Any) -> BatchInPreparation | None:
        if self._coordinator is None:
            evaluated = next((program.current for program in self._evaluations if program.current is not None), None)
            if evaluated is not None:  # this method runs on behalf of the task ScheduleForward
                return cast("BatchInPreparation | None", evaluated.pop("prepared"))
            handed_over, self._prepared_batch = self._prepared_batch, None
            return handed_over
        self._coordinator.announce_collective(step, move_data_to_device(batch, torch.device("cpu")))
        return None

    def join_collective_of_other_rank(self, action: str, payload: Any) -> None:
        """Run a batch of another pipeline without counting it.

        The stages of the other pipeline may gather parameters from this rank.
        """
        if action not in ("run", "predict"):
            super().join_collective_of_other_rank(action, payload)
            return
        with self.precision_plugin.forward_context():
            self._pipeline_components.runs.run_uncounted(
                move_data_to_device(payload, self.root_device), with_losses=action == "run"
            )

    # ------------------------------------------------------------------ Lightning's calls during a batch

    def training_step(self, *args: Any, **kwargs: Any) -> Any:
        step = super().training_step
        ctx = self._active_training_program.set_training_step(lambda: step(*args, **kwargs))
        self._active_training_program.pipeline.run_until(self._active_training_program.forward)
        return ctx.output

    def backward(self, closure_loss: Tensor, optimizer: Optimizer | None, *args: Any, **kwargs: Any) -> Any:
        """Divide gradients by the number of tokens after the last batch of a step.

        The schedule has already computed the gradients in ``training_step``.
        """
        module = self.lightning_module
        assert module is not None
        if closure_loss.requires_grad:
            raise InputError(
                "training_step returned a loss that requires gradients, but the schedule has already run backward in"
                " run_batch, so terms added to its loss have no effect. Add such terms in summed_loss, multiplied by"
                " the number of loss tokens."
            )
        self.pre_backward(closure_loss)
        loss = closure_loss.detach()
        call_callback_hooks(module.trainer, "on_before_backward", loss)
        call_module_hook(module.trainer, "on_before_backward", loss)
        self._active_training_program.run_backward(self._divide_by_tokens)
        call_callback_hooks(module.trainer, "on_after_backward")
        call_module_hook(module.trainer, "on_after_backward")
        self.post_backward(loss)
        return loss

    def _divide_by_tokens(self) -> None:
        module = self.lightning_module
        assert module is not None
        if not is_accumulating(module.trainer.fit_loop.epoch_loop):
            self._pipeline_components.gradients.finalize_grads()
            self._pipeline_components.runs.divide_gradients(list(module.parameters()))

    def optimizer_step(self, optimizer: Optimizer, closure: Callable[[], Any], model: Any = None, **kwargs: Any) -> Any:
        program = self._active_training_program

        def closure_and_open_step() -> Any:
            result = closure()
            if result is None:
                raise InputError(
                    "training_step returned None to skip a batch whose gradients have already been computed. Return the"
                    " loss, or return -1 from on_train_batch_start to end the epoch before the batch."
                )
            program.begin_step_task()
            return result

        output = super().optimizer_step(optimizer, closure_and_open_step, model, **kwargs)
        program.end_step_task()
        return output

    # ------------------------------------------------------------------ checkpoints

    def save_checkpoint(self, checkpoint: dict[str, Any], filepath: str | Path, storage_options: Any = None) -> None:
        """Write a checkpoint folder (``torch.distributed.checkpoint``), into which every rank writes its stages."""
        module = self.lightning_module
        assert module is not None
        order = [f"model.{name}" for name in self._pipeline_components.split.names]
        path = self._agreed_path(filepath, storage_options)
        save_stage_checkpoint(checkpoint, path, module, self.optimizers, order, self._write_folder)

    def load_checkpoint(self, checkpoint_path: str | Path, weights_only: bool | None = None) -> dict[str, Any]:
        """Read a folder that :meth:`save_checkpoint` wrote, with the same or other stages."""
        module = self.lightning_module
        assert module is not None
        fitting = module.trainer.state.fn == TrainerFn.FITTING
        optimizers = self.optimizers if fitting else None
        strict, weights_only = module.strict_loading, self._resolve_weights_only(weights_only)
        return load_stage_checkpoint(checkpoint_path, module, optimizers, strict=strict, weights_only=weights_only)

    def load_optimizer_state_dict(self, checkpoint: Mapping[str, Any]) -> None:
        """Load the optimizers' states; offloaded ones return to the host.

        Args:
            checkpoint: checkpoint as Lightning reads it, with ``optimizer_states``.
        """
        super().load_optimizer_state_dict(checkpoint)
        for state in self._offloaded:
            state.move_to_host()  # Lightning has moved the states to the devices of their parameters

    # ------------------------------------------------------------------ end

    def teardown(self) -> None:
        for program in (*self._evaluations, *([] if self._program is None else [self._program])):
            program.close()
        self._program, self._evaluations = None, []
        module = self.lightning_module
        if isinstance(module, PipelineModule):
            module._run_in_stages = module._predict_in_stages = None
        self.precision_plugin.__dict__.pop("clip_grad_by_norm", None)
        if self._parts is not None and self._parts.scaling is not None:
            self._parts.scaling.close()
        for state in self._offloaded:
            state.stop_offloading()
        self._offloaded = []
        if self._restore_buffers is not None:
            self._restore_buffers()
            self._restore_buffers = None
        super().teardown()


def check_pipeline_module(module: pl.LightningModule | None, fitting: bool) -> PipelineModule:
    """Return the module if a schedule can run it."""
    if not isinstance(module, PipelineModule):
        raise SetupError(
            f"The module must be a lightning_pipe.strategies.PipelineModule, got {type(module).__name__}. Derive it"
            " from PipelineModule and define build_model, or use another strategy."
        )
    if not module.automatic_optimization:
        raise SetupError(
            "The module uses manual optimization (automatic_optimization is False), but a pipeline schedule runs"
            " forward and backward together. Use automatic optimization."
        )
    if fitting and is_overridden("backward", module):
        raise SetupError(
            f"{type(module).__name__} overrides backward, which pipeline schedules do not call: gradients are complete"
            " when training_step returns. Change the loss in summed_loss, or gradients in on_after_backward."
        )
    return module
