"""``make demo``: the same training under the plans serial, base and prefetch, with rows in RocksDB on this machine's
disk.

Each round trains 30 batches under each plan, from the same rows and weights. Reads bypass the page cache. The script
prints the step times, whether all weights and rows are equal to the bit, and draws the three timelines.
"""

from __future__ import annotations

import argparse
import hashlib
import logging
import mmap
import os
import random
import shutil
import statistics
import tempfile
import time
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any
from unittest import mock

import lightning.pytorch as pl
import torch
from torch.utils.data import DataLoader

from benchmarks.slow_store import SlowStore
from examples.rows_on_disk.model import ClickModel, draw_batches, iterate_all_ids
from lightning_pipe.callbacks import PipelineTrace
from lightning_pipe.callbacks.timeline_picture import TimelinePanel, draw_timelines, require_matplotlib
from lightning_pipe.recsys.dynamic.tables import create_row_tables
from lightning_pipe.strategies import RecsysPipelineStrategy

PLANS = ("serial", "base", "prefetch")
_WARM_UP = 8  # batches that are not timed, in which the pipeline and the cache fill
_DRAWN = 3  # batches in the picture
_OPTIMIZER = {"class_path": "torchrec.optim.RowWiseAdagrad", "init_args": {"lr": 0.05}}
# A disk is taken to be memory if a random read takes less than this time, in seconds. Each row then waits longer.
_MEMORY_READ, _DELAY = 12e-6, 25e-6


class StepTimes(pl.Callback):
    """Ends of the batches, and a hash of all weights and rows at the end of training."""

    def __init__(self) -> None:
        self.ends: list[float] = []
        self.digest = ""

    def on_train_batch_end(self, trainer: pl.Trainer, *_: Any) -> None:
        self.ends.append(time.perf_counter())

    def on_train_end(self, trainer: pl.Trainer, pl_module: pl.LightningModule) -> None:
        digest = hashlib.sha256()
        sharded = trainer.strategy.sharded_model  # type: ignore[attr-defined]
        for _, parameter in sharded.dense_parameters():
            digest.update(parameter.detach().numpy().tobytes())
        for rows in sharded.dynamic_rows.values():
            for table in rows.caches:
                for chunk in sorted(rows.rows(table), key=lambda chunk: int(chunk.ids[0])):
                    digest.update(chunk.ids.numpy().tobytes())
                    for column in chunk.columns:
                        digest.update(column.numpy().tobytes())
        self.digest = digest.hexdigest()

    @property
    def seconds(self) -> float:
        """Mean time of a step after the warm-up."""
        return (self.ends[-1] - self.ends[_WARM_UP]) / (len(self.ends) - 1 - _WARM_UP)


def main() -> None:
    """Train in rounds, print the results and draw the picture."""
    parser = argparse.ArgumentParser(description="three plans with rows on a disk")
    parser.add_argument("--rounds", type=int, default=6)
    parser.add_argument("--steps", type=int, default=30)
    parser.add_argument(
        "--delay", type=float, metavar="US", help="further wait of each row in µs, as on slower storage"
    )
    parser.add_argument("--picture", type=Path, default=Path("logs/demo.png"))
    options = parser.parse_args()
    if options.rounds < 1 or options.steps < _DRAWN or (options.delay or 0.0) < 0:
        parser.error(f"expected at least one round, {_DRAWN} steps and no negative delay")
    require_matplotlib(options.picture)
    for name in ("lightning.pytorch", "lightning.fabric"):
        logging.getLogger(name).setLevel(logging.WARNING)
    torch.set_num_threads(1)
    pl.seed_everything(1, verbose=False)
    with ExitStack() as stack:
        folder = Path(stack.enter_context(tempfile.TemporaryDirectory(dir=".", prefix=".demo-")))
        print("creating 320,000 rows ...", flush=True)
        fit(folder / "rows", "serial", list(iterate_all_ids()))
        seconds = measure_read(folder / "rows")
        print(f"a random read of 4 KiB from this disk takes {1e6 * seconds:.0f} µs")
        delay = 1e-6 * options.delay if options.delay is not None else _DELAY if seconds < _MEMORY_READ else 0.0
        if delay:
            print(f"each row that is read waits {1e6 * delay:.0f} µs more")
            stack.enter_context(delayed_reads(delay))
        batches = draw_batches(_WARM_UP + options.steps)
        times: dict[str, list[float]] = {plan: [] for plan in PLANS}
        digests = set()
        panels: dict[str, list[TimelinePanel]] = {plan: [] for plan in PLANS}
        for number in range(options.rounds):
            for plan in random.sample(PLANS, len(PLANS)):
                copy_rows(folder / "rows", folder / plan)
                step_times, trace = fit(folder / plan, plan, batches)
                shutil.rmtree(folder / plan)
                times[plan].append(step_times.seconds)
                digests.add(step_times.digest)
                assert trace.timeline is not None
                panels[plan].append(TimelinePanel(plan, trace.timeline, trace.batch_ends[-_DRAWN - 1 :]))
            print(f"round {number + 1} of {options.rounds}", flush=True)
    print_results(times)
    print("all weights and rows are equal to the bit" if len(digests) == 1 else "THE WEIGHTS DIFFER")
    options.picture.parent.mkdir(parents=True, exist_ok=True)
    draw_timelines([choose_typical_panel(panels[plan], times[plan]) for plan in PLANS], options.picture)
    print(f"{options.picture}: {_DRAWN} steps under each plan, whose times are nearest to its median")


def fit(store: Path, plan: str, batches: list[Any]) -> tuple[StepTimes, PipelineTrace]:
    """Train a new model on the rows in *store*."""
    torch.manual_seed(1)
    step_times = StepTimes()
    trace = PipelineTrace(store.parent / "trace.json", (len(batches) - _DRAWN - 1, _DRAWN + 1), picture=None)
    trainer = pl.Trainer(
        accelerator="cpu",
        devices=1,
        max_epochs=1,
        strategy=RecsysPipelineStrategy(plan, sparse_optimizer=_OPTIMIZER),
        callbacks=[step_times, trace],
        logger=False,
        enable_checkpointing=False,
        enable_progress_bar=False,
        enable_model_summary=False,
    )
    trainer.fit(ClickModel(store), DataLoader(batches, batch_size=None))  # type: ignore[arg-type]
    trainer.strategy.sharded_model.close()  # type: ignore[attr-defined]
    return step_times, trace


def copy_rows(source: Path, target: Path) -> None:
    """Copy a store. Its tables of rows are never changed in place, so links are enough for them."""

    def link_or_copy(file: str, copy: str) -> None:
        (os.link if file.endswith(".sst") else shutil.copy2)(file, copy)

    shutil.copytree(source, target, copy_function=link_or_copy)


def measure_read(folder: Path) -> float:
    """Median seconds of a random read of 4 KiB without the page cache; 0 if the file system has no such reads."""
    file = max(folder.rglob("*.sst"), key=lambda path: path.stat().st_size)
    pages, buffer = file.stat().st_size // 4096, mmap.mmap(-1, 4096)
    try:
        descriptor = os.open(file, os.O_RDONLY | os.O_DIRECT)
    except OSError:
        return 0.0
    seconds = []
    for _ in range(300):
        begin = time.perf_counter()
        os.preadv(descriptor, [buffer], 4096 * random.randrange(pages))
        seconds.append(time.perf_counter() - begin)
    os.close(descriptor)
    return statistics.median(seconds)


@contextmanager
def delayed_reads(delay: float) -> Iterator[None]:
    """Context in which each row that is read from a store takes *delay* seconds more."""
    open_store = create_row_tables.open_store

    def open_slow_store(*arguments: Any) -> SlowStore:
        return SlowStore(open_store(*arguments), per_record=delay)

    with mock.patch.object(create_row_tables, "open_store", open_slow_store):
        yield


def choose_typical_panel(panels: list[TimelinePanel], seconds: list[float]) -> TimelinePanel:
    """Timeline whose steps took most nearly the median step time, which becomes the title."""
    median = statistics.median(seconds)
    panel = min(panels, key=lambda panel: abs((panel.ends[-1] - panel.ends[0]) / (len(panel.ends) - 1) - median))
    return replace(panel, title=f"{panel.title}: {1e3 * median:.1f} ms a step")


def print_results(times: dict[str, list[float]]) -> None:
    """Print each plan's step time: the median over rounds, and the smallest and the largest."""
    rounds = len(next(iter(times.values())))
    sure = 100 * (1 - 2 * 0.5**rounds)
    print(
        f"\nstep time: median of {rounds} rounds (smallest to largest, which is a {sure:.0f} % interval of the median)"
    )
    for plan, seconds in times.items():
        spread = f"({1e3 * min(seconds):.1f} to {1e3 * max(seconds):.1f})"
        print(f"  {plan:10}{1e3 * statistics.median(seconds):7.1f} ms {spread:>18}")
    for plan in PLANS[1:]:
        ratios = [mine / serial for mine, serial in zip(times[plan], times["serial"], strict=True)]
        spread = f"({min(ratios):.2f} to {max(ratios):.2f})"
        text = f"{plan} / serial in the same round: {statistics.median(ratios):.2f} {spread}"
        print(text if max(ratios) < 1 or min(ratios) > 1 else f"{text}: no difference beyond the noise of this machine")


if __name__ == "__main__":
    main()
