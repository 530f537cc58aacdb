"""What a module in stages is run with, made from how its model is to be cut and scheduled.

Under a trainer it is made once for each module. To try something out it is made over stand-ins of the model's values,
any number of times, and thrown away.

Tested in ``tests/strategies/language_model/test_strategy.py``.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from typing import Any

import torch
import torch.distributed as dist
from lightning.pytorch.plugins import Precision

from lightning_pipe.engine import SetupError
from lightning_pipe.engine.ranks.agreement import check_agreement
from lightning_pipe.engine.ranks.together import on_all_ranks
from lightning_pipe.llm.batches.batching import Batching
from lightning_pipe.llm.batches.padding import SequenceKeys
from lightning_pipe.llm.model.deferred import DeferredInit, is_deferred
from lightning_pipe.llm.parallel.apply_parallel import StageParallelism
from lightning_pipe.llm.parallel.context_ranks import ContextRanks
from lightning_pipe.llm.parallel.dimensions import ParallelDims, StageMeshes
from lightning_pipe.llm.parallel.hf_documents import HFDocuments
from lightning_pipe.llm.run.preparation import BatchPreparation, Lengths
from lightning_pipe.llm.run.runner import PipelineRunner
from lightning_pipe.llm.run.stage_gradients import StageGradients
from lightning_pipe.llm.schedules.named import ScheduleSpec, place_stages, stages_of_rank
from lightning_pipe.llm.schedules.step import check_shared_parameters
from lightning_pipe.llm.split.options import SplitOptions
from lightning_pipe.llm.split.stage_split import Example, SplitModel, split_model
from lightning_pipe.strategies.language_model.batch_runs import BatchRuns
from lightning_pipe.strategies.language_model.loss_scaling import LossScaling
from lightning_pipe.strategies.language_model.pipeline_module import PipelineModule

__all__ = ["PartsMaker", "StageParts", "StagePlan", "StageSettings", "example_of"]


@dataclass(frozen=True)
class StagePlan:
    """How a model is cut and scheduled.

    Attributes:
        spec: the schedule.
        pipeline_size: ranks of a pipeline.
        stages_per_rank: of them.
        num_microbatches: parts that a batch is cut into.
        split: which stage holds what.
    """

    spec: ScheduleSpec
    pipeline_size: int
    stages_per_rank: int
    num_microbatches: int
    split: SplitOptions

    @property
    def num_stages(self) -> int:
        """Of all ranks."""
        return self.pipeline_size * self.stages_per_rank


@dataclass(frozen=True)
class StageSettings:
    """What a strategy was asked for, of all that is not the same for every module.

    Attributes:
        plan: how a model is cut and scheduled, if nothing else is chosen for it.
        sizes: parallel dimensions, fitted to the number of ranks.
        parallelism: how stages are shared with other ranks, and run; without meshes.
        batching: how batches are padded, cut and compared.
        offload: whether states of optimisers are on the host.
    """

    plan: StagePlan
    sizes: ParallelDims
    parallelism: StageParallelism
    batching: Batching
    offload: bool

    @property
    def lengths(self) -> Lengths:
        """Lengths that sequences are padded to."""
        batching = self.batching
        return Lengths(
            batching.variable_lengths,
            batching.length_multiple(self.sizes.length_multiple),
            batching.max_length,
            None if batching.length_buckets is None else tuple(batching.length_buckets),
        )


@dataclass(frozen=True)
class StageParts:
    """What a module in stages is run with; the module's model is ``split.kept``."""

    plan: StagePlan
    split: SplitModel
    runner: PipelineRunner
    preparation: BatchPreparation
    runs: BatchRuns
    gradients: StageGradients
    scaling: LossScaling | None


@dataclass(frozen=True)
class PartsMaker:
    """Makes the parts of modules; every rank makes the same ones in the same order.

    Attributes:
        settings: of the strategy.
        meshes: of all ranks.
        device: of this one.
        precision: the trainer's plugin.
        numbers_group: of all ranks, on the CPU, for what they tell each other of batches.
        loss_group: likewise, for what came of batches.
    """

    settings: StageSettings
    meshes: StageMeshes
    device: torch.device
    precision: Precision
    numbers_group: dist.ProcessGroup
    loss_group: dist.ProcessGroup

    def make(
        self, module: PipelineModule, plan: StagePlan, record: DeferredInit | None, *, stand_ins: bool = False
    ) -> StageParts:
        """Split the module's model, which is used up, and put what this rank keeps of it in its place.

        Args:
            module: whose model is whole.
            plan: how to cut and schedule it.
            record: of how the model was built, if it has no memory yet.
            stand_ins: use other values, and leave model and loss scale as they are.

        Raises:
            SetupError: the model cannot be trained in such stages.
        """
        model = module.model
        assert model is not None
        settings, meshes, pipeline = self.settings, self.meshes, self.meshes.root["pipeline"]
        batching = settings.batching
        rank_of_stage = place_stages(plan.spec.placement, plan.pipeline_size, plan.num_stages)
        split = split_model(
            model,
            record if record is not None and is_deferred(model) else None,
            config=module.pipeline_config(),
            num_stages=plan.num_stages,
            mine=stages_of_rank(plan.spec, pipeline.get_local_rank(), plan.pipeline_size, plan.stages_per_rank),
            options=plan.split,
            device=self.device,
            parallelism=replace(settings.parallelism, meshes=meshes),
            pretrained=module.pretrained_weights(),
            example=example_of(module, plan.num_microbatches),
            stand_ins=stand_ins,
        )
        on_all_ranks(
            lambda: check_shared_parameters(plan.spec, {index: stage.module for index, stage in split.stages.items()}),
            "the model cannot be trained in stages",
            dist.group.WORLD,
        )
        module.model = split.kept
        runner = PipelineRunner(
            split.stages,
            plan.num_stages,
            plan.spec,
            pipeline.get_group(),
            self.device,
            split.shapes,
            cache_bytes=batching.schedule_cache_bytes,
            # Ranks that are in the middle of a stage together would wait.
            carry_failures={meshes.data, meshes.context, meshes.tensor} == {None},
        )
        scaling = None if stand_ins else LossScaling.of(self.precision, self.loss_group, self.device)
        context = None
        if meshes.context is not None:
            context = ContextRanks.of(meshes.context.get_group(), settings.sizes.cp_method, split.kept)
        preparation = BatchPreparation(
            module.model_inputs,
            module.loss_tokens,
            self.numbers_group,
            meshes.same_batch,
            plan.num_microbatches,
            lengths=settings.lengths.up_to(module.max_sequence_length),
            keys=SequenceKeys(labels=module.ignore_index, others=batching.pad_values),
            strict=batching.strict_batches,
            ignore_index=module.ignore_index,
            context=context,
            compare=batching.compare_batches,
            documents=HFDocuments.of(split.kept),
        )
        runs = BatchRuns(
            module,
            runner,
            preparation,
            meshes,
            context,
            rank_of_stage[plan.num_stages - 1],
            self.loss_group,
            self.device,
            scaling,
            split.has_routers,
        )
        return StageParts(plan, split, runner, preparation, runs, StageGradients(split, meshes, rank_of_stage), scaling)

    def check(self, module: PipelineModule) -> None:
        """See that the module can be trained at all, before anything is made of it.

        Raises:
            SetupError: on every rank: no model, or another one than other ranks have; a precision that does not do.
        """
        if module.model is None:
            raise SetupError("the module's model is None after configure_model; build_model must return the model")
        parameters = [(name, f"{tuple(one.shape)} of {one.dtype}") for name, one in module.model.named_parameters()]
        check_agreement(parameters, "model's parameters", dist.group.WORLD, error=SetupError)
        if self.precision.precision == "16-true":
            raise SetupError(
                "the trainer's precision is '16-true', in which gradients of summed losses overflow without a scale;"
                " needed is '16-mixed', 'bf16-mixed', 'bf16-true' or '32-true'"
            )


def example_of(
    module: PipelineModule, num_microbatches: int, micro_batch: Mapping[str, Any] | None = None
) -> Callable[[], Example] | None:
    """A micro-batch, the module's own where none is given, as the model takes it; None where there is none."""
    given = module.example_micro_batch() if micro_batch is None else micro_batch
    if given is None:
        return None

    def loss_of(output: Any, part: torch.nn.Module) -> torch.Tensor:
        # The module may look for its head in its model: the part has it.
        whole, module.model = module.model, part
        try:
            return module.summed_loss(output, given)
        finally:
            module.model = whole

    def example() -> Example:
        arguments, keywords = module.model_inputs(given)
        return Example(arguments, keywords, loss_of, num_microbatches)

    return example
