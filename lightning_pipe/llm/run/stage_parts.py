"""Runtime parts of a module in stages, built from a plan for cutting and scheduling its model.

Under a trainer the parts are built once for each module. For trials they are built with placeholder values, any number
of times, and discarded.
"""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Generator, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, replace
from itertools import groupby
from pprint import pformat
from typing import Any

import torch
import torch.distributed as dist
from torch import nn

from lightning_pipe.engine import SetupError
from lightning_pipe.engine.common.report_table import ReportTable, print_report
from lightning_pipe.engine.ranks.agreement import check_agreement
from lightning_pipe.engine.ranks.object_collectives import (
    all_reduce_any,
    gather_objects_on_first_rank,
    raise_together,
    run_on_all_ranks,
)
from lightning_pipe.engine.ranks.process_groups import new_group
from lightning_pipe.llm.batches.options import Batching
from lightning_pipe.llm.model.hf_weights import PretrainedWeights, deferred_weight_loading
from lightning_pipe.llm.model.stage_module import PassThroughModule, is_causal_lm
from lightning_pipe.llm.parallel.apply_parallel import StageParallelism
from lightning_pipe.llm.parallel.attention_kernels import check_attention_device
from lightning_pipe.llm.parallel.context_parallel_group import ContextParallelGroup
from lightning_pipe.llm.parallel.gradients import local_tensor
from lightning_pipe.llm.parallel.hf_document_masking import HFDocumentMasking
from lightning_pipe.llm.parallel.parallel_dims import ParallelDims, ParallelMeshes
from lightning_pipe.llm.run.batch_runner import BatchRunner
from lightning_pipe.llm.run.loss_scaling import LossScaling
from lightning_pipe.llm.run.preparation import BatchPreparation
from lightning_pipe.llm.run.schedule_runner import ScheduleRunner
from lightning_pipe.llm.run.stage_gradients import StageGradients
from lightning_pipe.llm.run.stage_hooks import StageHooks
from lightning_pipe.llm.schedules.checks import splits_backward
from lightning_pipe.llm.schedules.execution import check_shared_for_split_backward
from lightning_pipe.llm.schedules.specs import ScheduleSpec, map_stages_to_ranks, stages_of_rank
from lightning_pipe.llm.split.options import SplitOptions
from lightning_pipe.llm.split.stage_split import ExampleMicrobatch, SplitModel, split_model


@dataclass(frozen=True)
class StagePlan:
    """Plan for cutting and scheduling a model."""

    spec: ScheduleSpec
    pipeline_size: int
    stages_per_rank: int
    num_microbatches: int
    split: SplitOptions

    @property
    def num_stages(self) -> int:
        """Number of stages in a pipeline."""
        return self.pipeline_size * self.stages_per_rank


@dataclass(frozen=True)
class LLMPipelineSettings:
    """Settings of a strategy for all of its modules."""

    plan: StagePlan
    sizes: ParallelDims
    parallelism: StageParallelism
    batching: Batching
    offload: bool


@dataclass(frozen=True)
class LLMPipelineComponents:
    """Runtime parts of a module in stages. The module's model is ``split.local_model``."""

    plan: StagePlan
    split: SplitModel
    runner: ScheduleRunner
    preparation: BatchPreparation
    runs: BatchRunner
    gradients: StageGradients
    scaling: LossScaling | None

    def print_stages(self) -> None:
        """Print a table of the stages of all ranks, on the first rank. Every rank must call this."""
        table = ReportTable.create_with_number_columns("rank", "stage", "parameters", "bytes on the rank", edge=False)
        table.add_column("modules")
        local_rows = []
        for index, stage in sorted(self.split.stages.items()):
            parameters = list(stage.parameters())
            numbers = (
                sum(parameter.numel() for parameter in parameters),
                sum(local_tensor(parameter).nbytes for parameter in parameters),
            )
            local_rows.append(
                (str(index), *(f"{number:,}" for number in numbers), ", ".join(_format_module_ranges(stage.module)))
            )
        for rank, rows in enumerate(gather_objects_on_first_rank(local_rows, dist.group.WORLD)):
            for row in rows:
                table.add_row(str(rank), *row)
        if dist.get_rank() == 0:
            print_report(table)


@dataclass(frozen=True)
class LLMPipelineComponentsBuilder:
    """Builds the parts of modules. Every rank must build the same parts in the same order."""

    settings: LLMPipelineSettings
    meshes: ParallelMeshes
    device: torch.device
    scaler: torch.amp.GradScaler | None
    numbers_group: dist.ProcessGroup
    loss_group: dist.ProcessGroup

    @classmethod
    def from_settings(
        cls, settings: LLMPipelineSettings, device: torch.device, scaler: torch.amp.GradScaler | None
    ) -> LLMPipelineComponentsBuilder:
        """Make the device meshes and process groups. Every rank must call this."""
        meshes = ParallelMeshes(settings.sizes, device.type)
        # CPU groups, since they exchange a few numbers while the schedule runs; two, since collectives of both can be
        # in flight at the same time.
        numbers_group, loss_group = new_group(backend="gloo"), new_group(backend="gloo")
        assert numbers_group is not None and loss_group is not None
        return cls(settings, meshes, device, scaler, numbers_group, loss_group)

    @contextmanager
    def model_building(self) -> Generator[None, None, None]:
        """Context in which models are built on the host. :meth:`build` loads this rank's part of pretrained weights."""
        # Every rank draws from the state of rank 0, so that the parts built by different ranks form one model.
        state = torch.get_rng_state()
        dist.broadcast(state, src=0, group=self.numbers_group)
        torch.set_rng_state(state)
        error: Exception | None = None
        with torch.device("cpu"), deferred_weight_loading():
            try:
                yield
            except Exception as raised:  # any exception, since the other ranks wait
                error = raised
        try:
            raise_together(error, "the model cannot be built", self.numbers_group)
        except SetupError:
            if error is None:
                raise
            raise error from error.__cause__  # the user's own, on its rank

    def build(
        self, module: StageHooks, plan: StagePlan, weights: PretrainedWeights | None, *, placeholders: bool = False
    ) -> LLMPipelineComponents:
        """Split the module's model, and replace it by the part that this rank keeps, with its part of the weights.

        The unsplit model cannot be used afterwards, except with *placeholders*.
        """
        model = module.model
        assert model is not None
        settings, meshes, pipeline = self.settings, self.meshes, self.meshes.root["pipeline"]
        batching = settings.batching
        vocabulary = module.vocabulary_size
        if vocabulary is None and is_causal_lm(model):
            vocabulary = getattr(model.get_input_embeddings(), "num_embeddings", None)  # type: ignore[operator]
        rank_of_stage = map_stages_to_ranks(plan.spec.placement, plan.pipeline_size, plan.num_stages)
        split = split_model(
            model,
            config=module.pipeline_module_config(),
            num_stages=plan.num_stages,
            local_stages=stages_of_rank(plan.spec, pipeline.get_local_rank(), plan.pipeline_size, plan.stages_per_rank),
            options=plan.split,
            device=self.device,
            parallelism=replace(
                settings.parallelism, meshes=meshes, split_backward=splits_backward(plan.spec) is not False
            ),
            pretrained=weights,
            example=make_example_factory(module, plan.num_microbatches),
            placeholders=placeholders,
        )
        run_on_all_ranks(
            lambda: check_shared_for_split_backward(
                plan.spec, {index: stage.module for index, stage in split.stages.items()}
            ),
            "the model cannot be trained in stages",
            dist.group.WORLD,
        )
        module.model = split.local_model
        runner = ScheduleRunner(
            split.stages,
            plan.num_stages,
            plan.spec,
            pipeline.get_group(),
            self.device,
            split.shapes,
            cache_bytes=batching.schedule_cache_bytes,
            # With other parallel dimensions, ranks that share a stage would wait for the failed rank in its forward.
            continue_after_failure={meshes.data, meshes.context, meshes.tensor} == {None},
            overlap=settings.sizes.ep > 1,
        )
        scaling = None
        if self.scaler is not None and not placeholders:
            scaling = LossScaling(self.scaler, self.loss_group, self.device)
        context = None
        if meshes.context is not None:
            context = ContextParallelGroup.from_model(
                meshes.context.get_group(), settings.sizes.cp_method, split.local_model
            )
        preparation = BatchPreparation(
            module,
            batching,
            self.numbers_group,
            meshes.same_batch,
            plan.num_microbatches,
            length_multiple=settings.sizes.length_multiple,
            vocabulary=vocabulary,
            mixtures=split.mixtures,
            context=context,
            documents=HFDocumentMasking.from_model(split.local_model),
        )
        runs = BatchRunner(
            module,
            runner,
            preparation,
            meshes,
            rank_of_stage[plan.num_stages - 1],
            self.loss_group,
            self.device,
            scaling,
            split.has_routers,
            batching.detect_nan,
        )
        return LLMPipelineComponents(
            plan, split, runner, preparation, runs, StageGradients(split, meshes, rank_of_stage), scaling
        )

    def check_module(self, module: StageHooks) -> None:
        """Check that the module can be trained, before its parts are built."""
        if module.model is None:
            raise SetupError("The module's model is None after configure_model. Return the model from build_model.")
        check_attention_device(module.model, self.device)
        world = dist.group.WORLD
        parameters = [
            (name, f"{tuple(parameter.shape)} of {parameter.dtype}")
            for name, parameter in module.model.named_parameters()
        ]
        check_agreement(parameters, "model's parameters", world, error_class=SetupError)
        check_agreement(_list_config_fields(module.model), "model's config", world, error_class=SetupError)
        weights = module.pretrained_weights()
        if all_reduce_any([weights is not None], world)[0]:
            samples = run_on_all_ranks(
                lambda: [] if weights is None else _digest_weight_samples(weights), "the weights", world
            )
            check_agreement(samples, "content of the folder of weights", world, error_class=SetupError)


def _digest_weight_samples(weights: PretrainedWeights) -> list[tuple[str, str]]:
    """Names of some tensors of a folder, with digests of their first values."""
    names = sorted(weights.tensors)[:: max(1, len(weights.tensors) // 16)]
    parts = (tensors[name].flatten()[:1024] for tensors in weights.read([[name] for name in names]) for name in tensors)
    digests = [hashlib.sha256(part.view(torch.uint8).numpy().tobytes()).hexdigest() for part in parts]
    return list(zip(names, digests, strict=True))


def _list_config_fields(model: nn.Module) -> list[tuple[str, str]]:
    """The fields of a model's config, if it has one, without those that say where it was read."""
    to_dict = getattr(getattr(model, "config", None), "to_dict", None)
    fields = to_dict() if callable(to_dict) else {}
    # Some configs have dictionaries whose order follows that of a set.
    described = {str(name): pformat(value, width=1_000_000) for name, value in fields.items()}
    return [(name, value) for name, value in sorted(described.items()) if not name.startswith("_")]


def make_example_factory(
    module: StageHooks, num_microbatches: int, micro_batch: Mapping[str, Any] | None = None
) -> Callable[[], ExampleMicrobatch] | None:
    """Return a function that converts a micro-batch to an example of the model's inputs."""
    example_batch = module.example_micro_batch() if micro_batch is None else micro_batch
    if example_batch is None:
        return None

    def loss_of(output: Any, part: nn.Module) -> torch.Tensor:
        # summed_loss may use the head of the module's model, which the part contains.
        full_model, module.model = module.model, part
        try:
            return module.summed_loss(output, example_batch)
        finally:
            module.model = full_model

    def example() -> ExampleMicrobatch:
        arguments, keywords = module.model_inputs(example_batch)
        return ExampleMicrobatch(arguments, keywords, loss_of, num_microbatches)

    return example


def _format_module_ranges(model: nn.Module) -> Iterator[str]:
    """Names and classes of held modules; consecutive layers of one class are joined."""
    modules = [(*name.rpartition("."), type(module).__name__) for name, module in _unshared_modules(model)]
    for (prefix, dot, kind, _), names in groupby(
        modules, lambda entry: (*entry[:2], entry[3], entry[2].isdigit() or entry[2])
    ):
        first, *following = [name for *_, name, _ in names]
        yield f"{prefix}{dot}{f'{first}-{following[-1]}' if following else first} ({kind})"


def _unshared_modules(model: nn.Module, prefix: str = "") -> Iterator[tuple[str, nn.Module]]:
    """The largest modules that no other stage shares."""
    for name, module in model.named_children():
        if any(isinstance(part, PassThroughModule | nn.ModuleList) for part in module.modules()):
            yield from _unshared_modules(module, f"{prefix}{name}.")
        elif not isinstance(module, PassThroughModule):
            yield f"{prefix}{name}", module
