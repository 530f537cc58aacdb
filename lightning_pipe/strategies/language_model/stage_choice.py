"""Choice of a schedule: measures a module's layers, simulates all candidates, and runs the most promising ones.

All ranks make the same choice from gathered measurements.
"""

from __future__ import annotations

import gc
import math
import time
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, replace
from typing import Any, TypeVar

import torch
import torch.distributed as dist
from lightning.fabric.utilities.apply_func import move_data_to_device
from lightning.pytorch.plugins import Precision

from lightning_pipe.engine import InputError, PipelineError, SetupError
from lightning_pipe.engine.observe.timeline import Bar
from lightning_pipe.engine.planning.plan_choice import choose_measured_plan, interquartile_mean, select_survivors
from lightning_pipe.engine.ranks.object_collectives import all_gather_objects, run_on_all_ranks, run_on_rank
from lightning_pipe.llm.batches.microbatches import split_batch
from lightning_pipe.llm.batches.padding import pad_microbatch
from lightning_pipe.llm.choice.schedule_choice import (
    Calibration,
    Measurements,
    ScheduleCandidate,
    SchedulePrediction,
    fit_calibration_to_real_steps,
    list_candidates,
    merge_measurements_by_median,
    microbatch_counts,
    predict_schedule,
    select_finalists,
)
from lightning_pipe.llm.measure.layer_bench import ModelPieceResults
from lightning_pipe.llm.measure.layer_profile import Footprint, LayerWork, measure_footprints, measure_layer_times
from lightning_pipe.llm.measure.links import measure_links, median_links
from lightning_pipe.llm.measure.rank_memory import ShardCounts
from lightning_pipe.llm.model.derived_config import derive_pp_module_config
from lightning_pipe.llm.model.module_config import PPModuleConfig
from lightning_pipe.llm.run.stage_parts import (
    LLMPipelineComponents,
    LLMPipelineComponentsBuilder,
    LLMPipelineSettings,
    StagePlan,
    make_example_factory,
)
from lightning_pipe.llm.schedules.checks import splits_backward
from lightning_pipe.llm.schedules.specs import ScheduleSpec
from lightning_pipe.loops.programs.user_errors import add_lost_rank_note
from lightning_pipe.strategies.language_model.optimizer_bytes import (
    compute_optimizer_bytes_per_piece,
    sum_by_model_piece,
)
from lightning_pipe.strategies.language_model.pipeline_module import PipelineModule

T = TypeVar("T")

# Target duration of a trial in seconds, and bounds on its number of steps.
_SECONDS = 0.5
_LEAST, _MOST = 2, 10

_ROUNDS = 3
# Candidates slower than the fastest by more than this factor are not run in the next round.
_HOPELESS = 1.1
_ADAMS = 2  # number of state tensors per parameter in Adam


@dataclass(frozen=True)
class StagePlanChoice:
    """Chosen candidate and its alternatives."""

    chosen: SchedulePrediction
    predictions: tuple[SchedulePrediction, ...]
    too_large: int
    memory_limit: int | None
    notes: tuple[str, ...]


@dataclass(frozen=True)
class StagePlanChooser:
    """Chooses plans for modules. Every rank must call :meth:`choose` for the same modules."""

    maker: LLMPipelineComponentsBuilder
    is_schedule_supported: Callable[[ScheduleSpec], bool]
    plan_of: Callable[[ScheduleCandidate], StagePlan]
    num_microbatches: int | None
    memory_limit: int | None
    trials: int

    def choose(self, module: PipelineModule, batch: Callable[[], Any]) -> StagePlanChoice:
        """Return the fastest plan for a module, with its alternatives."""
        group, size = self.maker.numbers_group, self.maker.meshes.dimensions.pp
        config = run_on_all_ranks(
            lambda: get_or_derive_module_config(module), "the layers of the model cannot be determined", group
        )
        local_batch = run_on_all_ranks(batch, "no batch is available for measurements", group)
        shared_batch = run_on_rank(lambda: local_batch, "the first rank could not send its batch", group)
        counts = _microbatch_counts_of(shared_batch, size, self.num_microbatches)
        measured, notes = self._measure_layers(module, config, shared_batch, counts)
        limits = [
            rank_limit for rank_limit in all_gather_objects(self._get_memory_limit(), group) if rank_limit is not None
        ]
        limit = min(limits, default=None)

        def simulate_candidates(calibrated: Calibration | None) -> tuple[list[SchedulePrediction], int]:
            listed = list_candidates(
                config, size, measured, by_memory=limit is not None, allowed=self.is_schedule_supported
            )
            results = [predict_schedule(candidate, size, measured, calibrated) for candidate in listed]
            return _filter_by_memory(results, limit, counts), len(results)

        failed = "the first rank could not simulate schedules"
        predictions, number = run_on_rank(lambda: simulate_candidates(None), failed, group)
        too_large = number - len(predictions)
        if self.trials:
            trials = ScheduleTrialRunner(module, self.maker, shared_batch, self.plan_of)
            runs = [
                run
                for prediction in _calibration_candidates(predictions)
                if (run := trials.run_with_recorded_events(prediction.candidate)) is not None
            ]
            calibration = fit_calibration_to_real_steps(runs, size, measured)
            predictions, _ = run_on_rank(lambda: simulate_candidates(calibration), failed, group)
            predictions = trials.run_finalists(predictions, self.trials)
            notes += trials.failed
        ran = {
            prediction.candidate: prediction.measured_round_seconds
            for prediction in predictions
            if prediction.measured_round_seconds
        }
        best = choose_measured_plan(ran, ran) if ran else predictions[0].candidate
        chosen = next(prediction for prediction in predictions if prediction.candidate == best)
        return StagePlanChoice(chosen, tuple(predictions), too_large, limit, tuple(notes))

    def _get_memory_limit(self) -> int | None:
        if self.memory_limit is not None or self.maker.device.type != "cuda":
            return self.memory_limit
        torch.cuda.empty_cache()
        free: int = torch.cuda.mem_get_info(self.maker.device)[0]
        return free

    def _measure_layers(
        self, module: PipelineModule, config: PPModuleConfig, batch: Any, counts: Sequence[int]
    ) -> tuple[Measurements, list[str]]:
        """Measure on all ranks at the same time, since they also compute at the same time in training."""
        group, device, settings = self.maker.numbers_group, self.maker.device, self.maker.settings

        def measure_rank() -> tuple[
            dict[int, ModelPieceResults[LayerWork]],
            dict[int, ModelPieceResults[Footprint]],
            tuple[ModelPieceResults[int], list[str]],
        ]:
            cut = {count: make_padded_microbatches(module, batch, count, settings)[0] for count in counts}
            arguments = module, config, settings, module.trainer.precision_plugin
            work = {
                count: measure_pieces(measure_layer_times, *arguments, move_data_to_device(item, device), device=device)
                for count, item in cut.items()
            }
            footprints = {
                count: measure_pieces(measure_footprints, *arguments, item)
                for count, item in cut.items()
                if group.rank() == 0
            }
            return work, footprints, estimate_optimizer_bytes(module, config, settings.offload)

        work, footprints, (states, notes) = run_on_all_ranks(measure_rank, "the layers cannot be measured", group)
        work_by_rank = all_gather_objects(work, group)
        links = all_gather_objects(measure_links(self.maker.meshes.root["pipeline"].get_group(), device), group)
        return (
            Measurements(
                {
                    count: merge_measurements_by_median([rank_work[count] for rank_work in work_by_rank])
                    for count in counts
                },
                run_on_rank(lambda: footprints, "the first rank could not send its footprints", group),
                states,
                median_links(links),
                get_stage_shard_counts(settings, module),
            ),
            notes,
        )


@dataclass(frozen=True)
class Trial:
    """Measurements of a plan, equal on every rank."""

    seconds: tuple[float, ...]
    events: tuple[Sequence[Bar], ...] = ()
    recorded_step_seconds: float = 0.0


class ScheduleTrialRunner:
    """Runs real steps of candidates, with placeholder values of the model. A candidate that fails is not run again."""

    def __init__(
        self,
        module: PipelineModule,
        maker: LLMPipelineComponentsBuilder,
        batch: Any,
        plan_of: Callable[[ScheduleCandidate], StagePlan],
    ) -> None:
        self._module = module
        self._maker = maker
        self._batch = move_data_to_device(batch, maker.device)
        self._plan_of = plan_of
        self._failed_candidates: set[ScheduleCandidate] = set()
        self.failed: list[str] = []

    def run_with_recorded_events(
        self, candidate: ScheduleCandidate
    ) -> tuple[ScheduleCandidate, Sequence[Any], float] | None:
        """Return a recorded trial to calibrate predictions with; None if the candidate failed."""
        trial = self._try(candidate, record=True)
        return None if trial is None else (candidate, trial.events, trial.recorded_step_seconds)

    def run_finalists(self, predictions: Sequence[SchedulePrediction], most: int) -> list[SchedulePrediction]:
        """Run the most promising candidates, and the next ones if all of these fail."""
        seconds: dict[ScheduleCandidate, list[float]] = {}
        remaining = list(predictions)
        while not seconds and (
            remaining := [prediction for prediction in remaining if prediction.candidate not in self._failed_candidates]
        ):
            seconds = self._time_candidates(select_finalists(remaining, most))
        if not seconds:
            raise SetupError(
                f"None of {len(predictions)} candidate schedules could be run: {'; '.join(self.failed)}. Fix the errors"
                " listed, or set trials=0 to choose by simulation only."
            )
        return [
            replace(prediction, measured_round_seconds=tuple(seconds.get(prediction.candidate, ())))
            for prediction in predictions
            if prediction.candidate not in self._failed_candidates
        ]

    def _time_candidates(self, candidates: Sequence[SchedulePrediction]) -> dict[ScheduleCandidate, list[float]]:
        """Run candidates in turns while they can still be the fastest, and return the seconds of those that ran."""
        seconds = {prediction.candidate: list[float]() for prediction in candidates}
        remaining = list(seconds)
        for _ in range(_ROUNDS):
            for candidate in remaining:
                if (trial := self._try(candidate)) is not None:
                    seconds[candidate].append(interquartile_mean(trial.seconds))
            seconds = {tried: times for tried, times in seconds.items() if tried not in self._failed_candidates}
            remaining = select_survivors(seconds, seconds, _HOPELESS) if seconds else []
        return seconds

    def _try(self, candidate: ScheduleCandidate, *, record: bool = False) -> Trial | None:
        if candidate in self._failed_candidates:
            return None
        try:
            return self.run(self._plan_of(candidate), record=record)
        except PipelineError as error:  # on every rank
            self._failed_candidates.add(candidate)
            self.failed.append(f"{candidate.spec.name} could not be run: {type(error).__name__}: {error}")
            return None
        except Exception as error:
            # The other ranks are in the middle of the step, and would take messages of the next candidate for messages
            # of this step.
            error.add_note(
                f"A rank failed in the middle of a trial step of schedule {candidate.spec.name}. Set memory_limit"
                " to less than the free memory, or trials=0 to choose by simulation only."
            )
            add_lost_rank_note(error, dist.get_world_size())
            raise

    def run(self, plan: StagePlan, *, record: bool = False) -> Trial:
        """Build the plan's stages, run some steps, and release the stages."""
        module, unsplit_model, maker = self._module, self._module.model, self._maker
        parts: Any = None
        try:
            parts = maker.build(module, plan, None, placeholders=True)
            local_stages = parts.split.local_model
            failed = "the stages cannot be converted to the trainer's precision"
            run_on_all_ranks(
                lambda: module.trainer.precision_plugin.convert_module(local_stages), failed, maker.numbers_group
            )
            with module.trainer.precision_plugin.train_step_context(), torch.enable_grad():
                return self._measure(parts, record)
        except Exception as error:
            if parts is not None and error is parts.runner.failure:  # all ranks know of this failure
                raise InputError(f"{type(error).__name__}: {error}") from error
            raise
        finally:
            module.model = unsplit_model
            parts = local_stages = None  # release the memory before the next candidate is built
            gc.collect()

    def _measure(self, parts: LLMPipelineComponents, record: bool) -> Trial:
        (first,) = self._reduce_max_over_ranks([self._step(parts)])  # warm-up: builds the schedule and allocates memory
        steps = min(max(math.ceil(_SECONDS / first), _LEAST), _MOST)
        seconds = self._reduce_max_over_ranks([self._step(parts) for _ in range(steps)])
        if not record:
            return Trial(seconds)
        parts.runner.record_events = True
        (recorded,) = self._reduce_max_over_ranks([self._step(parts)])
        noted = all_gather_objects(list(parts.runner.events), self._maker.numbers_group)
        pipeline = self._maker.meshes.root.mesh.reshape(parts.plan.pipeline_size, -1)[:, 0].tolist()
        return Trial(seconds, tuple(noted[rank] for rank in pipeline), recorded)

    def _step(self, parts: LLMPipelineComponents) -> float:
        for parameter in parts.split.local_model.parameters():
            parameter.grad = None
        prepared = parts.preparation.begin(self._batch)
        dist.barrier(group=self._maker.numbers_group)
        begin = time.perf_counter()
        parts.runs.run(self._batch, prepared)
        if self._maker.device.type != "cpu":
            torch.accelerator.synchronize(self._maker.device)
        return time.perf_counter() - begin

    def _reduce_max_over_ranks(self, seconds: Sequence[float]) -> tuple[float, ...]:
        return tuple(map(max, zip(*all_gather_objects(seconds, self._maker.numbers_group), strict=True)))


def get_or_derive_module_config(module: PipelineModule) -> PPModuleConfig:
    """Return the names of the module's layers: its ``pipeline_module_config``, or names derived from its structure."""
    assert module.model is not None
    config = module.pipeline_module_config()
    if config is None:
        return derive_pp_module_config(module.model)
    config.check_against_model(module.model)
    return config


def _microbatch_counts_of(batch: Any, pp_size: int, requested: int | None) -> list[int]:
    """Return the numbers of micro-batches to choose from."""
    if isinstance(batch, (list, tuple)):
        return [len(batch)]  # a list of micro-batches
    rows = split_batch(batch, 1).rows
    if requested is None:
        return microbatch_counts(rows, pp_size)
    if rows % requested:
        raise SetupError(
            f"`num_microbatches` must divide the rows of a batch, got {requested} for {rows} row(s). Use a divisor, or"
            " omit it to have it chosen."
        )
    return [requested]


def make_padded_microbatches(
    module: PipelineModule, batch: Any, count: int, settings: LLMPipelineSettings
) -> list[dict[str, Any]]:
    """Cut a batch into micro-batches, padded to one length as in training."""
    keys = settings.batching.padding_spec(module.ignore_index)
    items = split_batch(batch, count, keys).items
    longest = max((keys.get_microbatch_rows_and_length(item)[1] for item in items), default=0)
    limits = settings.sizes.length_multiple, module.max_sequence_length
    length = settings.batching.padded_length(longest, *limits)
    return [pad_microbatch(item, length, keys) for item in items]


def measure_pieces(
    measure: Callable[..., ModelPieceResults[T]],
    module: PipelineModule,
    config: PPModuleConfig,
    settings: LLMPipelineSettings,
    precision: Precision,
    item: Mapping[str, Any],
    **options: Any,
) -> ModelPieceResults[T]:
    """Result of ``measure_layer_times`` or ``measure_footprints`` for each piece of the model and a micro-batch."""
    make = make_example_factory(module, 1, item)
    assert make is not None and module.model is not None
    with precision.train_step_context():
        example = make()
        return measure(
            module.model,
            config,
            example.args,
            example.kwargs,
            example.loss_fn,
            prepare=lambda stage: settings.parallelism.apply_activation_checkpoint(stage, config.layer_fqns),
            varies=settings.parallelism.is_checkpointed,
            **options,
        )


def estimate_optimizer_bytes(
    module: PipelineModule, config: PPModuleConfig, offload: bool
) -> tuple[ModelPieceResults[int], list[str]]:
    """Return the bytes of optimizer states on the device for each piece of the model, and remarks about them.

    If ``configure_optimizers`` fails with small parameters, the states are assumed to be those of Adam.
    """
    if offload:
        return ModelPieceResults(0, 0, (0,) * config.num_layers, 0), []
    try:
        return compute_optimizer_bytes_per_piece(module, config), []
    except Exception as error:  # user code, called with a model that it may not expect
        assert module.model is not None
        sizes = {
            name: _ADAMS * parameter.numel() * parameter.element_size()
            for name, parameter in module.model.named_parameters(remove_duplicate=False)
            if parameter.requires_grad
        }
        return sum_by_model_piece(sizes, config), [
            "optimizer states are assumed to be those of Adam, since configure_optimizers failed with small parameters"
            f" ({error})"
        ]


def get_stage_shard_counts(settings: LLMPipelineSettings, module: PipelineModule) -> ShardCounts:
    """Return the numbers of ranks that share the parameters and activations of a stage of the module's model."""
    assert module.model is not None
    sizes = settings.sizes
    shard = sizes.dp_shard * sizes.cp if sizes.dp_shard > 1 else 1
    # Gradients in half precision are added and reduced in float32.
    halves = any(parameter.dtype in (torch.bfloat16, torch.float16) for parameter in module.model.parameters())
    unreduced = 2.0 if halves else 1.0
    return ShardCounts(shard, sizes.tp, sizes.cp, sizes.ep, unreduced, not sizes.reshard_after_forward)


def _filter_by_memory(
    predictions: Sequence[SchedulePrediction], limit: int | None, counts: Sequence[int]
) -> list[SchedulePrediction]:
    """Return the predictions that fit into memory, fastest first."""
    if not predictions:
        raise SetupError(
            f"No schedule supports {' or '.join(map(str, counts))} micro-batches with this number of ranks and layers."
            " Use another batch size or num_microbatches, or a model with at least one layer for each rank."
        )
    fitting = [prediction for prediction in predictions if limit is None or prediction.peak <= limit]
    if not fitting:
        least = min(predictions, key=lambda prediction: prediction.peak)
        raise SetupError(
            f"None of {len(predictions)} candidate schedules fits into {limit:,} bytes per rank (memory_limit, or the"
            f" free memory). The smallest takes {least.peak:,} bytes, with schedule {least.candidate.spec.name} and"
            f" {least.candidate.num_microbatches} micro-batches. Set activation_checkpoint.mode to 'full', use more"
            " ranks (parallel.pp, parallel.dp_shard), or use smaller batches."
        )
    return sorted(fitting, key=lambda prediction: prediction.seconds)


def _calibration_candidates(predictions: Sequence[SchedulePrediction]) -> list[SchedulePrediction]:
    """Return the fastest candidate with backward in one part, and the fastest with backward in two parts."""
    candidates = []
    for parts in (False, True):
        with suppress(StopIteration):
            candidates.append(
                next(
                    prediction
                    for prediction in predictions
                    if bool(splits_backward(prediction.candidate.spec)) == parts
                )
            )
    return candidates
