"""Time for which training stands still while rows of dynamic tables are committed, or saved in a checkpoint.

``OMP_NUM_THREADS=1 python -m benchmarks.row_dumps`` trains a model in one process, with a store of ``--rows`` rows and
a cache of ``--cache-rows``. Each round makes four saves in random order: a commit and a checkpoint, each in the
foreground and in the background, which write the same files. Before each save it trains until at least ``--changed``
cached rows differ from the store. Aim: in the background, training stands still for at most 0.05 of the time in the
foreground. The time of steps during a checkpoint in the background is given relative to steps directly after it.
"""

from __future__ import annotations

import argparse
import random
import shutil
import statistics
import tempfile
import time
from collections.abc import Callable
from pathlib import Path

import torch
import torch.distributed as dist

from benchmarks.dynamic_embeddings import AHEAD, Arm, Ids, batch
from benchmarks.figures import Figure, add_options, at_most, quartiles, save
from lightning_pipe.checkpoints.background_save import BackgroundSave
from lightning_pipe.checkpoints.folder_writing import write_checkpoint, write_checkpoint_in_background

PARTS = ("commit", "checkpoint")


def main() -> None:
    """Measure the four saves."""
    parser = argparse.ArgumentParser(description="stand-still of training while rows are saved")
    parser.add_argument("--rows", type=int, default=1_000_000, help="rows in the store")
    parser.add_argument("--cache-rows", type=int, default=300_000)
    parser.add_argument("--changed", type=int, default=100_000, help="changed rows at a save")
    parser.add_argument("--dim", type=int, default=32)
    parser.add_argument("--batch", type=int, default=512, help="rows per batch")
    parser.add_argument("--bag", type=int, default=20, help="ids per bag")
    parser.add_argument("--zipf", type=float, default=0.6)
    parser.add_argument("--dense", type=int, default=2)
    parser.add_argument("--width", type=int, default=256)
    parser.add_argument("--rounds", type=int, default=5)
    add_options(parser)
    options = parser.parse_args()
    torch.set_num_threads(1)
    with tempfile.TemporaryDirectory() as folder:
        dist.init_process_group("gloo", init_method=f"file://{folder}/group", rank=0, world_size=1)
        try:
            figures = Run(Path(folder), options).figures()
        finally:
            dist.destroy_process_group()
    save(figures, options.json)


class Run:
    """A model under the prefetch plan, and the times of its saves."""

    def __init__(self, folder: Path, options: argparse.Namespace) -> None:
        self.folder, self.options = folder, options
        self.arm = Arm("saved", "prefetch", folder, options.cache_rows, options)
        (self.rows,) = self.arm.sharded.dynamic_rows.values()
        self.ids = Ids(options.rows, options.zipf)
        self.saves = BackgroundSave()

    def figures(self) -> list[Figure]:
        """Run all rounds and print them."""
        still: dict[tuple[str, bool], list[float]] = {(part, behind): [] for part in PARTS for behind in (False, True)}
        slower: list[float] = []
        changed: list[int] = []
        for number in range(self.options.rounds):
            order = list(still)
            random.Random(number).shuffle(order)
            for part, behind in order:
                changed.append(self._change())
                before = time.perf_counter()
                self._save(part, behind)
                still[part, behind].append(time.perf_counter() - before)
                if behind:
                    during = self._steps(lambda: not self._done())
                    self.saves.wait()
                    if part == "checkpoint":
                        slower.append(during / self._steps_for(10))
                shutil.rmtree(self.folder / "kept", ignore_errors=True)
        print(f"{statistics.mean(changed):.0f} changed rows, {self.options.rows} rows in the store")
        figures = []
        for part in PARTS:
            ahead, behind_times = still[part, False], still[part, True]
            ratios = [pause / statistics.median(ahead) for pause in behind_times]
            print(
                f"{part}: training stands still for {statistics.median(ahead) * 1e3:.0f} ms in the foreground,"
                f" {statistics.median(behind_times) * 1e3:.1f} ms in the background"
            )
            name = f"dynamic tables: stand-still of a {part}, background / foreground"
            figures.append(at_most(name, statistics.median(ratios), 0.05, quartiles(ratios)))
        print(f"step during a checkpoint in the background / without: {statistics.median(slower):.2f}")
        name = "dynamic tables: step during a checkpoint in the background / without"
        return [*figures, Figure(name, statistics.median(slower), "ratio", quartiles(slower))]

    def _change(self) -> int:
        """Train until enough rows differ from the store."""
        while (changed := int((self.arm.cache._headers.dirty != 0).sum())) < self.options.changed:
            self._steps_for(4)
        return changed

    def _steps_for(self, number: int) -> float:
        batches = [batch(self.ids, self.options) for _ in range(number + AHEAD)]
        return self.arm.turn(batches)

    def _steps(self, go_on: Callable[[], bool]) -> float:
        """Median seconds of a step, over blocks of steps while a condition holds."""
        step_times = [self._steps_for(4)]
        while go_on():
            step_times.append(self._steps_for(4))
        return statistics.median(step_times)

    def _done(self) -> bool:
        return all(pending.done() for pending in self.saves._saving)

    def _save(self, part: str, behind: bool) -> None:
        dumped = self.arm.sharded.prepare_row_dump()
        path, state = self.folder / "kept", {"model": {"weight": torch.zeros(1)}}
        if part == "commit" and behind:
            dumped.copy_changes()
            self.saves.start(lambda: dumped.commit(self.saves.group))
        elif part == "commit":
            dumped.commit()
        elif behind:
            write_checkpoint_in_background(self.saves, path, state, {}, dumped)
        else:
            write_checkpoint(path, state, {}, dumped)


if __name__ == "__main__":
    main()
