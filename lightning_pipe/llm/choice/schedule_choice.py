"""Which schedule, stages, micro-batches and split train a batch fastest, by simulating each schedule's actions.

    schedules x stages a rank x micro-batches x splits ──► those that fit the memory ──► simulated, fastest first
                                                                 a few run for real ──► calibration, and again

What is measured comes from elsewhere (``layer_profile``, ``links``, real steps); nothing here runs or communicates.
"""

from __future__ import annotations

import statistics
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from functools import cached_property

from lightning_pipe.engine.common.errors import SetupError
from lightning_pipe.engine.observe.timeline import Bar
from lightning_pipe.engine.planning.plan_choice import typical
from lightning_pipe.llm.measure.layer_bench import Pieces
from lightning_pipe.llm.measure.layer_costs import memory_costs, time_costs
from lightning_pipe.llm.measure.layer_profile import Footprint, LayerWork
from lightning_pipe.llm.measure.links import Link
from lightning_pipe.llm.measure.rank_memory import RankMemory, Sharing, estimate_memory, pieces_of_stage
from lightning_pipe.llm.model.module_config import ModuleConfig
from lightning_pipe.llm.schedules.checks import check_microbatches
from lightning_pipe.llm.schedules.named import SCHEDULES, ScheduleSpec, count_stages
from lightning_pipe.llm.schedules.simulation import Actions, Kind, ScheduleTimeline, actions_of, simulate
from lightning_pipe.llm.schedules.timed_stage import median_durations
from lightning_pipe.llm.split.by_name import split_by_cost, split_evenly

__all__ = [
    "Calibration",
    "Measurements",
    "ScheduleCandidate",
    "SchedulePrediction",
    "calibrate",
    "finalists",
    "layer_counts",
    "layers_by_memory",
    "list_candidates",
    "median_pieces",
    "microbatch_counts",
    "predict",
    "stage_durations",
]

# Micro-batches, by ranks: with fewer most ranks are idle, with more each is small, and the bubble as good as gone.
_LEAST, _MOST = 1, 8
_COUNTS = 5  # numbers of micro-batches to measure
_MOST_STAGES = 4  # of a rank
_KINDS: tuple[Kind, ...] = ("forward", "backward", "input_backward", "weight_backward")


@dataclass(frozen=True)
class ScheduleCandidate:
    """A way to train.

    Attributes:
        spec: the schedule.
        stages_per_rank: how many stages each rank holds.
        num_microbatches: of a batch.
        layers_per_stage: of each stage, in order.
    """

    spec: ScheduleSpec
    stages_per_rank: int
    num_microbatches: int
    layers_per_stage: tuple[int, ...]


@dataclass(frozen=True)
class Measurements:
    """What is known of a model, for each number of micro-batches.

    Attributes:
        work: seconds (or any unit) of each piece.
        footprints: bytes of each piece.
        optimizer_bytes: states of optimisers for each piece.
        links: between neighbouring ranks; none for messages that take no time.
        sharing: of stages, with other ranks.
    """

    work: Mapping[int, Pieces[LayerWork]]
    footprints: Mapping[int, Pieces[Footprint]]
    optimizer_bytes: Pieces[int]
    links: Mapping[tuple[int, int], Link] = field(default_factory=dict)
    sharing: Sharing = field(default_factory=Sharing)


@dataclass(frozen=True)
class Calibration:
    """How real steps differ from what pieces measured one by one say.

    Attributes:
        scales: by kind of work, how much longer it takes among the rest of a step.
        overhead: seconds between two actions of a rank.
        fixed: seconds of a step beside the schedule's.
    """

    scales: Mapping[Kind, float] = field(default_factory=dict)
    overhead: float = 0.0
    fixed: float = 0.0


@dataclass(frozen=True)
class SchedulePrediction:
    """What comes of a candidate.

    Attributes:
        candidate: that is meant.
        seconds: of a step, without the optimiser's.
        bubble: the share of all ranks' time that they do not compute.
        memory: of each rank of the pipeline.
        times: seconds of a real step in each round; none where it was not run.
    """

    candidate: ScheduleCandidate
    seconds: float
    bubble: float
    memory: tuple[RankMemory, ...]
    times: tuple[float, ...] = ()

    @property
    def measured(self) -> float | None:
        """Seconds of a typical real step; None where none was run."""
        return typical(self.times) if self.times else None

    @cached_property
    def peak(self) -> int:
        """Bytes of the rank that needs most."""
        return max(one.total for one in self.memory)


def microbatch_counts(rows: int, pp_size: int) -> list[int]:
    """Numbers of micro-batches that divide a batch and are worth a try, ascending.

    Between once and eight times the ranks; of many, five that are spread evenly, twice the ranks among them.

    Raises:
        SetupError: there is none.
    """
    found = [count for count in range(_LEAST * pp_size, _MOST * pp_size + 1) if rows % count == 0]
    if not found:
        raise SetupError(
            f"the batch has {rows} row(s), which no number of micro-batches from {_LEAST * pp_size} to"
            f" {_MOST * pp_size} divides (once to eight times the {pp_size} ranks of a pipeline); needed is another"
            f" batch size, such as {max(1, round(rows / (2 * pp_size))) * 2 * pp_size}, or num_microbatches"
        )
    if len(found) > _COUNTS:
        places = {round(place * (len(found) - 1) / (_COUNTS - 1)) for place in range(_COUNTS)}
        kept = {found[place] for place in places} | {2 * pp_size} & set(found)
        found = sorted(kept)
    return found


def list_candidates(
    config: ModuleConfig,
    pp_size: int,
    measured: Measurements,
    *,
    by_memory: bool,
    allowed: Callable[[ScheduleSpec], bool] = lambda spec: True,
) -> list[ScheduleCandidate]:
    """All that there are of PyTorch's schedules, numbers of stages and micro-batches, and splits.

    Splits are by time, as many layers a stage, and where memory is scarce by memory.

    Args:
        config: what the model is made of.
        pp_size: ranks of the pipeline.
        measured: for the numbers of micro-batches that are wanted.
        by_memory: whether memory is scarce.
        allowed: whether a schedule may be used.
    """
    found: dict[ScheduleCandidate, None] = {}
    for spec in filter(allowed, SCHEDULES.values()):
        for per_rank in _stage_counts(spec, pp_size, config.num_layers):
            for count in measured.work:
                try:
                    check_microbatches(spec, count, pp_size, per_rank)
                except SetupError:
                    continue
                for layers in _splits(config, pp_size * per_rank, measured, count, by_memory):
                    found[ScheduleCandidate(spec, per_rank, count, layers)] = None
    return list(found)


def _stage_counts(spec: ScheduleSpec, pp_size: int, num_layers: int) -> Iterator[int]:
    for count in range(1, _MOST_STAGES + 1):
        try:
            count_stages(spec, pp_size, count)
        except SetupError:
            continue
        if count * pp_size <= num_layers:
            yield count


def _splits(
    config: ModuleConfig, num_stages: int, measured: Measurements, count: int, by_memory: bool
) -> Iterator[tuple[int, ...]]:
    work, footprints = measured.work[count], measured.footprints[count]

    costs = time_costs(work)
    found = [layer_counts(config, split_by_cost(config, num_stages, costs.layers, costs.input or 0.0, costs.output))]
    with suppress(SetupError):  # fewer layers than its weights take off
        found.append(layer_counts(config, split_evenly(config, num_stages)))
    if by_memory:
        # What a stage in the middle of 1F1B's keeps.
        kept = min(count, 1 + num_stages // 2)
        found.append(layers_by_memory(config, num_stages, footprints, measured.optimizer_bytes, kept))
    yield from dict.fromkeys(found)


def layer_counts(config: ModuleConfig, stages: Sequence[Sequence[str]]) -> tuple[int, ...]:
    """How many layers each stage has, from the names of what it holds."""
    layers = set(config.layers)
    return tuple(sum(name in layers for name in stage) for stage in stages)


def layers_by_memory(
    config: ModuleConfig, num_stages: int, footprints: Pieces[Footprint], optimizer_bytes: Pieces[int], kept: int
) -> tuple[int, ...]:
    """How many layers each stage has, where the one that needs most memory is to need the least.

    Args:
        config: what the model is made of.
        num_stages: of all ranks.
        footprints: of one micro-batch.
        optimizer_bytes: states of optimisers for each piece.
        kept: how many micro-batches a stage keeps at a time.
    """
    costs = memory_costs(footprints, optimizer_bytes, kept)
    return layer_counts(config, split_by_cost(config, num_stages, costs.layers, costs.input or 0.0, costs.output))


def stage_durations(
    pieces: Pieces[LayerWork], layers_per_stage: Sequence[int], scales: Mapping[Kind, float] | None = None
) -> dict[tuple[int, Kind], float]:
    """What each stage's work takes: the sum of its pieces', and once that of a stage without any.

    Args:
        pieces: of one micro-batch.
        layers_per_stage: of all stages.
        scales: by kind, factors.
    """
    factors = scales or {}
    found: dict[tuple[int, Kind], float] = {}
    for stage in range(len(layers_per_stage)):
        parts = pieces_of_stage(pieces, layers_per_stage, stage)
        for kind in _KINDS:
            base: float = getattr(pieces.empty, kind)
            own = sum(max(getattr(one, kind) - base, 0.0) for one in parts)
            # The first part of a backward has nothing to do on stage 0, whose inputs are data: all is in the second.
            if stage == 0 and kind == "weight_backward":
                own = sum(max(one.backward - base, 0.0) for one in parts)
            elif stage == 0 and kind == "input_backward":
                base = own = 0.0
            found[stage, kind] = (base + own) * factors.get(kind, 1.0)
    return found


def predict(
    candidate: ScheduleCandidate, pp_size: int, measured: Measurements, calibration: Calibration | None = None
) -> SchedulePrediction:
    """What a step of a candidate takes.

    Args:
        candidate: that is asked for.
        pp_size: ranks of the pipeline.
        measured: of the model.
        calibration: from real steps.
    """
    known = calibration or Calibration()
    actions = actions_of(candidate.spec, pp_size, candidate.num_microbatches, candidate.stages_per_rank)
    timeline = _timeline(candidate, actions, measured, known)
    footprints = measured.footprints[candidate.num_microbatches]
    memory = estimate_memory(
        actions, candidate.layers_per_stage, footprints, measured.optimizer_bytes, sharing=measured.sharing
    )
    return SchedulePrediction(candidate, timeline.makespan + known.fixed, timeline.bubble_fraction, tuple(memory))


def _timeline(
    candidate: ScheduleCandidate, actions: Actions, measured: Measurements, known: Calibration
) -> ScheduleTimeline:
    count, layers = candidate.num_microbatches, candidate.layers_per_stage
    hidden = measured.footprints[count].empty.output
    messages = {
        way: link.seconds(hidden)
        for (one, other), link in measured.links.items()
        for way in ((one, other), (other, one))
    }
    durations = stage_durations(measured.work[count], layers, known.scales)
    return simulate(actions, durations, messages, known.overhead)


def calibrate(
    runs: Sequence[tuple[ScheduleCandidate, Sequence[Sequence[Bar]], float]],
    pp_size: int,
    measured: Measurements,
) -> Calibration:
    """From real steps what the pieces, measured one by one, do not say.

    Args:
        runs: candidates; what the ranks of their pipeline noted in a step, in order; seconds that the step took.
        pp_size: ranks of the pipeline.
        measured: of the model.
    """
    scales: dict[Kind, list[float]] = {}
    overheads: list[float] = []
    fixed: list[float] = []
    for candidate, events, seconds in runs:
        expected = stage_durations(measured.work[candidate.num_microbatches], candidate.layers_per_stage)
        busiest: dict[Kind, tuple[float, float]] = {}
        for (stage, kind), taken in median_durations(one for row in events for one in row).items():
            for known in _KINDS:
                if kind == known and expected[stage, known] > 0.0:
                    real, said = busiest.get(known, (0.0, 0.0))
                    busiest[known] = real + taken, said + expected[stage, known]
        for known, (real, said) in busiest.items():
            scales.setdefault(known, []).append(real / said)
        actions = actions_of(candidate.spec, pp_size, candidate.num_microbatches, candidate.stages_per_rank)
        for rank, row in enumerate(events):
            noted = sum(one.end - one.start for one in row)
            overheads.append((row[-1].end - row[0].start - noted) / len(actions[rank]))
        fixed.append(max(seconds - max(row[-1].end - row[0].start for row in events), 0.0))
    found = {kind: statistics.median(values) for kind, values in scales.items()}
    for kind in _KINDS:
        if kind not in found and found:
            found[kind] = statistics.median(found.values())
    return Calibration(
        found,
        max(statistics.median(overheads), 0.0) if overheads else 0.0,
        statistics.median(fixed) if fixed else 0.0,
    )


def finalists(predictions: Sequence[SchedulePrediction], most: int, of_a_schedule: int = 2) -> list[SchedulePrediction]:
    """The fastest, of no schedule more than so many: where one is taken for too slow, its like are too.

    Args:
        predictions: of all candidates.
        most: how many in all.
        of_a_schedule: how many of each.
    """
    kept: list[SchedulePrediction] = []
    for one in sorted(predictions, key=lambda one: one.seconds):
        like = [other for other in kept if other.candidate.spec == one.candidate.spec]
        if len(kept) < most and len(like) < of_a_schedule:
            kept.append(one)
    return kept


def median_pieces(found: Sequence[Pieces[LayerWork]]) -> Pieces[LayerWork]:
    """Each number's median over ranks that measured the same."""

    def median(*works: LayerWork) -> LayerWork:
        return LayerWork(*(statistics.median(column) for column in zip(*works, strict=True)))

    return Pieces.of(median, *found)
