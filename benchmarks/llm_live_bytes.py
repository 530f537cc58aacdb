"""Activations that each rank holds under each schedule, counted tensor by tensor.

``torchrun --nproc-per-node 2 -m benchmarks.llm_live_bytes`` (or 4 ranks) prints, for every schedule and rank, the
maximum number of micro-batches whose activations were in memory at the same time, with the number from a simulation of
the schedule's actions (GPipe m, 1F1B P - rank); their bytes; and the peak bytes of all tensors created in the step,
including gradients. A micro-batch counts once for each stage of the rank while more than its sent output is in memory,
because PyTorch keeps sent outputs until the end of the step for schedules with several stages per rank.

A figure is the measured number of micro-batches over the simulated one, on the worst rank.
"""

from __future__ import annotations

import argparse
import os
from typing import Any

import torch
import torch.distributed as dist

from benchmarks.figures import Figure, add_options, save
from benchmarks.forward_bytes import ForwardBytes
from benchmarks.llm_stages import loss_of, make_micro_batches, make_runner
from lightning_pipe.llm.schedules.simulation import list_compute_actions, simulate_schedule
from lightning_pipe.llm.schedules.specs import SCHEDULES

KINDS = ("forward", "backward", "input_backward", "weight_backward")
MEBIBYTE = 2**20


def measure(name: str, options: argparse.Namespace) -> tuple[int, int, int, int]:
    """Peak number of micro-batches, peak activation bytes, bytes of one micro-batch, and peak bytes of all tensors."""
    runner, stages = make_runner(name, options.width, options.layers)
    inputs = make_micro_batches(options.micro_batches, options.rows, options.length)
    runner.train(inputs, loss_of)
    with ForwardBytes(stages) as live:
        runner.train(inputs, loss_of)
    output = 4 * options.rows * options.length * options.width
    count = max(sum(size > output for size in forward_bytes.values()) for forward_bytes in live.after_forwards)
    most = max(sum(forward_bytes.values()) for forward_bytes in live.after_forwards)
    each = max(size for forward_bytes in live.after_forwards for size in forward_bytes.values())
    return count, most, each, live.peak


def main() -> None:
    """Print the table."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--schedules", nargs="+", default=list(SCHEDULES))
    for option, default in (("width", 256), ("layers", 8), ("rows", 2), ("length", 64), ("micro-batches", 8)):
        parser.add_argument(f"--{option}", type=int, default=default)
    add_options(parser)
    options = parser.parse_args()
    torch.set_num_threads(1)
    os.environ.setdefault("OMP_NUM_THREADS", "1")
    dist.init_process_group("gloo")
    ranks = dist.get_world_size()
    if dist.get_rank() == 0:
        print(
            f"{ranks} ranks, {options.micro_batches} micro-batches of {options.rows} x {options.length} tokens,"
            f" {options.layers} layers of width {options.width}; bytes in MiB\n\n"
            f"{'schedule':<24}{'rank':>5}{'held':>6}{'simulated':>11}{'activations':>13}{'in units':>10}{'all':>8}"
        )
    figures = []
    for name in options.schedules:
        measurements: list[Any] = [None] * ranks
        dist.all_gather_object(measurements, measure(name, options))
        actions = list_compute_actions(SCHEDULES[name], ranks, options.micro_batches)
        even = {(action.stage_index, kind): 1.0 for row in actions.values() for action in row for kind in KINDS}
        timeline = simulate_schedule(actions, even)  # type: ignore[arg-type]
        ratios = [count / timeline.peak_live_microbatches(rank) for rank, (count, *_) in enumerate(measurements)]
        title = f"LLM micro-batches held / simulated, {name}, m = {options.micro_batches}, worst rank"
        figures.append(Figure(title, max(ratios), "ratio", (min(ratios), max(ratios))))
        if dist.get_rank() == 0:
            for rank, (count, most, each, peak) in enumerate(measurements):
                print(
                    f"{name if rank == 0 else '':<24}{rank:>5}{count:>6}{timeline.peak_live_microbatches(rank):>11}"
                    f"{most / MEBIBYTE:>13.2f}{most / each:>10.2f}{peak / MEBIBYTE:>8.2f}",
                    flush=True,
                )
    if dist.get_rank() == 0:
        save(figures, options.json)
    dist.barrier()
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
