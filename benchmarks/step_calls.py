"""Python calls of a recommender's step: TorchRec's pipeline in a bare loop, ``TrainPipeline``, and a Trainer.

``OMP_NUM_THREADS=1 torchrun --nproc-per-node 2 -m benchmarks.step_calls`` counts the calls of Python functions on all
threads of a rank (``sys.setprofile``), on average over 20 steps of the models of :mod:`recsys_step`, and by the project
that the called function belongs to. A count does not depend on the load of the machine. Under a Trainer, it also counts
this project's frames between ``Trainer.fit`` and ``training_step``.
"""

from __future__ import annotations

import argparse
import sys
import threading
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import lightning.pytorch as pl
import torch
import torch.distributed as dist
from torch import Tensor
from torch.utils.data import DataLoader
from torchrec.distributed.train_pipeline import TrainPipelineSparseDist

from benchmarks.recsys_model import EPS, RATE, Batch, batches, forever, ours, theirs
from benchmarks.recsys_step import SIZES, Endless, Trained
from lightning_pipe.recsys.tasks.train_pipeline import TrainPipeline
from lightning_pipe.strategies import RecsysPipelineStrategy

WARM_UP, STEPS = 5, 20
TORCHREC, OURS, TRAINER = "TorchRec", "TrainPipeline", "Trainer"
PROJECTS = ("lightning_pipe", "lightning", "torchrec", "fbgemm_gpu", "torch")


class Calls:
    """Counts calls of Python functions by project while it is on. Threads that start inside :meth:`watching` count."""

    def __init__(self) -> None:
        self.by_function: Counter[Any] = Counter()
        self.on = False

    @contextmanager
    def watching(self) -> Iterator[Calls]:
        """Context in which calls can be counted."""
        threading.setprofile(self._seen)
        sys.setprofile(self._seen)
        try:
            yield self
        finally:
            sys.setprofile(None)
            threading.setprofile(None)

    def by_project(self) -> dict[str, float]:
        """Calls a step of each project, of others, and of all."""
        counts: Counter[str] = Counter()
        for code, calls in self.by_function.items():
            parts = code.co_filename.split("/")
            counts[next((project for project in PROJECTS if project in parts), "others")] += calls
        counts["all"] = sum(self.by_function.values())
        return {project: calls / STEPS for project, calls in counts.items()}

    def _seen(self, frame: Any, event: str, argument: Any) -> None:
        if self.on and event == "call":
            self.by_function[frame.f_code] += 1


class Counted(Trained):
    """Switches the count on and off, and looks at the frames that lead to its step."""

    def __init__(self, options: argparse.Namespace, calls: Calls) -> None:
        super().__init__(options)
        self._calls = calls
        self.frames: list[str] = []

    def training_step(self, batch: Batch, batch_idx: int) -> Tensor:
        if batch_idx in (WARM_UP, WARM_UP + STEPS):
            self._calls.on = batch_idx == WARM_UP
            self.frames = list(_frames_of_fit())
        return super().training_step(batch, batch_idx)


def _frames_of_fit() -> Iterator[str]:
    """Files of the frames from ``training_step`` out to ``Trainer.fit``."""
    frame = sys._getframe(2)
    while frame.f_code.co_name != "fit" and frame.f_back is not None:
        yield frame.f_code.co_filename
        frame = frame.f_back


def in_a_loop(pipeline: Callable[[], Any], data: list[Batch]) -> dict[str, float]:
    """Calls a step of a pipeline's ``progress``."""
    with Calls().watching() as calls:
        progress, batches_of = pipeline().progress, forever(data)
        for step in range(WARM_UP + STEPS):
            calls.on = step >= WARM_UP
            progress(batches_of)
        calls.on = False
    return calls.by_project()


def under_a_trainer(
    plan: str, sizes: argparse.Namespace, sharding: Any, data: list[Batch]
) -> tuple[dict[str, float], int]:
    """Calls a step under a Trainer, and this project's frames between ``fit`` and ``training_step``."""
    with Calls().watching() as calls:
        module = Counted(sizes, calls)
        strategy = RecsysPipelineStrategy(
            plan,
            sparse_optimizer={"class_path": "torchrec.optim.RowWiseAdagrad", "init_args": {"lr": RATE, "eps": EPS}},
            sharding={"plan": sharding},
        )
        trainer = pl.Trainer(
            accelerator="cpu",
            devices=dist.get_world_size(),
            strategy=strategy,
            max_steps=WARM_UP + STEPS + 1,
            logger=False,
            enable_checkpointing=False,
            enable_progress_bar=False,
            enable_model_summary=False,
            use_distributed_sampler=False,
        )
        trainer.fit(module, DataLoader(Endless(data), batch_size=None))
    return calls.by_project(), sum("/lightning_pipe/" in name for name in module.frames)


def counts(size: str, plan: str) -> dict[str, Any]:
    """Calls a step of the three ways, by project, and ``"frames"``. Every rank calls this."""
    sizes, device = argparse.Namespace(**SIZES[size]), torch.device("cpu")
    data = batches(sizes, dist.get_rank(), False)
    dmp, combined = theirs(sizes, device)
    calls_by_way: dict[str, Any] = {TORCHREC: in_a_loop(lambda: TrainPipelineSparseDist(dmp, combined, device), data)}
    sharded, optimizer = ours(sizes, device, dmp.plan)
    calls_by_way[OURS] = in_a_loop(lambda: TrainPipeline(sharded, optimizer, device, plan=plan), data)
    calls_by_way[TRAINER], calls_by_way["frames"] = under_a_trainer(plan, sizes, dmp.plan, data)
    return calls_by_way


def main() -> None:
    """Count and print on rank 0."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--sizes", nargs="+", choices=list(SIZES), default=["tiny", "medium"])
    parser.add_argument("--plans", nargs="+", default=["base", "prefetch"])
    options = parser.parse_args()
    dist.init_process_group("gloo")
    columns = ("all", *PROJECTS, "others")
    if not dist.get_rank():
        print(f"{'Python calls a step':32}" + "".join(f"{name:>15}" for name in columns))
    for size in options.sizes:
        for plan in options.plans:
            calls_by_way = counts(size, plan)
            if not dist.get_rank():
                for way in (TORCHREC, OURS, TRAINER):
                    numbers = "".join(f"{calls_by_way[way].get(name, 0):15.1f}" for name in columns)
                    print(f"{size:8}{plan:10}{way:14}{numbers}", flush=True)
                print(f"{size:8}{plan:10}{calls_by_way['frames']} frames of this project from fit to training_step")
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
