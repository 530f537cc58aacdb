"""Language models in pipeline stages whose schedule, micro-batches and split are chosen when training is set up."""

from __future__ import annotations

from dataclasses import asdict, replace
from functools import partial
from pathlib import Path
from typing import Any

import yaml
from lightning.pytorch.trainer.states import TrainerFn
from lightning.pytorch.utilities.seed import isolate_rng

from lightning_pipe.engine import SetupError
from lightning_pipe.engine.common.fitted_table import print_report
from lightning_pipe.engine.common.options import check_whole_number
from lightning_pipe.llm.choice.schedule_choice import ScheduleCandidate
from lightning_pipe.llm.parallel.dimensions import ParallelDims
from lightning_pipe.llm.schedules.checks import splits_backward
from lightning_pipe.llm.schedules.named import ScheduleSpec, find_schedule
from lightning_pipe.strategies.language_model.choice_report import choice_report
from lightning_pipe.strategies.language_model.example_batch import example_batch
from lightning_pipe.strategies.language_model.options import LLMOptions
from lightning_pipe.strategies.language_model.pipeline_module import PipelineModule
from lightning_pipe.strategies.language_model.stage_choice import StageChoice, StageChooser
from lightning_pipe.strategies.language_model.stage_parts import StagePlan
from lightning_pipe.strategies.language_model.strategy import LLMPipelineStrategy
from lightning_pipe.strategies.plan_finding import write_choice

__all__ = ["AutoLLMPipelineStrategy"]


class AutoLLMPipelineStrategy(LLMPipelineStrategy):
    """:class:`LLMPipelineStrategy` that chooses schedule, stages a rank, micro-batches and split.

    When ``fit`` sets up, every rank measures the model's layers over stand-ins of its values: forward, and backward in
    one part and in two. With the medians over ranks, and messages between neighbours, each of PyTorch's schedules is
    simulated with all numbers of stages and of micro-batches that divide the batch; what does not fit the memory is
    left out. The most promising are then run for real, in turns, and the fastest is kept. Nothing is trained by that,
    and random generators are put back; the module's hooks for batches, its ``summed_loss`` and ``configure_optimizers``
    are called. What was chosen is printed, and trains exactly as :class:`LLMPipelineStrategy` with those arguments.

    Steps of optimisers are not measured. Functions of the trainer other than ``fit`` choose nothing: a model that is
    evaluated first is cut for ``1f1b``, and keeps that.

    Args:
        memory_limit: bytes that each rank may use; by default what is free on its device, and on the CPU any.
        num_microbatches: use this number; by default any that divides the rows of a batch, from once to eight times the
            ranks of a pipeline.
        trials: how many candidates are run for real; 0 to rely on the simulation.
        batch_size: rows of a batch, where the training data's loader does not say.
        save_plan: where to write the choice, in YAML: ``class_path`` and ``init_args`` for ``trainer.strategy``.
        options: other arguments of :class:`LLMPipelineStrategy`, without ``schedule``, ``stages_per_rank`` and the
            fields of ``split`` that say where the model is cut.
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
        _refuse_chosen(self._options)
        numbers = {"memory_limit": memory_limit, "trials": trials, "batch_size": batch_size}
        self._agreed += [(name, repr(value)) for name, value in numbers.items()]
        self._given = options
        self._memory_limit = memory_limit
        self._trials = trials
        self._batch_size = batch_size
        self._save_plan = save_plan
        self._choice: StageChoice | None = None

    @property
    def choice(self) -> StageChoice | None:
        """What was chosen, and from what; None before ``fit``."""
        return self._choice

    def _first_plan(self, sizes: ParallelDims) -> StagePlan:
        """For a model that is evaluated before any choice."""
        if sizes.pp < 2:
            raise SetupError(
                "the automatic strategy chooses how the ranks of a pipeline take turns, and this pipeline has"
                f" {sizes.pp} rank; needed are 2 devices or more, or LLMPipelineStrategy"
            )
        return StagePlan(self._options.schedule, sizes.pp, 1, 2 * sizes.pp, self._options.split)

    def _plan_for(self, module: PipelineModule) -> StagePlan:
        trainer = module.trainer
        if trainer.state.fn != TrainerFn.FITTING:
            return super()._plan_for(module)
        chooser = StageChooser(
            self._parts_maker,
            self._allows,
            self._plan_of,
            self._options.num_microbatches,
            self._memory_limit,
            # A trial would compile every layer anew.
            self._trials if self._options.compile_options is None else 0,
        )
        with isolate_rng():
            loader = trainer.fit_loop._data_source.dataloader()
            choice = chooser.choose(module, partial(example_batch, module, loader, self._batch_size))
        self._choice = choice
        plan = self._plan_of(choice.chosen.candidate)
        self._check_plan(plan, self._parts_maker.meshes.dimensions)
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

    def _allows(self, spec: ScheduleSpec) -> bool:
        if self._options.compile_options is not None and splits_backward(spec) is not False:
            return False  # each part of a compiled layer's backward would be all of it
        try:
            self._options.check_schedule(spec, self._parts_maker.meshes.dimensions)
        except SetupError:
            return False
        return True

    def _to_yaml(self, candidate: ScheduleCandidate) -> str:
        """The arguments that make this choice."""
        given, split = self._options, {"layers_per_stage": list(candidate.layers_per_stage)}
        chosen = {
            "schedule": candidate.spec.name,
            "num_microbatches": candidate.num_microbatches,
            "stages_per_rank": candidate.stages_per_rank,
            "split": split | _changed(given.split),
        }
        groups = {
            name: {field: value for field, value in _changed(getattr(given, name)).items() if _is_plain(value)}
            for name in ("parallel", "batching")
        }
        if given.activation_checkpoint is not None:
            groups["activation_checkpoint"] = asdict(given.activation_checkpoint)
        plain = {name: value for name, value in self._given.items() if _is_plain(value)}
        arguments = plain | {name: group for name, group in groups.items() if group} | chosen
        content = {"class_path": "lightning_pipe.strategies.LLMPipelineStrategy", "init_args": arguments}
        text: str = yaml.safe_dump(content, sort_keys=False)
        return text


def _refuse_chosen(options: LLMOptions) -> None:
    """Refuse what the automatic strategy chooses. Defaults count as not given, since LightningCLI passes them."""
    split = {f"split.{name}": value for name, value in _changed(options.split).items() if name != "tied_embeddings"}
    given = [f"{name}={value!r}" for name, value in split.items()]
    if options.schedule != find_schedule("1f1b"):
        given.append(f"schedule={options.schedule.name!r}")
    if options.stages_per_rank is not None:
        given.append(f"stages_per_rank={options.stages_per_rank}")
    if given:
        raise SetupError(
            f"{' and '.join(given)} is given to the automatic strategy, which chooses that; leave it out, or use"
            " LLMPipelineStrategy (llm_1f1b_pipeline and the like)"
        )


def _changed(group: Any) -> dict[str, Any]:
    """Fields of an option group that differ from its defaults."""
    return {
        name: list(value) if isinstance(value, tuple) else value
        for name, value in asdict(group).items()
        if value != getattr(type(group)(), name)
    }


def _is_plain(value: Any) -> bool:
    """Whether YAML has it."""
    if isinstance(value, dict):
        return all(_is_plain(one) for pair in value.items() for one in pair)
    return all(map(_is_plain, value)) if isinstance(value, list | tuple) else type(value) in (bool, int, float, str)
