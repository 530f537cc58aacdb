"""Strategy that chooses the schedule, micro-batches and split of a language model when training is set up."""

from __future__ import annotations

from dataclasses import asdict, replace
from functools import partial
from pathlib import Path
from typing import Any

import yaml
from lightning.pytorch.trainer.states import TrainerFn
from lightning.pytorch.utilities.seed import isolate_rng

from lightning_pipe._compat.lightning import training_loader
from lightning_pipe.engine import SetupError
from lightning_pipe.engine.common.options import check_whole_number
from lightning_pipe.engine.common.report_table import print_report
from lightning_pipe.llm.choice.schedule_choice import ScheduleCandidate
from lightning_pipe.llm.parallel.parallel_dims import ParallelDims
from lightning_pipe.llm.run.options import LLMOptions
from lightning_pipe.llm.run.stage_parts import StagePlan
from lightning_pipe.llm.schedules.specs import ScheduleSpec, resolve_schedule_spec
from lightning_pipe.strategies.auto_plan_options import write_choice
from lightning_pipe.strategies.language_model.choice_report import choice_report
from lightning_pipe.strategies.language_model.example_batch import example_batch
from lightning_pipe.strategies.language_model.pipeline_module import PipelineModule
from lightning_pipe.strategies.language_model.stage_choice import StagePlanChoice, StagePlanChooser
from lightning_pipe.strategies.language_model.strategy import LLMPipelineStrategy


class AutoLLMPipelineStrategy(LLMPipelineStrategy):
    """:class:`LLMPipelineStrategy` that chooses the schedule, stages per rank, micro-batches and split.

    When ``fit`` sets up the strategy, it chooses in three steps:

    1. Every rank measures the model's layers on placeholder values: forward, and backward in one part and in two.
       The medians over ranks are used, with the measured time of messages between neighboring ranks.
    2. Each of PyTorch's schedules is simulated with all numbers of stages and all numbers of micro-batches that divide
       the batch. Candidates that do not fit into memory are dropped.
    3. The most promising candidates run some real steps in turns, and the fastest is used.

    These steps do not train the model, and the states of random generators are restored afterwards. The module's batch
    hooks, ``summed_loss`` and ``configure_optimizers`` are called. The choice is printed. Training is identical to
    that of :class:`LLMPipelineStrategy` with the chosen arguments.

    Optimizer steps are not measured. Only ``fit`` chooses: a model that is evaluated before ``fit`` is cut for
    ``1f1b`` and keeps that plan.

    Args:
        memory_limit: bytes that each rank may use (default: the free memory of its device; no limit on the CPU).
        num_microbatches: number of micro-batches (default: chosen among the divisors of the rows of a batch, from one
            to eight times the number of ranks in a pipeline).
        trials: number of candidates that run real steps (default 6). 0 uses only the simulation.
        batch_size: number of rows in a batch (default: that of the training dataloader). Set it if the dataloader does
            not have a ``batch_size``.
        save_plan: path of a YAML file for the choice, with ``class_path`` and ``init_args`` for ``trainer.strategy``
            (default: not saved).
        options: other arguments of :class:`LLMPipelineStrategy`, except ``schedule``, ``stages_per_rank`` and the
            fields of ``split`` that define where the model is cut.
    """

    def __init__(
        self,
        *,
        memory_limit: int | None = None,
        num_microbatches: int | None = None,
        trials: int = 6,
        batch_size: int | None = None,
        save_plan: str | Path | None = None,
        **options: Any,
    ) -> None:
        check_whole_number("memory_limit", memory_limit, 1, optional=True)
        check_whole_number("trials", trials, 0)
        check_whole_number("batch_size", batch_size, 1, optional=True)
        super().__init__(num_microbatches=num_microbatches, **options)
        _refuse_auto_chosen_options(self._options)
        numbers = {"memory_limit": memory_limit, "trials": trials, "batch_size": batch_size}
        self._compared_options += [(name, repr(value)) for name, value in numbers.items()]
        self._init_args = options
        self._memory_limit = memory_limit
        self._trials = trials
        self._batch_size = batch_size
        self._save_plan = save_plan
        self._choice: StagePlanChoice | None = None

    @property
    def choice(self) -> StagePlanChoice | None:
        """Chosen candidate and its alternatives; None before ``fit``."""
        return self._choice

    def _default_plan(self, sizes: ParallelDims) -> StagePlan:
        """Plan for a model that is evaluated before a choice was made."""
        if sizes.pp < 2:
            raise SetupError(
                "The automatic strategy expected a pipeline of at least 2 ranks, since it chooses a schedule for them,"
                f" got {sizes.pp}. Use at least 2 devices for the pipeline, or LLMPipelineStrategy."
            )
        return StagePlan(self._options.schedule, sizes.pp, 1, 2 * sizes.pp, self._options.split)

    def _get_plan_for_module(self, module: PipelineModule) -> StagePlan:
        trainer = module.trainer
        if trainer.state.fn != TrainerFn.FITTING:
            return self._components_builder.settings.plan
        chooser = StagePlanChooser(
            self._components_builder,
            self._is_schedule_supported,
            self._plan_of,
            self._options.num_microbatches,
            self._memory_limit,
            # Each trial would compile every layer again.
            self._trials if self._options.compile_options is None else 0,
        )
        with isolate_rng():
            choice = chooser.choose(module, partial(example_batch, module, training_loader(trainer), self._batch_size))
        self._choice = choice
        plan = self._plan_of(choice.chosen.candidate)
        self._check_plan(plan, self._components_builder.meshes.dimensions)
        if self.is_global_zero:
            print_report(choice_report(choice))
            if self._save_plan is not None:
                to_yaml = partial(self._to_yaml, choice.chosen.candidate)
                write_choice(to_yaml, self._save_plan, "the choice")
        return plan

    def _plan_of(self, candidate: ScheduleCandidate) -> StagePlan:
        split = replace(self._options.split, layers_per_stage=candidate.layers_per_stage)
        return StagePlan(
            candidate.spec, self.pipeline_size, candidate.stages_per_rank, candidate.num_microbatches, split
        )

    def _is_schedule_supported(self, spec: ScheduleSpec) -> bool:
        try:
            self._options.check_schedule(spec, self._components_builder.meshes.dimensions)
        except SetupError:
            return False
        return True

    def _to_yaml(self, candidate: ScheduleCandidate) -> str:
        """Strategy in YAML with the arguments of this choice."""
        options, split = self._options, {"layers_per_stage": list(candidate.layers_per_stage)}
        chosen = {
            "schedule": candidate.spec.name,
            "num_microbatches": candidate.num_microbatches,
            "stages_per_rank": candidate.stages_per_rank,
            "split": split | _non_default_fields(options.split),
        }
        groups = {
            name: {
                field: value
                for field, value in _non_default_fields(getattr(options, name)).items()
                if _is_yaml_representable(value)
            }
            for name in ("parallel", "batching")
        }
        if options.activation_checkpoint is not None:
            groups["activation_checkpoint"] = asdict(options.activation_checkpoint)
        plain = {name: value for name, value in self._init_args.items() if _is_yaml_representable(value)}
        arguments = plain | {name: group for name, group in groups.items() if group} | chosen
        content = {"class_path": "lightning_pipe.strategies.LLMPipelineStrategy", "init_args": arguments}
        text: str = yaml.safe_dump(content, sort_keys=False)
        return text


def _refuse_auto_chosen_options(options: LLMOptions) -> None:
    """Refuse options that the automatic strategy chooses.

    Options with their default values are accepted, since LightningCLI passes all arguments.
    """
    split = {
        f"split.{name}": value
        for name, value in _non_default_fields(options.split).items()
        if name != "tied_embeddings"
    }
    refused = [f"{name}={value!r}" for name, value in split.items()]
    if options.schedule != resolve_schedule_spec("1f1b"):
        refused.append(f"schedule={options.schedule.name!r}")
    if options.stages_per_rank is not None:
        refused.append(f"stages_per_rank={options.stages_per_rank}")
    if refused:
        raise SetupError(
            f"{' and '.join(refused)} is given to the automatic strategy, which chooses it. Remove the argument, or use"
            " LLMPipelineStrategy (such as llm_1f1b_pipeline)."
        )


def _non_default_fields(group: Any) -> dict[str, Any]:
    """Fields of an option group that differ from its defaults."""
    return {
        name: list(value) if isinstance(value, tuple) else value
        for name, value in asdict(group).items()
        if value != getattr(type(group)(), name)
    }


def _is_yaml_representable(value: Any) -> bool:
    """Return True if YAML can represent the value."""
    if isinstance(value, dict):
        return all(_is_yaml_representable(item) for pair in value.items() for item in pair)
    return (
        all(map(_is_yaml_representable, value))
        if isinstance(value, list | tuple)
        else type(value) in (bool, int, float, str)
    )
