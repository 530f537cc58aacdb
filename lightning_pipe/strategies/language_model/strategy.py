"""Language models in pipeline stages, under a Trainer."""

from __future__ import annotations

import math
import os
import warnings
from collections.abc import Callable, Generator, Mapping, Sequence
from contextlib import contextmanager
from datetime import timedelta
from pathlib import Path
from typing import Any, Literal

import lightning.pytorch as pl
import torch
import torch.distributed as dist
from lightning.fabric.utilities.apply_func import move_data_to_device
from lightning.fabric.utilities.optimizer import _optimizers_to_device
from lightning.pytorch.accelerators import Accelerator
from lightning.pytorch.plugins import ClusterEnvironment, Precision
from lightning.pytorch.trainer import call
from lightning.pytorch.trainer.states import TrainerFn
from lightning.pytorch.utilities.model_helpers import is_overridden
from torch import Tensor
from torch.distributed.device_mesh import DeviceMesh
from torch.optim import Optimizer

from lightning_pipe.engine import InputError, SetupError, SWPipeline
from lightning_pipe.engine.ranks.agreement import check_agreement
from lightning_pipe.engine.ranks.process_groups import new_group
from lightning_pipe.llm.model.compiled_layers import keep_backward_buffers
from lightning_pipe.llm.model.deferred import DeferredInit, deferred_init
from lightning_pipe.llm.parallel.context_ranks import ContextMethod, length_multiple
from lightning_pipe.llm.parallel.dimensions import Dimensions, StageMeshes
from lightning_pipe.llm.parallel.stage_parallel import StageParallelism
from lightning_pipe.llm.run.optimizer_offload import OffloadedState
from lightning_pipe.llm.run.preparation import Lengths, PreparedBatch
from lightning_pipe.llm.run.runner import PipelineRunner
from lightning_pipe.llm.run.training_tasks import llm_evaluation_plan, llm_plan
from lightning_pipe.llm.schedules.checks import check_combination, check_microbatches, splits_backward
from lightning_pipe.llm.schedules.named import ScheduleSpec, count_stages, find_schedule
from lightning_pipe.llm.split.stage_split import SplitOptions
from lightning_pipe.loops import EvaluationProgram, PipelineTrainingEpochLoop, TrainingProgram
from lightning_pipe.loops.data.batch_source import Uneven
from lightning_pipe.loops.evaluation_loop import install_evaluation_loops
from lightning_pipe.loops.interrupted_save import install_interrupted_saves
from lightning_pipe.loops.programs.zero_grad_first import ZeroGradFirst
from lightning_pipe.loops.turns import UnevenEvaluation
from lightning_pipe.strategies.checkpoint_folder import FolderCheckpointStrategy
from lightning_pipe.strategies.language_model.arguments import check_arguments
from lightning_pipe.strategies.language_model.optimizer_setup import empty_optimizers_allowed, refuse_fused
from lightning_pipe.strategies.language_model.pipeline_module import BatchResult, PipelineModule
from lightning_pipe.strategies.language_model.stage_checkpoint import load_stage_checkpoint, save_stage_checkpoint
from lightning_pipe.strategies.language_model.stage_parts import PartsMaker, StageParts, StagePlan, StageSettings
from lightning_pipe.strategies.refusals import refuse_callbacks_of_whole_modules

# Arguments that may differ between ranks.
_OF_RANKS = {
    *("self", "__class__", "accelerator", "parallel_devices", "cluster_environment", "precision_plugin"),
    *("process_group_backend", "timeout", "start_method"),
}


class LLMPipelineStrategy(FolderCheckpointStrategy):
    """Cuts a :class:`PipelineModule`'s model into stages and trains it under a pipeline schedule.

    Each rank makes and keeps its stages only. Gradients of the loss, summed over tokens, are divided once by the number
    of tokens of the whole batch: of all micro-batches, of all data-parallel ranks, of all batches accumulated.

    Ranks are laid out stages first: with two stages and two data-parallel ranks, ranks 0 and 1 hold stage 0.

    Args:
        schedule: a name (``gpipe``, ``1f1b``, ``looped_bfs``, ``interleaved_1f1b``, ``interleaved_zero_bubble``,
            ``zbv_zero_bubble``, ``dualpipev``), the name of one of PyTorch's schedule classes, such a class, or the
            path of a CSV file of actions.
        pipeline_parallel_size: number of ranks in a pipeline; by default all that the other dimensions leave.
        num_microbatches: parts that a batch is cut into; by default the fewest that the schedule needs, twice.
        stages_per_rank: by default one, or two for schedules that take several.
        layers_per_stage: the number of layers of each stage; by default as ``balance`` says.
        layer_ranges: instead, for each stage its first layer and the one after its last.
        balance: stages of as many ``layers``, or of as even ``time`` or ``memory`` as can be. The latter are measured
            when training is set up, with the module's ``example_micro_batch``.
        input_weight: how many layers the modules before the first layer count for, in an even split.
        output_weight: the same for the modules after the last.
        split_spec: for models that are not lists of layers: the forward is traced, with ``example_micro_batch``, and
            cut at the ``beginning`` or ``end`` of these modules (by FQN), and where it calls ``pipe_split``.
        split_policy: puts split points into a trace, as PyTorch's ``pipeline`` has it; ``equal_size`` for as many
            parameters in each stage.
        data_parallel_shard_size: number of ranks over which each stage's parameters, gradients and optimiser state are
            sharded (FSDP2).
        data_parallel_replicate_size: number of replicas of each stage, sharded or not.
        context_parallel_size: number of ranks that share each sequence; lengths are rounded up to a multiple of it.
            Attention must go through ``scaled_dot_product_attention``.
        context_parallel_method: in attention those ranks exchange heads for tokens (``ulysses``, which asks for as many
            heads), or send keys and values round (``ring``, for as many ranks as one likes; lengths are rounded up to
            a multiple of twice the size). With masks of padding or documents the ring gathers keys and values.
        tensor_parallel_size: number of ranks that share the matrices of each layer. The model says how, by its Hugging
            Face config or by ``get_tensor_parallel_plan()``.
        expert_parallel_size: number of ranks, among those of the two sizes for sharding and context, that share the
            experts of :class:`~lightning_pipe.llm.model.moe.MoE` layers.
        reshard_after_forward: let gathered parameters go after each micro-batch's forward: less memory for more
            communication; by default they stay until the step's end. Zero-bubble schedules refuse it.
        variable_lengths: pad to the longest sequence of the step, instead of to ``max_length``.
        max_length: the most tokens a sequence may have; by default the module's ``max_sequence_length``.
        pad_to_multiple_of: lengths are rounded up to a multiple of this.
        length_buckets: lengths are rounded up to the next of these.
        pad_values: more keys of the batch to pad in dimension 1, with what.
        strict_batches: refuse a batch whose rows do not fill the micro-batches, instead of filling it with copies.
        uneven_batches: where some ranks have fewer batches, end the epoch with the ``shortest``, or raise an ``error``.
        uneven_evaluation: where some pipelines have fewer batches to validate, test or predict: ``join`` lets them take
            part in the others' batches, so that each row is evaluated once. ``error`` refuses to validate and test, and
            leaves Lightning's sampler, which repeats rows.
        compare_batches: compare the ranks' batches, tensor by tensor, in every step; in any case they compare sizes.
        schedule_cache_bytes: the most that the buffers of schedules for other lengths may take, on any rank.
        tied_embeddings: where stages on two ranks hold one parameter, an embedding and a head, ``sum`` the gradients of
            both copies in every step, or ``refuse`` such a model.
        activation_checkpointing: compute layers again in backward: ``full``, or ``selective``, which keeps the results
            of matrix multiplications and attention.
        activation_checkpointing_every: only every so many layers.
        compile_layers: ``torch.compile`` each layer, with these options.
        offload_optimizer: keep the optimisers' states on the host.
        async_checkpoints: while training, copy what is saved to the host and write it as training goes on. The next
            save, and the end of training, wait for it and raise what went wrong. Costs the memory of the copy.
        accelerator: as Lightning's ``DDPStrategy``, and so are the others.
        parallel_devices: see there.
        cluster_environment: see there.
        precision_plugin: see there.
        process_group_backend: see there.
        timeout: see there.
        start_method: see there.
    """

    evaluates_together = True
    logs_for_all = True

    def __init__(
        self,
        schedule: Any = "1f1b",
        *,
        pipeline_parallel_size: int | None = None,
        num_microbatches: int | None = None,
        stages_per_rank: int | None = None,
        layers_per_stage: Sequence[int] | None = None,
        layer_ranges: Sequence[Sequence[int]] | None = None,
        balance: Literal["layers", "time", "memory"] = "layers",
        input_weight: int = 1,
        output_weight: int = 1,
        split_spec: Mapping[str, Any] | None = None,
        split_policy: Any = None,
        data_parallel_shard_size: int = 1,
        data_parallel_replicate_size: int = 1,
        context_parallel_size: int = 1,
        context_parallel_method: ContextMethod = "ulysses",
        tensor_parallel_size: int = 1,
        expert_parallel_size: int = 1,
        reshard_after_forward: bool | None = None,
        variable_lengths: bool = True,
        max_length: int | None = None,
        pad_to_multiple_of: int = 1,
        length_buckets: Sequence[int] | None = None,
        pad_values: Mapping[str, float] | None = None,
        strict_batches: bool = False,
        uneven_batches: Uneven = "shortest",
        uneven_evaluation: UnevenEvaluation = "join",
        compare_batches: bool = False,
        schedule_cache_bytes: int = 2**30,
        tied_embeddings: Literal["sum", "refuse"] = "sum",
        activation_checkpointing: Literal["full", "selective"] | None = None,
        activation_checkpointing_every: int = 1,
        compile_layers: bool | Mapping[str, Any] = False,
        offload_optimizer: bool = False,
        async_checkpoints: bool = False,
        accelerator: Accelerator | None = None,
        parallel_devices: list[torch.device] | None = None,
        cluster_environment: ClusterEnvironment | None = None,
        precision_plugin: Precision | None = None,
        process_group_backend: str | None = None,
        timeout: timedelta | None = timedelta(minutes=30),
        start_method: Literal["popen", "spawn", "fork", "forkserver"] = "popen",
    ) -> None:
        arguments = {name: value for name, value in locals().items() if name not in _OF_RANKS}
        check_arguments(arguments)
        super().__init__(
            async_checkpoints=async_checkpoints,
            accelerator=accelerator,
            parallel_devices=parallel_devices,
            cluster_environment=cluster_environment,
            precision_plugin=precision_plugin,
            process_group_backend=process_group_backend,
            timeout=timeout,
            start_method=start_method,
        )
        self._take_uneven(uneven_batches, uneven_evaluation)
        self._given = {name: repr(value) for name, value in arguments.items()}
        self._asked_schedule = find_schedule(schedule)
        self._asked_size = pipeline_parallel_size
        self._asked_microbatches = num_microbatches
        self._asked_stages = stages_per_rank
        self._split_options = SplitOptions(
            None if layers_per_stage is None else tuple(layers_per_stage),
            None if layer_ranges is None else tuple((first, end) for first, end in layer_ranges),
            balance,
            (input_weight, output_weight),
            split_spec,
            split_policy,
            tied_embeddings == "sum",
        )
        self._asked = Dimensions(
            replicate=data_parallel_replicate_size,
            shard=data_parallel_shard_size,
            context=context_parallel_size,
            tensor=tensor_parallel_size,
            expert=expert_parallel_size,
        )
        self._reshard_after_forward = reshard_after_forward
        self._context_method = context_parallel_method
        self._activations = activation_checkpointing, activation_checkpointing_every
        self._compile_options = None if compile_layers is False else {} if compile_layers is True else compile_layers
        self._offload = offload_optimizer
        self._lengths = Lengths(
            variable_lengths,
            math.lcm(pad_to_multiple_of, length_multiple(context_parallel_size, context_parallel_method)),
            max_length,
            tuple(length_buckets) if length_buckets else None,
        )
        self._compare_batches = compare_batches
        self._pad_values = dict(pad_values or {})
        self._strict = strict_batches
        self._cache_bytes = schedule_cache_bytes
        self._meshes: StageMeshes | None = None
        self._numbers_group: dist.ProcessGroup | None = None
        self._plan: StagePlan | None = None
        self._maker: PartsMaker | None = None
        self._known: dict[int, StageParts] = {}
        self._parts: StageParts | None = None
        self._offloaded: list[OffloadedState] = []
        self._put_back: Callable[[], None] | None = None
        self._program: TrainingProgram | None = None
        self._record: DeferredInit | None = None
        self._evaluations: list[EvaluationProgram] = []

    # ------------------------------------------------------------------ set-up

    def setup_environment(self) -> None:
        super().setup_environment()
        # First of all: what follows would hang where ranks differ.
        check_agreement(list(self._given.items()), "pipeline's configuration", dist.group.WORLD, error=SetupError)
        settings = self.settings(self.world_size)
        self._check_plan(settings.plan, settings.sizes)
        self._plan = settings.plan
        self._meshes = StageMeshes(settings.sizes, self.root_device.type)
        # On the CPU, since they carry a few numbers beside the schedule; two, since both may be under way at once.
        self._numbers_group = new_group(backend="gloo", timeout=self._timeout)
        loss_group = new_group(backend="gloo", timeout=self._timeout)
        assert self._numbers_group is not None and loss_group is not None
        self._maker = PartsMaker(
            settings, self._meshes, self.root_device, self.precision_plugin, self._numbers_group, loss_group
        )

    def settings(self, world_size: int) -> StageSettings:
        """What is asked for, on so many ranks.

        Raises:
            SetupError: that many ranks cannot do it.
        """
        sizes = self._asked.fit(world_size, self._asked_size)
        return StageSettings(
            self._first_plan(sizes),
            sizes,
            StageParallelism(
                None, bool(self._reshard_after_forward), *self._activations, self._compile_options, self._context_method
            ),
            self._lengths,
            self._pad_values,
            self._strict,
            self._compare_batches,
            self._cache_bytes,
            self._offload,
        )

    def _first_plan(self, sizes: Dimensions) -> StagePlan:
        """How models are to be cut and scheduled, as far as that is known without one."""
        per_rank = count_stages(self._asked_schedule, sizes.pipeline, self._asked_stages)
        count = self._asked_microbatches or 2 * max(sizes.pipeline, 1)
        return StagePlan(self._asked_schedule, sizes.pipeline, per_rank, count, self._split_options)

    def _check_plan(self, plan: StagePlan, sizes: Dimensions) -> None:
        """Refuse what would hang, or train on wrong gradients; and see to what the plan needs."""
        check_microbatches(plan.spec, plan.num_microbatches, plan.pipeline_size, plan.stages_per_rank)
        if self._compile_options is not None and self._put_back is None and splits_backward(plan.spec) is not False:
            self._put_back = keep_backward_buffers()
        self._check_combination(plan.spec, sizes)

    def _check_combination(self, spec: ScheduleSpec, sizes: Dimensions) -> None:
        check_combination(
            spec,
            sharding="fsdp" if sizes.shard > 1 else "replicate" if sizes.replicate * sizes.context > 1 else None,
            reshard_after_forward=self._reshard_after_forward,
            compiled=self._compile_options is not None,
        )

    @property
    def device_mesh(self) -> DeviceMesh:
        """Ranks by their stages (``pipeline``), by their part of the data (``replicate``, ``shard``) and of tensors."""
        return self._stage_meshes.root

    @property
    def _stage_meshes(self) -> StageMeshes:
        if self._meshes is None:
            raise SetupError("there is no device mesh yet; the trainer makes it when it sets the strategy up")
        return self._meshes

    @property
    def runner(self) -> PipelineRunner:
        """What runs this rank's stages."""
        return self._made.runner

    @property
    def plan(self) -> StagePlan:
        """How the model at work is cut and scheduled."""
        if self._plan is None:
            raise SetupError("there is no device mesh yet; the trainer makes it when it sets the strategy up")
        return self._plan if self._parts is None else self._parts.plan

    @property
    def schedule_spec(self) -> ScheduleSpec:
        """The schedule."""
        return self._asked_schedule if self._parts is None else self._parts.plan.spec

    @property
    def pipeline_size(self) -> int:
        """Ranks of a pipeline."""
        return self._stage_meshes.dimensions.pipeline

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
        parts = self._stage_meshes.same_batch
        mine = next(index for index, ranks in enumerate(parts) if self.global_rank in ranks)
        return {"num_replicas": len(parts), "rank": mine}

    def process_dataloader(self, dataloader: object) -> object:
        """Let the ranks of a pipeline shuffle alike, whatever each has drawn from its own random stream."""
        batches = getattr(dataloader, "batch_sampler", None)
        samplers: tuple[Any, ...] = (getattr(dataloader, "sampler", None), batches, getattr(batches, "sampler", None))
        module = self.lightning_module
        # Loaders that are made anew in each epoch, or for another fit, would all shuffle alike.
        seed = int(os.environ.get("PL_GLOBAL_SEED", 0)) + (0 if module is None else module.trainer.current_epoch)
        for sampler in samplers:
            # Random and weighted samplers, and users' own that are made like them.
            if getattr(sampler, "generator", self) is None:
                sampler.generator = torch.Generator().manual_seed(seed)
        return super().process_dataloader(dataloader)

    @contextmanager
    def model_sharded_context(self) -> Generator[None, None, None]:
        """What is made in the body takes no memory until it is split."""
        # Every rank draws what the first one would: one model, whoever makes which part of it.
        state = torch.get_rng_state()
        dist.broadcast(state, src=0, group=self._numbers_group)
        torch.set_rng_state(state)
        with deferred_init() as self._record:
            yield

    def setup(self, trainer: pl.Trainer) -> None:
        module = self.lightning_module
        assert self.accelerator is not None
        self.accelerator.setup(trainer)
        fitting = trainer.state.fn == TrainerFn.FITTING
        if len(self._stage_meshes.same_batch) == 1:
            # One pipeline reads all data, in its loaders' order. Lightning's sampler would shuffle it.
            trainer._accelerator_connector.use_distributed_sampler = False
        if not isinstance(module, PipelineModule):
            raise SetupError(
                f"the module is a {type(module).__name__}; needed is a lightning_pipe.strategies.PipelineModule, which"
                " says what its stages are made of and what its summed loss is"
            )
        if not module.automatic_optimization:
            raise SetupError(
                "the module optimises by hand (automatic_optimization is False), but a schedule runs forward and"
                " backward in one. Use automatic optimisation"
            )
        if fitting and is_overridden("backward", module):
            raise SetupError(
                f"{type(module).__name__} overrides backward, which no schedule calls: gradients are there when"
                " training_step has run. Change the loss in summed_loss, or gradients in on_after_backward"
            )
        if fitting and self.world_size > 1:
            refuse_callbacks_of_whole_modules(trainer)
        self._take_parts(module)
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
            with empty_optimizers_allowed(module, lambda: self.optimizers):
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
            self._offloaded = [OffloadedState(one) for one in self.optimizers] if self._offload else []

    def _take_parts(self, module: PipelineModule) -> None:
        """Split the module, unless that was done before; a trainer may be given several in turn."""
        parts = self._known.get(id(module.model))
        if parts is None:
            assert self._maker is not None
            self._maker.check(module)
            record, self._record = self._record, None
            parts = self._maker.make(module, self._plan_for(module), record)
            self._known[id(parts.split.kept)] = parts
        self._parts = parts

    def _plan_for(self, module: PipelineModule) -> StagePlan:
        """How to cut and schedule a module that has not been cut yet."""
        assert self._plan is not None
        return self._plan

    @property
    def _made(self) -> StageParts:
        if self._parts is None:
            raise SetupError("there are no stages yet; the trainer makes them when it sets the strategy up")
        return self._parts

    # ------------------------------------------------------------------ the program

    def training_program(self, trainer: pl.Trainer, transfer: Callable[[Any], Any]) -> TrainingProgram:
        """Build tasks and plan; the training loop asks for it when training begins."""
        plan = llm_plan(transfer, self._made.preparation.begin)
        self._program = TrainingProgram(
            SWPipeline(plan, self.root_device),
            transfer="H2D",
            forward="ScheduleStep",
            backward="ScaleGradients",
            step="OptimStep",
        )
        return self._program

    def evaluation_program(self, trainer: pl.Trainer, transfer: Callable[[Any], Any], step: str) -> EvaluationProgram:
        """Build tasks and plan for evaluating the batches of one dataloader."""
        plan = llm_evaluation_plan(transfer, self._made.preparation.begin, name=step)
        program = EvaluationProgram(SWPipeline(plan, self.root_device), transfer="H2D", step="ScheduleForward")
        self._evaluations.append(program)
        return program

    @property
    def ranks_share_data(self) -> bool:  # type: ignore[override]
        """Whether all ranks are of one pipeline, which reads one stream of batches."""
        return len(self._stage_meshes.same_batch) == 1

    @property
    def pipeline(self) -> SWPipeline:
        """The tasks at work, while ``Trainer.fit`` runs."""
        if self._program is None:
            raise SetupError("there is no pipeline; Trainer.fit makes one when training begins")
        return self._program.pipeline

    def _run_batch(self, batch: Any) -> BatchResult:
        if self._turn is None:
            return self._made.runs.run(batch, self._prepared_ahead())
        self._turn.call("run", move_data_to_device(batch, torch.device("cpu")))
        result = self._made.runs.run(batch, None)
        # The loss is a mean over all pipelines, so ranks without the batch log it too.
        self._turn.results.append(result.loss)
        return result

    def _predict(self, batch: Any) -> Any:
        if self._turn is None:
            return self._made.runs.predict(batch, self._prepared_ahead())
        self._turn.call("predict", move_data_to_device(batch, torch.device("cpu")))
        return self._made.runs.predict(batch, None)

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
        return self._stage_meshes.same_batch

    def _trainer(self) -> pl.Trainer:
        module = self.lightning_module
        assert module is not None
        return module.trainer

    def _prepared_ahead(self) -> PreparedBatch | None:
        programs = [*self._evaluations, *([] if self._program is None else [self._program])]
        for ctx in (program.current for program in programs):
            if ctx is not None:
                prepared: PreparedBatch | None = ctx.__dict__.pop("prepared", None)
                return prepared
        return None

    # ------------------------------------------------------------------ Lightning's calls during a batch

    def training_step(self, *args: Any, **kwargs: Any) -> Any:
        assert self._program is not None
        step = super().training_step
        return self._program.run_forward(lambda: step(*args, **kwargs))

    def backward(self, closure_loss: Tensor, optimizer: Optimizer | None, *args: Any, **kwargs: Any) -> Any:
        """Gradients are there already; divide them by the tokens, once all batches of the step are in."""
        module = self.lightning_module
        assert self._program is not None and module is not None
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
        self._program.run_backward(self._divide_by_tokens)
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
        program = self._program
        assert program is not None

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
        if self._program is not None:
            self._program.close()
            self._program = None
        for evaluation in self._evaluations:
            evaluation.close()
        self._evaluations = []
        module = self.lightning_module
        if isinstance(module, PipelineModule):
            module._run_in_stages = module._predict_in_stages = None
        self.precision_plugin.__dict__.pop("clip_grad_by_norm", None)
        if self._parts is not None and self._parts.scaling is not None:
            self._parts.scaling.close()
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
