"""Chooses the schedule, stages, micro-batches and split that train a batch fastest, by simulating schedules.

    schedules x stages a rank x micro-batches x splits ──► those that fit the memory ──► simulated, fastest first
                                                                a few run for real ──► calibration, and again

Measurements come from other modules (``layer_profile``, ``links``, real steps). This module runs no model and does not
communicate.
"""

from __future__ import annotations

import statistics
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from functools import cached_property

from lightning_pipe.engine.common.errors import SetupError
from lightning_pipe.engine.observe.timeline import Bar
from lightning_pipe.engine.planning.plan_choice import interquartile_mean
from lightning_pipe.llm.measure.layer_bench import ModelPieceResults
from lightning_pipe.llm.measure.layer_costs import compute_memory_costs, compute_time_costs
from lightning_pipe.llm.measure.layer_profile import Footprint, LayerWork
from lightning_pipe.llm.measure.links import Link
from lightning_pipe.llm.measure.rank_memory import RankMemory, ShardCounts, estimate_memory, pieces_of_stage
from lightning_pipe.llm.model.module_config import PPModuleConfig
from lightning_pipe.llm.schedules.checks import check_microbatches
from lightning_pipe.llm.schedules.simulation import (
    Actions,
    Kind,
    ScheduleTimeline,
    list_compute_actions,
    simulate_schedule,
)
from lightning_pipe.llm.schedules.specs import SCHEDULES, ScheduleSpec, count_stages_per_rank
from lightning_pipe.llm.schedules.timed_stage import compute_median_stage_durations
from lightning_pipe.llm.split.stage_fqns import split_by_cost, split_layers_evenly

# Micro-batches per rank: with fewer, most ranks are idle; with more, each is small and the bubble negligible.
_LEAST, _MOST = 1, 8
_COUNTS = 5  # numbers of micro-batches to measure
_MOST_STAGES = 4  # stages of a rank
_KINDS: tuple[Kind, ...] = ("forward", "backward", "input_backward", "weight_backward")


@dataclass(frozen=True)
class ScheduleCandidate:
    """Way to train: a schedule with its numbers of stages, micro-batches and layers."""

    spec: ScheduleSpec
    stages_per_rank: int
    num_microbatches: int
    layers_per_stage: tuple[int, ...]


@dataclass(frozen=True)
class Measurements:
    """Measurements of a model by number of micro-batches; without links, messages take no time."""

    work: Mapping[int, ModelPieceResults[LayerWork]]
    footprints: Mapping[int, ModelPieceResults[Footprint]]
    optimizer_bytes: ModelPieceResults[int]
    links: Mapping[tuple[int, int], Link] = field(default_factory=dict)
    sharing: ShardCounts = field(default_factory=ShardCounts)


@dataclass(frozen=True)
class Calibration:
    """Corrections of simulated steps by real ones."""

    # slowdown of each kind of work in a real step, relative to pieces measured separately
    scales: Mapping[Kind, float] = field(default_factory=dict)
    overhead: float = 0.0  # seconds between two actions of a rank
    step_overhead: float = 0.0  # seconds of a step outside its schedule


@dataclass(frozen=True)
class SchedulePrediction:
    """Predicted step of a candidate, and the seconds of real steps in each round, if any ran."""

    candidate: ScheduleCandidate
    seconds: float
    bubble: float
    memory: tuple[RankMemory, ...]
    measured_round_seconds: tuple[float, ...] = ()

    @property
    def measured_seconds(self) -> float | None:
        """Seconds of a typical real step; None if no real step was run."""
        return interquartile_mean(self.measured_round_seconds) if self.measured_round_seconds else None

    @cached_property
    def peak(self) -> int:
        """Bytes of the rank that needs the most memory."""
        return max(rank.total for rank in self.memory)


def microbatch_counts(rows: int, pp_size: int) -> list[int]:
    """Numbers of micro-batches that divide a batch and are worth trying, ascending.

    They range from one to eight times the number of ranks. If more than five divide the batch, it selects five that are
    spread evenly, and twice the number of ranks if that divides the batch.
    """
    counts = [count for count in range(_LEAST * pp_size, _MOST * pp_size + 1) if rows % count == 0]
    if not counts:
        raise SetupError(
            f"the batch has {rows} row(s), which no number of micro-batches from {_LEAST * pp_size} to"
            f" {_MOST * pp_size} divides (one to eight times the {pp_size} ranks of a pipeline). Use another batch"
            f" size, such as {max(1, round(rows / (2 * pp_size))) * 2 * pp_size}, or set num_microbatches"
        )
    if len(counts) > _COUNTS:
        indices = {round(index * (len(counts) - 1) / (_COUNTS - 1)) for index in range(_COUNTS)}
        selected = {counts[index] for index in indices} | {2 * pp_size} & set(counts)
        counts = sorted(selected)
    return counts


def list_candidates(
    config: PPModuleConfig,
    pp_size: int,
    measured: Measurements,
    *,
    by_memory: bool,
    allowed: Callable[[ScheduleSpec], bool] = lambda spec: True,
) -> list[ScheduleCandidate]:
    """List all candidates: PyTorch's schedules, numbers of stages and micro-batches, and splits.

    Layers are split by time, evenly, and, if memory is scarce, by memory.
    """
    candidates: dict[ScheduleCandidate, None] = {}
    for spec in filter(allowed, SCHEDULES.values()):
        for per_rank in _iter_valid_num_stages_per_rank(spec, pp_size, config.num_layers):
            for count in measured.work:
                try:
                    check_microbatches(spec, count, pp_size, per_rank)
                except SetupError:
                    continue
                for layers in _iter_candidate_layer_splits(config, pp_size * per_rank, measured, count, by_memory):
                    candidates[ScheduleCandidate(spec, per_rank, count, layers)] = None
    return list(candidates)


def _iter_valid_num_stages_per_rank(spec: ScheduleSpec, pp_size: int, num_layers: int) -> Iterator[int]:
    for count in range(1, _MOST_STAGES + 1):
        try:
            count_stages_per_rank(spec, pp_size, count)
        except SetupError:
            continue
        if count * pp_size <= num_layers:
            yield count


def _iter_candidate_layer_splits(
    config: PPModuleConfig, num_stages: int, measured: Measurements, count: int, by_memory: bool
) -> Iterator[tuple[int, ...]]:
    work, footprints = measured.work[count], measured.footprints[count]

    costs = compute_time_costs(work)
    splits = [layer_counts(config, split_by_cost(config, num_stages, costs.layers, costs.input or 0.0, costs.output))]
    with suppress(SetupError):  # the weights of input and output modules exceed the layers
        splits.append(layer_counts(config, split_layers_evenly(config, num_stages)))
    if by_memory:
        # Micro-batches that a stage in the middle of 1F1B keeps.
        live_microbatches = min(count, 1 + num_stages // 2)
        splits.append(
            split_layers_by_memory(config, num_stages, footprints, measured.optimizer_bytes, live_microbatches)
        )
    yield from dict.fromkeys(splits)


def layer_counts(config: PPModuleConfig, stages: Sequence[Sequence[str]]) -> tuple[int, ...]:
    """Number of layers of each stage, from the names of its modules."""
    layers = set(config.layer_fqns)
    return tuple(sum(name in layers for name in stage) for stage in stages)


def split_layers_by_memory(
    config: PPModuleConfig,
    num_stages: int,
    footprints: ModelPieceResults[Footprint],
    optimizer_bytes: ModelPieceResults[int],
    live_microbatches: int,
) -> tuple[int, ...]:
    """Number of layers of each stage that minimizes the memory of the stage that needs most."""
    costs = compute_memory_costs(footprints, optimizer_bytes, live_microbatches)
    return layer_counts(config, split_by_cost(config, num_stages, costs.layers, costs.input or 0.0, costs.output))


def stage_durations(
    pieces: ModelPieceResults[LayerWork], layers_per_stage: Sequence[int], scales: Mapping[Kind, float] | None = None
) -> dict[tuple[int, Kind], float]:
    """Duration of each stage's work: the sum over its pieces, plus the duration of an empty stage once."""
    factors = scales or {}
    durations: dict[tuple[int, Kind], float] = {}
    for stage in range(len(layers_per_stage)):
        parts = pieces_of_stage(pieces, layers_per_stage, stage)
        for kind in _KINDS:
            base: float = getattr(pieces.empty, kind)
            beyond_base = sum(max(getattr(part, kind) - base, 0.0) for part in parts)
            # The inputs of stage 0 are data, so the second part of a backward does all of its work.
            if stage == 0 and kind == "weight_backward":
                beyond_base = sum(max(part.backward - base, 0.0) for part in parts)
            elif stage == 0 and kind == "input_backward":
                base = beyond_base = 0.0
            durations[stage, kind] = (base + beyond_base) * factors.get(kind, 1.0)
    return durations


def predict_schedule(
    candidate: ScheduleCandidate, pp_size: int, measured: Measurements, calibration: Calibration | None = None
) -> SchedulePrediction:
    """Predict the duration, bubble and memory of a candidate's step."""
    corrections = calibration or Calibration()
    actions = list_compute_actions(candidate.spec, pp_size, candidate.num_microbatches, candidate.stages_per_rank)
    timeline = _simulate_candidate_timeline(candidate, actions, measured, corrections)
    footprints = measured.footprints[candidate.num_microbatches]
    memory = estimate_memory(
        actions, candidate.layers_per_stage, footprints, measured.optimizer_bytes, sharing=measured.sharing
    )
    return SchedulePrediction(
        candidate, timeline.makespan + corrections.step_overhead, timeline.bubble_fraction, tuple(memory)
    )


def _simulate_candidate_timeline(
    candidate: ScheduleCandidate, actions: Actions, measured: Measurements, calibration: Calibration
) -> ScheduleTimeline:
    count, layers = candidate.num_microbatches, candidate.layers_per_stage
    hidden = measured.footprints[count].empty.output
    messages = {
        direction: link.seconds(hidden)
        for (first, second), link in measured.links.items()
        for direction in ((first, second), (second, first))
    }
    durations = stage_durations(measured.work[count], layers, calibration.scales)
    return simulate_schedule(actions, durations, messages, calibration.overhead)


def fit_calibration_to_real_steps(
    runs: Sequence[tuple[ScheduleCandidate, Sequence[Sequence[Bar]], float]],
    pp_size: int,
    measured: Measurements,
) -> Calibration:
    """Derive corrections from real steps, for effects that measurements of single pieces do not show."""
    scales: dict[Kind, list[float]] = {}
    overheads: list[float] = []
    fixed: list[float] = []
    for candidate, events, seconds in runs:
        expected = stage_durations(measured.work[candidate.num_microbatches], candidate.layers_per_stage)
        busiest: dict[Kind, tuple[float, float]] = {}
        for (stage, kind), duration in compute_median_stage_durations(bar for row in events for bar in row).items():
            for work_kind in _KINDS:
                if kind == work_kind and expected[stage, work_kind] > 0.0:
                    actual, predicted = busiest.get(work_kind, (0.0, 0.0))
                    busiest[work_kind] = actual + duration, predicted + expected[stage, work_kind]
        for work_kind, (actual, predicted) in busiest.items():
            scales.setdefault(work_kind, []).append(actual / predicted)
        actions = list_compute_actions(candidate.spec, pp_size, candidate.num_microbatches, candidate.stages_per_rank)
        for rank, row in enumerate(events):
            busy = sum(bar.end - bar.start for bar in row)
            overheads.append((row[-1].end - row[0].start - busy) / len(actions[rank]))
        fixed.append(max(seconds - max(row[-1].end - row[0].start for row in events), 0.0))
    factors = {kind: statistics.median(values) for kind, values in scales.items()}
    for kind in _KINDS:
        if kind not in factors and factors:
            factors[kind] = statistics.median(factors.values())
    return Calibration(
        factors,
        max(statistics.median(overheads), 0.0) if overheads else 0.0,
        statistics.median(fixed) if fixed else 0.0,
    )


def select_finalists(
    predictions: Sequence[SchedulePrediction], max_candidates: int, of_a_schedule: int = 2
) -> list[SchedulePrediction]:
    """Fastest candidates, at most ``of_a_schedule`` of each schedule, since their prediction errors are similar."""
    selected: list[SchedulePrediction] = []
    for prediction in sorted(predictions, key=lambda prediction: prediction.seconds):
        same_schedule = [earlier for earlier in selected if earlier.candidate.spec == prediction.candidate.spec]
        if len(selected) < max_candidates and len(same_schedule) < of_a_schedule:
            selected.append(prediction)
    return selected


def merge_measurements_by_median(measurements: Sequence[ModelPieceResults[LayerWork]]) -> ModelPieceResults[LayerWork]:
    """Medians of measurements of the same pieces by several ranks."""

    def compute_median_work(*works: LayerWork) -> LayerWork:
        return LayerWork(*(statistics.median(column) for column in zip(*works, strict=True)))

    return ModelPieceResults.map(compute_median_work, *measurements)
