"""Step time of each schedule against its bound: the time of its actions alone, without communication.

``torchrun --nproc-per-node 2 -m benchmarks.llm_bounds`` runs steps without a Trainer, with alternating schedules. Each
timed step, from a barrier to the end of the slowest rank, is followed by a step whose forwards and backwards are timed.
The bound is the length of a simulated step whose actions take the median of these durations. The ratio is bound / step
time: the median over the pairs, with the ratio of the medians over the whole run in parentheses. Without FSDP and an
optimizer, all time of a step is either spent in actions or lost.

Each rank is pinned to a core (``--no-pin`` leaves the placement to the system). If all cores are computing, a message
to a late receiver is sent by a Gloo thread that first has to wait for a core, which takes 3 ms instead of 0.5 ms.
"""

from __future__ import annotations

import argparse
import os
import statistics
import time
from dataclasses import dataclass, field
from typing import Any

import torch
import torch.distributed as dist
from torch import nn

from benchmarks.figures import Figure, add_options, at_least, quartiles, save
from benchmarks.llm_stages import loss_of, make_micro_batches, make_runner
from lightning_pipe.engine.observe.timeline import Bar
from lightning_pipe.llm.run.schedule_runner import ScheduleRunner
from lightning_pipe.llm.schedules.bubble import StepBubble, build_bubble_report, compute_step_bubble
from lightning_pipe.llm.schedules.simulation import list_compute_actions, simulate_schedule
from lightning_pipe.llm.schedules.specs import SCHEDULES
from lightning_pipe.llm.schedules.timed_stage import compute_median_stage_durations

TARGET = 0.96


@dataclass
class Schedule:
    """A running schedule and its measurements."""

    runner: ScheduleRunner
    stages: dict[int, nn.Module]
    times: list[float] = field(default_factory=list)
    events: list[Bar] = field(default_factory=list)
    bubbles: list[StepBubble] = field(default_factory=list)


def step(schedule: Schedule, inputs: list[Any], *, record: bool) -> tuple[float, list[Bar]]:
    """Run one step after a barrier, and return this rank's seconds and recorded events."""
    for stage in schedule.stages.values():
        stage.zero_grad()
    schedule.runner.events.clear()
    schedule.runner.record_events = record
    dist.barrier()
    start = time.perf_counter()
    schedule.runner.train(inputs, loss_of)
    return time.perf_counter() - start, list(schedule.runner.events)


def pin() -> None:
    """Pin this rank's threads, including those of Gloo, to a separate core."""
    cores = sorted(os.sched_getaffinity(0))
    if len(cores) >= int(os.environ["LOCAL_WORLD_SIZE"]):
        os.sched_setaffinity(0, {cores[int(os.environ["LOCAL_RANK"])]})


def gather(value: Any) -> list[Any]:
    """Values of all ranks."""
    values: list[Any] = [None] * dist.get_world_size()
    dist.all_gather_object(values, value)
    return values


def main() -> None:
    """Print the table."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--schedules", nargs="+", default=list(SCHEDULES))
    for option, default in (
        ("width", 768), ("layers", 4), ("rows", 2), ("length", 64), ("micro-batches", 8), ("repetitions", 5)
    ):  # fmt: skip
        parser.add_argument(f"--{option}", type=int, default=default)
    add_options(parser)
    parser.add_argument("--pin", action=argparse.BooleanOptionalAction, default=True)
    options = parser.parse_args()
    torch.set_num_threads(1)
    os.environ.setdefault("OMP_NUM_THREADS", "1")
    if options.pin:
        pin()
    dist.init_process_group("gloo")
    ranks, count = dist.get_world_size(), options.micro_batches
    inputs = make_micro_batches(count, options.rows, options.length)
    at_work = {name: Schedule(*make_runner(name, options.width, options.layers)) for name in options.schedules}
    actions = {name: list_compute_actions(SCHEDULES[name], ranks, count) for name in at_work}
    for repetition in range(options.repetitions + 1):
        for name, schedule in at_work.items():
            seconds, _ = step(schedule, inputs, record=False)
            _, events = step(schedule, inputs, record=True)
            times, noted = gather(seconds), gather(events)
            if repetition:  # the first one creates the schedules and touches memory
                schedule.times.append(max(times))
                schedule.events += [event for row in noted for event in row]
                schedule.bubbles.append(compute_step_bubble(noted, actions[name]))
    figures: list[Figure] = []
    if dist.get_rank() == 0:
        print(
            f"{ranks} ranks, {count} micro-batches of {options.rows} x {options.length} tokens, {options.layers} layers"
            f" of width {options.width}; medians over {options.repetitions} repetitions; times in ms\n"
        )
        print(
            f"{'schedule':<24}{'step':>9}{'bound':>9}{'ratio':>17}   {'forward':>8}{'bubble':>8}{'bound':>8}"
            "   rank: waits forward, waits backward, other, done"
        )
        for name, schedule in at_work.items():
            durations = compute_median_stage_durations(schedule.events)
            bound = simulate_schedule(actions[name], durations)  # type: ignore[arg-type]
            measured = statistics.median(schedule.times)
            ratios = [
                (bubble.simulated_step or 0) / step_time
                for bubble, step_time in zip(schedule.bubbles, schedule.times, strict=True)
            ]
            ratio = statistics.median(ratios)
            title = f"LLM bound of its own actions / step, {name}, m = {count}"
            figures.append(at_least(title, ratio, TARGET, quartiles(ratios)))
            forward = statistics.median(duration for (_, kind), duration in durations.items() if kind == "forward")
            medians = build_bubble_report(SCHEDULES[name], count, schedule.bubbles).medians
            lost = "; ".join(
                f"{rank}: "
                + ", ".join(f"{1e3 * s:.1f}" for s in (row.wait_forward, row.wait_backward, row.overhead, row.wait_end))
                for rank, row in enumerate(medians.ranks)
            )
            print(
                f"{name:<24}{1e3 * measured:>9.1f}{1e3 * bound.makespan:>9.1f}{ratio:>9.3f}"
                f" ({bound.makespan / measured:.3f}) {' <'[ratio < TARGET]}"
                f" {1e3 * forward:>8.1f}{medians.measured:>8.1%}{bound.bubble_fraction:>8.1%}   {lost}",
                flush=True,
            )
        print(f"\n<: below the target of {TARGET}")
        save(figures, options.json)
    dist.barrier()
    os._exit(0)  # a Gloo thread may still release a tensor, which fails after the interpreter has shut down


if __name__ == "__main__":
    main()
