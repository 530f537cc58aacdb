"""Diagnosis of the bottleneck of a step from the activity of all ranks' main threads: one sentence with advice.

Ranks run in lockstep, so a slow rank makes the others wait. The wait of the rank that waits least is attributed to
messages or worker threads. Any additional wait of another rank is a wait for that rank.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

from lightning_pipe.engine import PipelinePlan
from lightning_pipe.engine.plans.schedule import MAIN

# Tasks that spend their time waiting for other ranks, if there are several.
_FORWARD_WAITS = ("EmbInputDistWait", "EmbPrefetch")
_BACKWARD_WAITS = ("FinalizeGrads",)
_COPIES = ("H2DAndShuffle", "H2D")
# Share of a step below which a cause is not worth a change.
_MUCH = 0.1
# Share of a step above which a straggler is named.
_COSTLY = 0.05
# Number of steps from which their mean is considered representative, so that a number of workers is computed from it.
_ENOUGH = 10
# Batches that each worker of PyTorch's DataLoader prefetches (``prefetch_factor``).
_AHEAD = 2


@dataclass(frozen=True)
class StepBreakdown:
    """Mean time of a step by activity of a rank's main thread, in seconds.

    Attributes:
        steps: number of steps that the means cover.
        seconds: duration of a step.
        loader: time to fetch from the rank's data loader.
        other_loaders: time in which ranks agree on the batches that they have, including waits for slower loaders.
        workers: time waiting for worker threads.
        tasks: time in each task that the main thread runs itself.
        in_flight: number of batches started and not yet trained.
        samples: number of samples of a batch; None if it is unknown.
        wait_share: median over steps of the share of a step that the main thread waits for other ranks or workers.
        host: name of the rank's host.
    """

    steps: int
    seconds: float
    loader: float
    other_loaders: float = 0.0
    workers: float = 0.0
    tasks: Mapping[str, float] = field(default_factory=dict)
    in_flight: float = 1.0
    samples: float | None = None
    wait_share: float = 0.0
    host: str = ""


@dataclass(frozen=True)
class Straggler:
    """Rank that all others wait for; *cost* is the share of a step saved if it were as fast as the next slowest."""

    rank: int
    host: str
    cost: float
    text: str


@dataclass(frozen=True)
class BottleneckVerdict:
    """Bottleneck of a step."""

    kind: str
    text: str
    straggler: Straggler | None = None


def find_straggler(uses: Sequence[StepBreakdown]) -> Straggler | None:
    """Find the rank that waits least, if all others wait longer by more than 5 % of the step."""
    if len(uses) < 2:
        return None
    slowest, second = sorted(range(len(uses)), key=lambda rank: uses[rank].wait_share)[:2]
    cost = uses[second].wait_share - uses[slowest].wait_share
    if cost <= _COSTLY:
        return None
    work = [{**use.tasks, "data loader": use.loader} for use in uses]
    other_tasks = [tasks for rank, tasks in enumerate(work) if rank != slowest]
    excess = {
        name: seconds - min(tasks.get(name, 0.0) for tasks in other_tasks) for name, seconds in work[slowest].items()
    }
    where = f"rank {slowest} on host {uses[slowest].host}"
    text = f"straggler: all ranks wait for {where}, which costs {100 * cost:.0f} % of the step, most of it in"
    return Straggler(slowest, uses[slowest].host, cost, f"{text} {max(excess, key=lambda name: excess[name])}")


def compute_forward_wait_seconds(use: StepBreakdown, ranks: int) -> float:
    """Seconds of a step in which the main thread waits for inputs of forward from worker threads or other ranks."""
    return use.workers + (sum(use.tasks.get(name, 0.0) for name in _FORWARD_WAITS) if ranks > 1 else 0.0)


def diagnose_bottleneck(
    uses: Sequence[StepBreakdown],
    plan: PipelinePlan,
    *,
    num_workers: int | None = None,
    cores: int = 1,
    has_pipe: bool = False,
    one_host: bool = False,
) -> BottleneckVerdict:
    """Find the largest avoidable part of a step. If all of them are small, the verdict is that no gain is possible."""
    ranks = len(uses)
    loaders = [use.loader / use.seconds for use in uses]
    waits = [compute_main_thread_wait_seconds(use, ranks) / use.seconds for use in uses]
    slowest, fastest = waits.index(min(waits)), waits.index(max(waits))
    slow_loader = loaders.index(max(loaders))
    first = uses[0]
    shares = {
        "input-bound": max(loaders),
        ("rank-bound" if one_host else "network-bound") if ranks > 1 else "worker-bound": waits[slowest],
        # Minus the part that the slowest rank's loader explains.
        "uneven": waits[fastest] - waits[slowest] - max(0.0, loaders[slowest] - loaders[fastest]),
        "copy-bound": sum(first.tasks.get(name, 0.0) for name in _COPIES) / first.seconds,
        "hook-bound": _compute_time_outside_tasks(first) / first.seconds,
    }
    kind = max(shares, key=lambda name: shares[name])
    share = f"{100 * shares[kind]:.0f} % of the step"
    if shares[kind] < _MUCH:
        return _make_no_gain_verdict(first, ranks, has_pipe)
    if kind == "input-bound":
        where = f" on rank {slow_loader}" if ranks > 1 else ""
        advice = _loader_advice(uses[slow_loader], num_workers, cores)
        return BottleneckVerdict(kind, f"input-bound: {share} waits for the data loader{where}; {advice}")
    if kind in ("network-bound", "rank-bound"):
        slowest_use = uses[slowest]
        extras = (slowest_use.workers, "worker threads"), (slowest_use.other_loaders, "agreement on batches")
        parts = _describe_largest_tasks(slowest_use, [*_FORWARD_WAITS, *_BACKWARD_WAITS], *extras)
        advice = _communication_advice(slowest_use, plan, one_host)
        whom = "other ranks on this machine" if one_host else "messages of other ranks"
        return BottleneckVerdict(kind, f"{kind}: {share} waits for {whom} ({parts}); {advice}")
    if kind == "worker-bound":
        threads = ", ".join(repr(group) for group in plan.thread_group_names if group != MAIN)
        advice = (
            "their tasks take longer than the work that they overlap with: start them earlier in the plan, or spread"
            " them over more threads"
        )
        return BottleneckVerdict(kind, f"worker-bound: {share} waits for the worker threads ({threads}); {advice}")
    if kind == "uneven":
        return BottleneckVerdict(
            kind,
            f"uneven: rank {fastest} waits {share} longer than rank {slowest}, the slowest rank; use batches of equal"
            " size on all ranks, and check for other processes on the slowest rank's machine",
        )
    if kind == "copy-bound":
        copies = _describe_largest_tasks(first, _COPIES)
        return BottleneckVerdict(
            kind,
            f"copy-bound: {share} is spent moving batches to the device ({copies}); try"
            " pin_memory=True in the data loader, and reduce the work in the module's batch-transfer hooks",
        )
    return BottleneckVerdict(
        kind,
        f"hook-bound: {share} is spent outside the pipeline's tasks, in hooks, callbacks and logging; log less often,"
        " or use larger batches",
    )


def compute_main_thread_wait_seconds(use: StepBreakdown, ranks: int) -> float:
    """Seconds of a step in which the main thread waits for other ranks or worker threads."""
    backward = sum(use.tasks.get(name, 0.0) for name in _BACKWARD_WAITS) if ranks > 1 else 0.0
    return compute_forward_wait_seconds(use, ranks) + backward + use.other_loaders


def _compute_time_outside_tasks(use: StepBreakdown) -> float:
    return max(0.0, use.seconds - use.loader - use.other_loaders - use.workers - sum(use.tasks.values()))


def _make_no_gain_verdict(use: StepBreakdown, ranks: int, has_pipe: bool) -> BottleneckVerdict:
    waits = (*_FORWARD_WAITS, *_BACKWARD_WAITS) if ranks > 1 else ()
    work = [name for name in use.tasks if name not in (*waits, *_COPIES)]
    share = f"{100 * sum(use.tasks[name] for name in work) / use.seconds:.0f} % of the step"
    if "ScheduleStep" in use.tasks:
        return BottleneckVerdict(
            "schedule-bound",
            f"schedule-bound: {share} is spent in the schedule; use BubbleMonitor to see how much of it is waiting for"
            " other stages",
        )
    if has_pipe:
        return BottleneckVerdict(
            "schedule-bound",
            f"schedule-bound: {share} is spent in the pipe; use PipelineTrace to see how long its partitions wait for"
            " each other",
        )
    parts = _describe_largest_tasks(use, work)
    return BottleneckVerdict(
        "compute-bound", f"compute-bound: {share} is work ({parts}); the pipeline cannot gain more"
    )


def _describe_largest_tasks(use: StepBreakdown, names: Sequence[str], *extras: tuple[float, str]) -> str:
    """Three largest of the tasks in *names* and of *extras*, as text with their shares of the step."""
    parts = [(use.tasks.get(name, 0.0), name) for name in names]
    shown = [
        f"{name} {100 * seconds / use.seconds:.0f} %"
        for seconds, name in sorted([*parts, *extras], reverse=True)
        if seconds > 0.01 * use.seconds
    ]
    return ", ".join(shown[:3])


def _loader_advice(use: StepBreakdown, num_workers: int | None, cores: int) -> str:
    if num_workers is None:
        return "prepare batches in the background, as PyTorch's DataLoader does with num_workers"
    # Until each worker has filled its prefetch queue once, a step includes the start-up of workers.
    enough = max(_ENOUGH, _AHEAD * num_workers)
    if use.steps < enough:
        return (
            f"the epoch has only {use.steps} steps, but at least {enough} are needed to estimate the number of workers:"
            f" train a longer epoch before changing num_workers (currently {num_workers})"
        )
    # Without workers the loading time of a batch is spent in this process; each of n workers has n steps for a batch.
    batch = use.loader if num_workers == 0 else num_workers * use.seconds
    needed = math.ceil(batch / max(use.seconds - use.loader, 1e-9))
    if needed <= max(cores, num_workers + 1):
        return f"try num_workers={max(needed, num_workers + 1)} (currently {num_workers})"
    if cores > num_workers:
        return (
            f"try num_workers={cores} (currently {num_workers}); hiding all of it would take {needed} workers on"
            " separate cores"
        )
    return (
        f"its {num_workers} workers already occupy all cores ({cores} per rank): read and collate less per batch, or"
        " store batches preprocessed"
    )


def _communication_advice(use: StepBreakdown, plan: PipelinePlan, one_host: bool) -> str:
    forward = sum(use.tasks.get(name, 0.0) for name in _FORWARD_WAITS) + use.workers
    if forward < sum(use.tasks.get(name, 0.0) for name in _BACKWARD_WAITS):
        return "most of it is the all-reduce of dense gradients: use larger batches, or fewer dense parameters"
    prefetch = plan.schedule.get("EmbPrefetch")
    if prefetch is not None and prefetch.thread_group == MAIN:
        gains = ", which help if cores are idle during the wait" if one_host else ""
        return f"the plan is {plan.name!r}: try strategy='recsys_prefetch_pipeline' or 'recsys_auto_pipeline'{gains}"
    if one_host:
        return (
            "the work that overlaps with it is too short, or keeps all cores busy: try fewer ranks with more cores each"
        )
    less = " (fewer ids, narrower tables)" if prefetch is not None else ""
    return f"it takes longer than the work that it can overlap with: send less data{less}, or use a faster network"
