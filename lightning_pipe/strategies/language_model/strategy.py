"""Language models in pipeline stages, under a Trainer."""

from __future__ import annotations

import warnings
from collections.abc import Callable, Generator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import lightning.pytorch as pl
import torch
import torch.distributed as dist
from lightning.fabric.utilities.apply_func import move_data_to_device
from lightning.fabric.utilities.optimizer import _optimizers_to_device
from lightning.pytorch.trainer import call
from lightning.pytorch.trainer.states import TrainerFn
from torch import Tensor
from torch.distributed.device_mesh import DeviceMesh
from torch.optim import Optimizer

from lightning_pipe.engine import InputError, SetupError, SWPipeline
from lightning_pipe.engine.ranks.agreement import check_agreement
from lightning_pipe.llm.batches.batching import Batching
from lightning_pipe.llm.model.activation_checkpoint import ActivationCheckpoint
from lightning_pipe.llm.model.compiled_layers import keep_backward_buffers
from lightning_pipe.llm.parallel.dimensions import ParallelDims
from lightning_pipe.llm.run.optimizer_offload import OffloadedState
from lightning_pipe.llm.run.preparation import PreparedBatch
from lightning_pipe.llm.run.recorder import StageRecorder
from lightning_pipe.llm.run.runner import PipelineRunner
from lightning_pipe.llm.schedules.checks import check_microbatches, splits_backward
from lightning_pipe.llm.schedules.named import ScheduleSpec, find_schedule
from lightning_pipe.llm.split.options import SplitOptions
from lightning_pipe.loops import EvaluationProgram, PipelineTrainingEpochLoop, TrainingProgram
from lightning_pipe.loops.data.batch_source import Uneven
from lightning_pipe.loops.evaluation_loop import install_evaluation_loops
from lightning_pipe.loops.interrupted_save import install_interrupted_saves
from lightning_pipe.loops.programs.zero_grad_first import ZeroGradFirst
from lightning_pipe.loops.turns import UnevenEvaluation
from lightning_pipe.strategies.checkpoint_folder import FolderCheckpointStrategy
from lightning_pipe.strategies.language_model.optimizer_setup import empty_optimizers_allowed, refuse_fused
from lightning_pipe.strategies.language_model.options import LLMOptions, option_group, option_pairs
from lightning_pipe.strategies.language_model.pipeline_module import BatchResult, PipelineModule
from lightning_pipe.strategies.language_model.programs import StagePrograms
from lightning_pipe.strategies.language_model.renamed import refuse_renamed
from lightning_pipe.strategies.language_model.shared_data import check_module, shuffle_alike
from lightning_pipe.strategies.language_model.stage_checkpoint import load_stage_checkpoint, save_stage_checkpoint
from lightning_pipe.strategies.language_model.stage_parts import StageParts, StagePlan, StageSettings
from lightning_pipe.strategies.language_model.stages import Stages
from lightning_pipe.strategies.refusals import refuse_callbacks_of_whole_modules
from lightning_pipe.strategies.running import Running, RunningStages


class LLMPipelineStrategy(FolderCheckpointStrategy):
    """Cuts a :class:`PipelineModule`'s model into stages and trains it under a pipeline schedule.

    Each rank makes and keeps its stages only. Gradients of the loss, summed over tokens, are divided once by the number
    of tokens of the whole batch: of all micro-batches, of all data-parallel ranks, of all batches accumulated.

    Ranks are laid out stages first: with two stages and two data-parallel ranks, ranks 0 and 1 hold stage 0.

    Option groups may be given as the dataclass or as a mapping of its fields, which is what YAML has.

    Args:
        schedule: a name (``gpipe``, ``1f1b``, ``looped_bfs``, ``interleaved_1f1b``, ``interleaved_zero_bubble``,
            ``zbv_zero_bubble``, ``dualpipev``), the name of one of PyTorch's schedule classes, such a class, or the
            path of a CSV file of actions.
        num_microbatches: number of parts that a batch is cut into; by default twice the ranks of a pipeline.
        stages_per_rank: number of stages that a rank holds; by default one, or two for schedules that take several.
        parallel: :class:`ParallelDims`, the number of ranks in each parallel dimension; by default one pipeline.
        split: :class:`SplitOptions`, where the model is cut; by default the same number of layers on each stage.
        batching: :class:`Batching`, how batches are padded, cut and compared.
        activation_checkpoint: :class:`ActivationCheckpoint`, layers that compute again in backward; by default none.
        compile_layers: True or options to ``torch.compile`` each layer (default False).
        offload_optimizer: keep the optimizers' states on the host (default False).
        uneven_batches: where some ranks have fewer batches, end the epoch with the ``shortest`` (default), or raise an
            ``error``.
        uneven_evaluation: where some pipelines have fewer batches to validate, test or predict: ``join`` (default) lets
            them take part in the batches of the others, so that each row is evaluated once. ``error`` refuses to
            validate and test, and keeps Lightning's sampler, which repeats rows.
        async_checkpoints: while training, copy what is saved to the host and write it in the background (default
            False). The next save, and the end of training, wait for it and raise its errors. Costs the memory of the
            copy.
        arguments: of Lightning's ``DDPStrategy``: ``accelerator``, ``parallel_devices``, ``cluster_environment``,
            ``precision_plugin``, ``process_group_backend``, ``timeout``, ``start_method``.

    Raises:
        SetupError: a value of the wrong kind, options that exclude each other, or an argument of a former version; the
            last prints YAML of the options that have replaced it.
    """

    evaluates_together = True
    logs_for_all = True

    def __init__(
        self,
        schedule: Any = "1f1b",
        *,
        num_microbatches: int | None = None,
        stages_per_rank: int | None = None,
        parallel: ParallelDims | Mapping[str, Any] | None = None,
        split: SplitOptions | Mapping[str, Any] | None = None,
        batching: Batching | Mapping[str, Any] | None = None,
        activation_checkpoint: ActivationCheckpoint | Mapping[str, Any] | None = None,
        compile_layers: bool | Mapping[str, Any] = False,
        offload_optimizer: bool = False,
        uneven_batches: Uneven = "shortest",
        uneven_evaluation: UnevenEvaluation = "join",
        async_checkpoints: bool = False,
        **arguments: Any,
    ) -> None:
        refuse_renamed(arguments)
        super().__init__(async_checkpoints=async_checkpoints, **arguments)
        self._take_uneven(uneven_batches, uneven_evaluation)
        self._options = LLMOptions(
            find_schedule(schedule),
            num_microbatches,
            stages_per_rank,
            option_group(ParallelDims, "parallel", parallel),
            option_group(SplitOptions, "split", split),
            option_group(Batching, "batching", batching),
            None
            if activation_checkpoint is None
            else option_group(ActivationCheckpoint, "activation_checkpoint", activation_checkpoint),
            compile_layers,
            offload_optimizer,
        )
        uneven = {"uneven_batches": uneven_batches, "uneven_evaluation": uneven_evaluation}
        others = {**uneven, "async_checkpoints": async_checkpoints}
        self._agreed = [*option_pairs("", self._options), *((name, repr(value)) for name, value in others.items())]
        self._set_up: Stages | None = None
        self._offloaded: list[OffloadedState] = []
        self._put_back: Callable[[], None] | None = None
        self._programs = StagePrograms()

    # ------------------------------------------------------------------ set-up

    def setup_environment(self) -> None:
        super().setup_environment()
        # First of all: what follows would hang where ranks differ.
        check_agreement(self._agreed, "pipeline's configuration", dist.group.WORLD, error=SetupError)
        settings = self.settings(self.world_size)
        self._check_plan(settings.plan, settings.sizes)
        self._set_up = Stages(settings, self.root_device, self.precision_plugin, self._timeout, self._set_up)

    def settings(self, world_size: int) -> StageSettings:
        """What is asked for, on so many ranks.

        Raises:
            SetupError: that many ranks cannot do it.
        """
        sizes = self._options.parallel.fit(world_size)
        return self._options.settings(self._first_plan(sizes), sizes)

    def _first_plan(self, sizes: ParallelDims) -> StagePlan:
        """How models are cut and scheduled, as far as that is known without one."""
        return self._options.plan(sizes)

    def _check_plan(self, plan: StagePlan, sizes: ParallelDims) -> None:
        """Refuse what would hang, or train on wrong gradients; and see to what the plan needs."""
        check_microbatches(plan.spec, plan.num_microbatches, plan.pipeline_size, plan.stages_per_rank)
        compiled = self._options.compile_options is not None
        if compiled and self._put_back is None and splits_backward(plan.spec) is not False:
            self._put_back = keep_backward_buffers()
        self._options.check_schedule(plan.spec, sizes)

    @property
    def device_mesh(self) -> DeviceMesh:
        """Ranks by their stages (``pipeline``), by their part of the data (``replicate``, ``shard``) and of tensors."""
        return self._stages.meshes.root

    @property
    def _stages(self) -> Stages:
        if self._set_up is None:
            raise SetupError("there is no device mesh yet; the trainer makes it when it sets the strategy up")
        return self._set_up

    @property
    def runner(self) -> PipelineRunner:
        """What runs this rank's stages."""
        return self._made.runner

    def running(self) -> Running:
        """Answers of this strategy to callbacks, once the trainer has set it up."""
        return Running(
            title=f"schedule {self.schedule_spec.name}",
            record=lambda keep: StageRecorder(self.runner, self.device_mesh, keep),
            stages=RunningStages(
                self.runner, self.schedule_spec, self.num_microbatches, self.stages_per_rank, self.device_mesh
            ),
        )

    @property
    def plan(self) -> StagePlan:
        """How the model at work is cut and scheduled."""
        return self._stages.plan

    @property
    def schedule_spec(self) -> ScheduleSpec:
        """The schedule."""
        return self._options.schedule if self._set_up is None else self._set_up.plan.spec

    @property
    def pipeline_size(self) -> int:
        """Ranks of a pipeline."""
        return self._stages.meshes.dimensions.pp

    @property
    def num_microbatches(self) -> int:
        """Parts that a batch is cut into."""
        return self.plan.num_microbatches

    @property
    def stages_per_rank(self) -> int:
        """Stages that each rank holds."""
        return self.plan.stages_per_rank

    @property
    def distributed_sampler_kwargs(self) -> dict[str, Any]:
        """All ranks of a pipeline read the same data."""
        parts = self._stages.meshes.same_batch
        mine = next(index for index, ranks in enumerate(parts) if self.global_rank in ranks)
        return {"num_replicas": len(parts), "rank": mine}

    def process_dataloader(self, dataloader: object) -> object:
        """Let the ranks of a pipeline shuffle alike, whatever each has drawn from its own random stream."""
        module = self.lightning_module
        shuffle_alike(dataloader, 0 if module is None else module.trainer.current_epoch)
        return super().process_dataloader(dataloader)

    @contextmanager
    def model_sharded_context(self) -> Generator[None, None, None]:
        """What is made in the body takes no memory until it is split."""
        with self._stages.deferred():
            yield

    def setup(self, trainer: pl.Trainer) -> None:
        assert self.accelerator is not None
        self.accelerator.setup(trainer)
        fitting = trainer.state.fn == TrainerFn.FITTING
        if len(self._stages.meshes.same_batch) == 1:
            # One pipeline reads all data, in its loaders' order. Lightning's sampler would shuffle it.
            trainer._accelerator_connector.use_distributed_sampler = False
        module = check_module(self.lightning_module, fitting)
        if fitting and self.world_size > 1:
            refuse_callbacks_of_whole_modules(trainer)
        self._stages.split(module, self._plan_for)
        self.precision_plugin.convert_module(module)
        self.model_to_device()
        for loop in (trainer.validate_loop, trainer.test_loop, trainer.predict_loop):
            loop.inference_mode = False  # buffers made there could not be trained with
        # The base class's losses are the same on every rank already.
        warnings.filterwarnings(
            "ignore", r"It is recommended to use `self\.log\('(val|test)_loss', \.\.\., sync_dist=True"
        )
        module._run_in_stages, module._predict_in_stages = self._run_batch, self._predict
        install_evaluation_loops(trainer)
        install_interrupted_saves(trainer)
        if fitting:
            PipelineTrainingEpochLoop.install(trainer)
            ZeroGradFirst.install(trainer, self._made.runs.begin_step)
            with empty_optimizers_allowed():
                self.setup_optimizers(trainer)
            if self._made.scaling is not None:
                refuse_fused(self.optimizers)
                self._made.scaling.install()
            self._made.gradients.check_copies(self.optimizers)
            # The plugin's own would be each stage's norm.
            self.precision_plugin.clip_grad_by_norm = self._made.gradients.clip  # type: ignore[method-assign]
        self.setup_precision_plugin()
        if fitting:
            _optimizers_to_device(self.optimizers, self.root_device)
            offloaded = self.optimizers if self._options.offload_optimizer else []
            self._offloaded = [OffloadedState(one) for one in offloaded]

    def _plan_for(self, module: PipelineModule) -> StagePlan:
        """How to cut and schedule a module that has not been cut yet."""
        return self._stages.maker.settings.plan

    @property
    def _made(self) -> StageParts:
        if self._set_up is None or self._set_up.parts is None:
            raise SetupError("there are no stages yet; the trainer makes them when it sets the strategy up")
        return self._set_up.parts

    # ------------------------------------------------------------------ the program

    def training_program(self, trainer: pl.Trainer, transfer: Callable[[Any], Any]) -> TrainingProgram:
        """Build tasks and plan; the training loop asks for it when training begins."""
        return self._programs.train(transfer, self._made.preparation.begin, self.root_device)

    def evaluation_program(self, trainer: pl.Trainer, transfer: Callable[[Any], Any], step: str) -> EvaluationProgram:
        """Build tasks and plan for evaluating the batches of one dataloader."""
        return self._programs.evaluate(transfer, self._made.preparation.begin, self.root_device, step)

    @property
    def ranks_share_data(self) -> bool:  # type: ignore[override]
        """Whether all ranks are of one pipeline, which reads one stream of batches."""
        return len(self._stages.meshes.same_batch) == 1

    @property
    def pipeline(self) -> SWPipeline:
        """The tasks at work, while ``Trainer.fit`` runs."""
        return self._programs.training.pipeline

    def _run_batch(self, batch: Any) -> BatchResult:
        result = self._made.runs.run(batch, self._prepared("run", batch))
        if self._turn is not None:
            # The loss is a mean over all pipelines, so ranks without the batch log it too.
            self._turn.results.append(result.loss)
        return result

    def _predict(self, batch: Any) -> Any:
        return self._made.runs.predict(batch, self._prepared("predict", batch))

    def _prepared(self, what: str, batch: Any) -> PreparedBatch | None:
        if self._turn is None:
            return self._programs.prepared_ahead()
        self._turn.call(what, move_data_to_device(batch, torch.device("cpu")))
        return None

    def join_evaluation(self, what: str, detail: Any) -> None:
        """Run another pipeline's batch without counting it. Its stages may gather parameters from this rank."""
        if what not in ("run", "predict"):
            super().join_evaluation(what, detail)
            return
        with self.precision_plugin.forward_context():
            self._made.runs.join(move_data_to_device(detail, self.root_device), with_losses=what == "run")

    @property
    def ranks_of_one_batch(self) -> list[list[int]]:
        """Groups of ranks that read the same batches."""
        return self._stages.meshes.same_batch

    def _trainer(self) -> pl.Trainer:
        module = self.lightning_module
        assert module is not None
        return module.trainer

    # ------------------------------------------------------------------ Lightning's calls during a batch

    def training_step(self, *args: Any, **kwargs: Any) -> Any:
        step = super().training_step
        return self._programs.training.run_forward(lambda: step(*args, **kwargs))

    def backward(self, closure_loss: Tensor, optimizer: Optimizer | None, *args: Any, **kwargs: Any) -> Any:
        """Gradients are there already; divide them by the tokens, once all batches of the step are in."""
        module = self.lightning_module
        assert module is not None
        if closure_loss.requires_grad:
            raise InputError(
                "training_step returned a loss with a gradient of its own, but in stages the gradients are there when"
                " run_batch returns, and nothing that is added to its loss has any effect on them. Put it into"
                " summed_loss, times the number of loss tokens"
            )
        self.pre_backward(closure_loss)
        loss = closure_loss.detach()
        call._call_callback_hooks(module.trainer, "on_before_backward", loss)
        call._call_lightning_module_hook(module.trainer, "on_before_backward", loss)
        self._programs.training.run_backward(self._divide_by_tokens)
        call._call_callback_hooks(module.trainer, "on_after_backward")
        call._call_lightning_module_hook(module.trainer, "on_after_backward")
        self.post_backward(loss)
        return loss

    def _divide_by_tokens(self) -> None:
        module = self.lightning_module
        assert module is not None
        if not module.trainer.fit_loop._should_accumulate():
            self._made.gradients.finish()
            self._made.runs.divide(list(module.parameters()))

    def optimizer_step(self, optimizer: Optimizer, closure: Callable[[], Any], model: Any = None, **kwargs: Any) -> Any:
        program = self._programs.training

        def closure_and_open_step() -> Any:
            result = closure()
            if result is None:
                raise InputError(
                    "training_step returned None to skip a batch, whose gradients are there already; skip it in"
                    " on_train_batch_start (return -1), or return the loss"
                )
            program.begin_step()
            return result

        output = super().optimizer_step(optimizer, closure_and_open_step, model, **kwargs)
        program.end_step()
        return output

    # ------------------------------------------------------------------ checkpoints

    def load_optimizer_state_dict(self, checkpoint: Mapping[str, Any]) -> None:
        super().load_optimizer_state_dict(checkpoint)
        for one in self._offloaded:
            one.rest()  # Lightning puts states to their parameters

    def save_checkpoint(self, checkpoint: dict[str, Any], filepath: str | Path, storage_options: Any = None) -> None:
        """Write a folder that every rank writes its stages' part into (``torch.distributed.checkpoint``)."""
        module = self.lightning_module
        assert module is not None
        order = [f"model.{name}" for name in self._made.split.names]
        path = self._agreed_path(filepath, storage_options)
        save_stage_checkpoint(checkpoint, path, module, self.optimizers, order, self._write_folder)

    def load_checkpoint(self, checkpoint_path: str | Path, weights_only: bool | None = None) -> dict[str, Any]:
        """Read a folder that :meth:`save_checkpoint` wrote, on whatever stages."""
        module = self.lightning_module
        assert module is not None
        fitting = module.trainer.state.fn == TrainerFn.FITTING
        optimizers = self.optimizers if fitting else None
        strict, weights_only = module.strict_loading, self._allowed(weights_only)
        return load_stage_checkpoint(checkpoint_path, module, optimizers, strict=strict, weights_only=weights_only)

    # ------------------------------------------------------------------ end

    def teardown(self) -> None:
        self._programs.close()
        module = self.lightning_module
        if isinstance(module, PipelineModule):
            module._run_in_stages = module._predict_in_stages = None
        self.precision_plugin.__dict__.pop("clip_grad_by_norm", None)
        parts = None if self._set_up is None else self._set_up.parts
        if parts is not None and parts.scaling is not None:
            parts.scaling.close()
        for one in self._offloaded:
            one.close()
        self._offloaded = []
        if self._put_back is not None:
            self._put_back()
            self._put_back = None
        # What Lightning's own does, but for the move of the module to the CPU.
        assert self.cluster_environment is not None and self.accelerator is not None
        self.cluster_environment.teardown()
        self.precision_plugin.teardown()
        self.accelerator.teardown()
        self._note_end()
