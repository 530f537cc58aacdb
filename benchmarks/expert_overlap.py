"""Exposed time of the experts' all-to-all over a slow link, with overlapped forwards and backwards and without.

``python -m benchmarks.expert_overlap`` (requires root) trains a mixture of experts under DualPipeV in two network
namespaces joined by a rate-limited link (:mod:`slow_link`). The ranks of a pipeline are in one namespace. Ranks that
share experts are in different ones, so the link carries tokens of experts, and what FSDP exchanges at the beginning and
at the end of a step. The same actions run in two ways, which alternate: in turns, as the strategy runs them, and apart,
one after the other (from a CSV file).

Exposed is the time in which a rank waits for an all-to-all of tokens or of their numbers. Apart, all of its time is
exposed, so the share is the exposed time in turns divided by the exposed time apart, summed over ranks, in the same
round. It includes waits for the other rank's computation, and the actions without overlap at the ends of the step. Aim:
at most 0.30.
"""

from __future__ import annotations

import argparse
import csv
import os
import statistics
import sys
import tempfile
import time
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
import torch.multiprocessing as mp
from torch import Tensor, nn

from benchmarks.figures import Figure, add_options, at_most, median_ratio, quartiles, save
from benchmarks.slow_link import slow_link
from lightning_pipe.llm.model.moe import MoE
from lightning_pipe.llm.parallel import expert_parallel
from lightning_pipe.llm.run.stage_runner import StageHooks, StageRunner
from lightning_pipe.llm.schedules.specs import SCHEDULES, list_actions

LIMIT = 0.30
VOCABULARY = 64
WAYS = ("in turns", "apart")


class Layer(nn.Module):
    """Attention and a mixture of experts."""

    def __init__(self, width: int, experts: int) -> None:
        super().__init__()
        self.norms = nn.ModuleList(nn.LayerNorm(width) for _ in range(2))
        self.qkv, self.out = nn.Linear(width, 3 * width), nn.Linear(width, width)
        self.mixture = MoE(width, 2 * width, experts, 2)

    def forward(self, x: Tensor) -> Tensor:
        query, key, value = self.qkv(self.norms[0](x)).unflatten(-1, (3, 4, -1)).permute(2, 0, 3, 1, 4)
        attended = nn.functional.scaled_dot_product_attention(query, key, value, is_causal=True)
        x = x + self.out(attended.transpose(1, 2).flatten(2))
        result: Tensor = x + self.mixture(self.norms[1](x))
        return result


class Hooks(StageHooks):
    """Builds the model.

    Args:
        options: command line.
    """

    def __init__(self, options: argparse.Namespace) -> None:
        self.options = options

    def build_model(self) -> nn.Module:
        width = self.options.width
        layers = [Layer(width, self.options.experts) for _ in range(self.options.layers)]
        return nn.Sequential(nn.Embedding(VOCABULARY, width), *layers, nn.Linear(width, VOCABULARY))


class Waits:
    """Seconds of waits for all-to-alls of experts."""

    def __init__(self) -> None:
        self.seconds = {"tokens": 0.0, "numbers": 0.0}

    @contextmanager
    def counted(self, kind: str) -> Iterator[None]:
        begun = time.perf_counter()
        yield
        self.seconds[kind] += time.perf_counter() - begun

    def watch(self) -> None:
        """Count the waits of this process."""
        wait = expert_parallel.wait_tensor

        def waiting(awaited: Tensor) -> Any:
            with self.counted("tokens" if awaited.is_floating_point() else "numbers"):
                return wait(awaited)

        expert_parallel.wait_tensor = waiting


def run(index: int, options: argparse.Namespace, path: Path) -> None:
    """Train on one rank of the pipeline in this namespace."""
    torch.set_num_threads(1)
    host, pipeline = int(os.environ["NODE_RANK"]), options.pipeline
    address = f"tcp://{os.environ['MASTER_ADDR']}:{os.environ['MASTER_PORT']}"
    dist.init_process_group("gloo", address, rank=2 * index + host, world_size=2 * pipeline)
    count = options.micro_batches
    os.chdir(path)  # ranks compare their options, so the file has one name on all
    with Path("parted.csv").open("w", newline="") as rows:
        csv.writer(rows).writerows(list_actions(SCHEDULES["dualpipev"], pipeline, count).values())
    parallel = {"pp": pipeline, "dp_shard": 2, "ep": 2}
    runners: dict[str, StageRunner] = {}
    for way, schedule in zip(WAYS, ("dualpipev", "parted.csv"), strict=True):
        torch.manual_seed(0)
        runners[way] = StageRunner(Hooks(options), schedule, device="cpu", parallel=parallel)
    generator = torch.Generator().manual_seed(host)
    waits = Waits()
    waits.watch()
    measured: dict[str, list[list[float]]] = {way: [] for way in WAYS}
    for warm in [False] + [True] * options.rounds:
        batch = [_micro_batch(options, generator) for _ in range(count)]
        for way, runner in runners.items():
            dist.barrier()
            waits.seconds = dict.fromkeys(waits.seconds, 0.0)
            begun = time.perf_counter()
            runner.forward_backward(batch)
            seconds = [*waits.seconds.values(), time.perf_counter() - begun]
            runner.zero_grad()
            means = torch.tensor(seconds, dtype=torch.float64) / (2 * pipeline)
            dist.all_reduce(means)
            if warm:
                measured[way].append(means.tolist())
    if dist.get_rank() == 0:
        _report(options, measured)
    dist.barrier()
    dist.destroy_process_group()


def _micro_batch(options: argparse.Namespace, generator: torch.Generator) -> Mapping[str, Tensor]:
    tokens = torch.randint(VOCABULARY, (options.rows, options.length + 1), generator=generator)
    return {"input_ids": tokens[:, :-1], "labels": tokens[:, 1:]}


def _report(options: argparse.Namespace, measured: Mapping[str, list[list[float]]]) -> None:
    turns, apart = ([list(values) for values in zip(*measured[way], strict=True)] for way in WAYS)
    for rows in (turns, apart):
        rows.insert(0, [sum(values) for values in zip(rows[0], rows[1], strict=True)])
    names = ("exposed share of the all-to-all", "of tokens alone", "of their numbers alone", "step in turns / apart")
    title = f"experts over {options.rate}, DualPipeV on {options.pipeline} x 2 ranks"
    ratios = [median_ratio(overlapped, separate) for overlapped, separate in zip(turns, apart, strict=True)]
    figures = [at_most(f"{title}, {names[0]}", ratios[0][0], LIMIT, ratios[0][1])]
    figures += [
        Figure(f"{title}, {name}", value, "ratio", spread)
        for name, (value, spread) in zip(names[1:], ratios[1:], strict=True)
    ]
    shares = [wait / step for wait, step in zip(apart[0], apart[3], strict=True)]
    figures.append(Figure(f"{title}, all-to-all / step apart", statistics.median(shares), "ratio", quartiles(shares)))
    steps = [1e3 * step for step in apart[3]]
    figures.append(Figure(f"{title}, step apart", statistics.median(steps), "ms", quartiles(steps)))
    for figure in figures:
        print(f"{figure.name:90} {figure.value:8.2f} {figure.unit:5} {figure.spread[0]:8.2f} .. {figure.spread[1]:.2f}")
    save(figures, options.json)


def main() -> None:
    """Start both namespaces, or the ranks of one."""
    parser = argparse.ArgumentParser(description="overlap of experts' all-to-all")
    parser.add_argument("--rate", default="800mbit", help="rate per direction, in tc's format")
    parser.add_argument("--pipeline", type=int, default=1, help="ranks of the pipeline")
    parser.add_argument("--layers", type=int, default=4)
    parser.add_argument("--width", type=int, default=256)
    parser.add_argument("--experts", type=int, default=8)
    parser.add_argument("--rows", type=int, default=2)
    parser.add_argument("--length", type=int, default=128)
    parser.add_argument("--micro-batches", type=int, default=24)
    parser.add_argument("--rounds", type=int, default=7)
    add_options(parser)
    options = parser.parse_args()
    if "NODE_RANK" not in os.environ:
        with slow_link(options.rate) as link:
            link.run([sys.executable, "-m", "benchmarks.expert_overlap", *sys.argv[1:]], timeout=1200)
        return
    if options.json is not None:
        options.json = options.json.resolve()
    with tempfile.TemporaryDirectory() as folder:
        parts = [Path(folder, str(index)) for index in range(options.pipeline)]
        for part in parts:
            part.mkdir()
        mp.start_processes(_run_in, (options, folder), options.pipeline, start_method="spawn")


def _run_in(index: int, options: argparse.Namespace, folder: str) -> None:
    run(index, options, Path(folder, str(index)))


if __name__ == "__main__":
    main()
