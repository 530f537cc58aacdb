"""What holds a step up, told from what the main threads of all ranks did in it: one sentence, with what to try.

Ranks go in step, so a slow one makes the others wait. What the rank waits that waits least is the time of messages, or
the worker threads'; what others wait beyond that, they wait for that rank.

Tested in ``tests/callbacks/test_monitor.py``.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

from lightning_pipe.engine import PipelinePlan
from lightning_pipe.engine.plans.schedule import MAIN

__all__ = ["StepUse", "Verdict", "find_verdict", "forward_wait"]

# What these tasks do is wait for other ranks, where there are any.
_FORWARD_WAITS = ("EmbInputDistWait", "EmbPrefetch")
_BACKWARD_WAITS = ("FinalizeGrads",)
_COPIES = ("H2DAndShuffle", "H2D")
# Of a step: less than that is not worth a change.
_MUCH = 0.1
# Steps from which a mean is taken for what an epoch is like, so that a number of workers is computed from it.
_ENOUGH = 10
# Batches that each worker of PyTorch's DataLoader makes ahead (``prefetch_factor``).
_AHEAD = 2


@dataclass(frozen=True)
class StepUse:
    """What a rank's main thread does in a step: means, in seconds unless said otherwise.

    Args:
        steps: how many it is the mean of.
        seconds: of a step.
        loader: fetching from its data loader.
        other_loaders: in what ranks say to each other about the batches they have.
        workers: waiting for worker threads.
        tasks: in each task that it runs itself.
        in_flight: the number of batches started and not yet trained.
        samples: of a batch; None where that is not known.
    """

    steps: int
    seconds: float
    loader: float
    other_loaders: float = 0.0
    workers: float = 0.0
    tasks: Mapping[str, float] = field(default_factory=dict)
    in_flight: float = 1.0
    samples: float | None = None


@dataclass(frozen=True)
class Verdict:
    """What holds a step up.

    Args:
        kind: ``"input-bound"``, ``"network-bound"``, ``"rank-bound"`` (the same where all ranks share a host),
            ``"worker-bound"``, ``"uneven"``, ``"copy-bound"``, ``"hook-bound"``, ``"schedule-bound"`` or
            ``"compute-bound"``.
        text: the same in a sentence, with the figure and what to try.
    """

    kind: str
    text: str


def forward_wait(use: StepUse, ranks: int) -> float:
    """Seconds of a step in which the main thread waits for what forward needs, be it of workers or of other ranks."""
    return use.workers + (sum(use.tasks.get(name, 0.0) for name in _FORWARD_WAITS) if ranks > 1 else 0.0)


def find_verdict(
    uses: Sequence[StepUse],
    plan: PipelinePlan,
    *,
    num_workers: int | None = None,
    cores: int = 1,
    has_pipe: bool = False,
    one_host: bool = False,
) -> Verdict:
    """The largest of what a step need not consist of; where all of that is small, that there is nothing to gain.

    Args:
        uses: by rank.
        plan: what they run.
        num_workers: of the data loader; None where it is not PyTorch's.
        cores: that each rank has.
        has_pipe: whether a step's work is that of a pipe's partitions.
        one_host: whether all ranks share a host, so that no network is between them.
    """
    ranks = len(uses)
    loaders = [use.loader / use.seconds for use in uses]
    waits = [_waits(use, ranks) / use.seconds for use in uses]
    slowest, fastest = waits.index(min(waits)), waits.index(max(waits))
    slow_loader = loaders.index(max(loaders))
    first = uses[0]
    found = {
        "input-bound": max(loaders),
        ("rank-bound" if one_host else "network-bound") if ranks > 1 else "worker-bound": waits[slowest],
        # Beyond what the slowest rank's loader explains.
        "uneven": waits[fastest] - waits[slowest] - max(0.0, loaders[slowest] - loaders[fastest]),
        "copy-bound": sum(first.tasks.get(name, 0.0) for name in _COPIES) / first.seconds,
        "hook-bound": _outside(first) / first.seconds,
    }
    kind = max(found, key=lambda name: found[name])
    share = f"{100 * found[kind]:.0f} % of the step"
    if found[kind] < _MUCH:
        return _nothing_to_gain(first, ranks, has_pipe)
    if kind == "input-bound":
        where = f" on rank {slow_loader}" if ranks > 1 else ""
        advice = _loader_advice(uses[slow_loader], num_workers, cores)
        return Verdict(kind, f"input-bound: {share} waits for the data loader{where}; {advice}")
    if kind in ("network-bound", "rank-bound"):
        one = uses[slowest]
        more = (one.workers, "worker threads"), (one.other_loaders, "agreeing on batches")
        parts = _largest(one, [*_FORWARD_WAITS, *_BACKWARD_WAITS], *more)
        advice = _exchange_advice(one, plan, one_host)
        whom = "other ranks on this machine" if one_host else "messages of other ranks"
        return Verdict(kind, f"{kind}: {share} waits for {whom} ({parts}); {advice}")
    if kind == "worker-bound":
        threads = ", ".join(repr(group) for group in plan.thread_groups if group != MAIN)
        advice = "their tasks take longer than what they run beside: start them earlier in the plan, or spread them"
        return Verdict(kind, f"worker-bound: {share} waits for the worker threads ({threads}); {advice}")
    if kind == "uneven":
        return Verdict(
            kind,
            f"uneven: rank {fastest} waits {share} longer than rank {slowest}, which is the slowest; give ranks batches"
            " of even size, and look for what else runs on its machine",
        )
    if kind == "copy-bound":
        return Verdict(
            kind,
            f"copy-bound: {share} goes to moving batches to the device ({_largest(first, _COPIES)}); try"
            " pin_memory=True in the data loader, and less work in the module's batch-transfer hooks",
        )
    return Verdict(
        kind,
        f"hook-bound: {share} lies outside the pipeline's tasks, in hooks, callbacks and logging; log less often, or"
        " train larger batches",
    )


def _waits(use: StepUse, ranks: int) -> float:
    backward = sum(use.tasks.get(name, 0.0) for name in _BACKWARD_WAITS) if ranks > 1 else 0.0
    return forward_wait(use, ranks) + backward + use.other_loaders


def _outside(use: StepUse) -> float:
    return max(0.0, use.seconds - use.loader - use.other_loaders - use.workers - sum(use.tasks.values()))


def _nothing_to_gain(use: StepUse, ranks: int, has_pipe: bool) -> Verdict:
    waits = (*_FORWARD_WAITS, *_BACKWARD_WAITS) if ranks > 1 else ()
    work = [name for name in use.tasks if name not in (*waits, *_COPIES)]
    share = f"{100 * sum(use.tasks[name] for name in work) / use.seconds:.0f} % of the step"
    if "ScheduleStep" in use.tasks:
        return Verdict(
            "schedule-bound",
            f"schedule-bound: {share} is the schedule's; BubbleMonitor says how much of that is waiting for neighbours",
        )
    if has_pipe:
        return Verdict(
            "schedule-bound",
            f"schedule-bound: {share} is the pipe's; PipelineTrace shows how much of that its partitions wait for each"
            " other",
        )
    parts = _largest(use, work)
    return Verdict("compute-bound", f"compute-bound: {share} is work ({parts}); nothing to gain from the pipeline")


def _largest(use: StepUse, names: Sequence[str], *more: tuple[float, str]) -> str:
    """The largest three of some tasks, and of other seconds, with their shares of the step."""
    parts = [(use.tasks.get(name, 0.0), name) for name in names]
    shown = [
        f"{name} {100 * seconds / use.seconds:.0f} %"
        for seconds, name in sorted([*parts, *more], reverse=True)
        if seconds > 0.01 * use.seconds
    ]
    return ", ".join(shown[:3])


def _loader_advice(use: StepUse, num_workers: int | None, cores: int) -> str:
    if num_workers is None:
        return "prepare batches in the background, as PyTorch's DataLoader does with num_workers"
    # Until each worker has made once what it makes ahead, a step waits for workers that start.
    enough = max(_ENOUGH, _AHEAD * num_workers)
    if use.steps < enough:
        return (
            f"{use.steps} steps are too few to tell how many workers hide it, needed are {enough}: train a longer epoch"
            f" before changing num_workers (it is {num_workers})"
        )
    # Without workers a batch takes its time in this process; n of them have n steps for one.
    batch = use.loader if num_workers == 0 else num_workers * use.seconds
    wanted = math.ceil(batch / max(use.seconds - use.loader, 1e-9))
    if wanted <= max(cores, num_workers + 1):
        return f"try num_workers={max(wanted, num_workers + 1)} (it is {num_workers})"
    if cores > num_workers:
        return f"try num_workers={cores} (it is {num_workers}); to hide it all would take {wanted}, and cores as many"
    return (
        f"its {num_workers} workers have all cores there are ({cores} a rank): read and collate less for a batch, or"
        " store it prepared"
    )


def _exchange_advice(use: StepUse, plan: PipelinePlan, one_host: bool) -> str:
    forward = sum(use.tasks.get(name, 0.0) for name in _FORWARD_WAITS) + use.workers
    if forward < sum(use.tasks.get(name, 0.0) for name in _BACKWARD_WAITS):
        return "most of it is the average of dense gradients: train larger batches, or fewer dense parameters"
    prefetch = plan.schedule.get("EmbPrefetch")
    if prefetch is not None and prefetch.thread_group == MAIN:
        gains = ", which gain where cores are idle meanwhile" if one_host else ""
        return f"the plan is {plan.name!r}: try strategy='recsys_prefetch_pipeline' or 'recsys_auto_pipeline'{gains}"
    if one_host:
        return "what it is to hide behind is shorter, or keeps all cores busy: try fewer ranks, with more cores each"
    less = " (fewer ids, narrower tables)" if prefetch is not None else ""
    return f"it takes longer than what it can hide behind: send less{less}, or train nearer"
