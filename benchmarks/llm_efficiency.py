"""Step time of each schedule against the time of independent processes that each train the whole model.

``torchrun --nproc-per-node 2 -m benchmarks.llm_efficiency`` trains a transformer of equal layers on the same
micro-batches in alternating ways: alone, with all layers on every rank and no communication, and in stages, under every
schedule. With *P* ranks, a step in stages would take a *P*-th of a step alone if no time were lost to the bubble, to
messages and to this project. All cores are busy in both cases, so contention between cores affects both. The aim is
0.90 for the best schedule. According to theory, with a bubble of (P - 1) / (m + P - 1), GPipe and 1F1B can reach 0.889
with 8 micro-batches on 2 ranks.

Each rank is pinned to a core, as in ``benchmarks/llm_bounds.py``.
"""

from __future__ import annotations

import argparse
import os
import statistics
import time

import torch
import torch.distributed as dist

from benchmarks.figures import Figure, add_options, at_least, interval, save
from benchmarks.llm_bounds import Schedule, gather, pin, step
from benchmarks.llm_stages import loss_of, make_micro_batches, make_runner
from benchmarks.llm_step_time import Decoder
from lightning_pipe.llm.run.schedule_runner import StageInputs
from lightning_pipe.llm.schedules.specs import SCHEDULES

TARGET = 0.90


def alone(model: Decoder, inputs: list[StageInputs]) -> float:
    """Seconds of a step of the whole model in this process, after a barrier."""
    model.zero_grad()
    dist.barrier()
    start = time.perf_counter()
    for stage_inputs in inputs:
        loss_of(model(*stage_inputs.args), stage_inputs.target).backward()
    return time.perf_counter() - start


def main() -> None:
    """Print the table."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--schedules", nargs="+", default=list(SCHEDULES))
    for option, default in (
        ("width", 512), ("layers", 8), ("rows", 2), ("length", 128), ("micro-batches", 8), ("rounds", 10)
    ):  # fmt: skip
        parser.add_argument(f"--{option}", type=int, default=default)
    add_options(parser)
    options = parser.parse_args()
    torch.set_num_threads(1)
    os.environ.setdefault("OMP_NUM_THREADS", "1")
    pin()
    dist.init_process_group("gloo")
    ranks, count = dist.get_world_size(), options.micro_batches
    inputs = make_micro_batches(count, options.rows, options.length)
    torch.manual_seed(1)
    unsplit_model = Decoder(options.width, options.layers)
    at_work = {name: Schedule(*make_runner(name, options.width, options.layers)) for name in options.schedules}
    times: dict[str, list[float]] = {name: [] for name in ("alone", *at_work)}
    for turn in range(options.rounds + 1):
        for name in list(times) if turn % 2 else reversed(times):
            seconds = alone(unsplit_model, inputs) if name == "alone" else step(at_work[name], inputs, record=False)[0]
            longest = max(gather(seconds))
            if turn:  # the first round creates the schedules and touches memory
                times[name].append(longest)
    if dist.get_rank() == 0:
        save([show(times, ranks, options)], options.json)
    dist.barrier()
    dist.destroy_process_group()


def show(times: dict[str, list[float]], ranks: int, options: argparse.Namespace) -> Figure:
    """Print a line for each schedule, and return the figure of the best one."""
    ideal = [value / ranks for value in times.pop("alone")]
    print(
        f"{ranks} ranks, {options.micro_batches} micro-batches of {options.rows} x {options.length} tokens,"
        f" {options.layers} layers of width {options.width}; alone / {ranks}: {1e3 * statistics.median(ideal):.1f} ms"
    )
    ratios_by_name = {}
    for name, seconds in times.items():
        ratios = [ideal_time / step_time for ideal_time, step_time in zip(ideal, seconds, strict=True)]
        ratios_by_name[name] = ratios
        print(f"{name:<24}{1e3 * statistics.median(seconds):>9.1f} ms{statistics.median(ratios):>8.3f}")

    def best(indices: range | list[int]) -> float:
        return max(statistics.median(ratios[index] for index in indices) for ratios in ratios_by_name.values())

    name = max(ratios_by_name, key=lambda schedule: statistics.median(ratios_by_name[schedule]))
    rounds = range(len(ideal))
    title = f"LLM two processes alone / {ranks} / step of the best schedule, m = {options.micro_batches}"
    print(f"best: {name}")
    return at_least(title, best(rounds), TARGET, interval(lambda indices: best(list(indices)), len(rounds)))


if __name__ == "__main__":
    main()
