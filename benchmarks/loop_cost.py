"""Framework cost of a step: this project's loop against Lightning's own, each over a bare loop.

``OMP_NUM_THREADS=1 python -m benchmarks.loop_cost`` trains a linear layer on batches in memory: in a bare loop, under
Lightning's Trainer with its own loop, and with this project's loop (``PipelineStrategy``). The three alternate, first
without a ``self.log`` in ``training_step``, then with one. The cost of a step is the time from one ``training_step`` to
the next, less that of the bare loop. The output is medians over rounds of the median of each round's steps, and the
ratio of this project's cost to Lightning's (aim: at most 1.0). The benchmark fails if losses or logged values differ.
"""

from __future__ import annotations

import argparse
import logging
import statistics
import time
import warnings
from collections.abc import Callable
from itertools import pairwise
from typing import Any

import lightning.pytorch as pl
import torch
from torch import Tensor, nn
from torch.utils.data import DataLoader

from benchmarks.figures import Figure, add_options, at_most, interval, save
from lightning_pipe.strategies import PipelineStrategy

WIDTH = 8


class Tiny(pl.LightningModule):
    """A linear layer. Records the start times of its steps."""

    def __init__(self, logs: bool) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.layer = nn.Linear(WIDTH, 1)
        self.logs = logs
        self.began: list[float] = []
        self.losses: list[Tensor] = []

    def training_step(self, batch: Tensor, batch_idx: int) -> Tensor:
        self.began.append(time.perf_counter())
        loss = self.layer(batch).square().mean()
        self.losses.append(loss.detach())
        if self.logs:
            self.log("loss", loss)
        return loss

    def configure_optimizers(self) -> torch.optim.Optimizer:
        return torch.optim.SGD(self.parameters(), lr=0.01)

    def step_time(self) -> float:
        """Median of the seconds from one step to the next, without the first tenth of the steps."""
        return statistics.median(after - before for before, after in pairwise(self.began[len(self.began) // 10 :]))


def bare(module: Tiny, data: list[Tensor]) -> None:
    """Train in a loop without a framework."""
    optimizer: Any = module.configure_optimizers()
    for index, batch in enumerate(data):
        loss = module.training_step(batch, index)
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()


def trained(strategy: Any) -> Callable[[Tiny, list[Tensor]], Any]:
    """Function that trains under a Trainer and returns the logged values."""

    def run(module: Tiny, data: list[Tensor]) -> Any:
        batches: DataLoader[Any] = DataLoader(data, batch_size=None)  # type: ignore[arg-type]
        trainer = pl.Trainer(
            accelerator="cpu",
            devices=1,
            strategy=strategy(),
            max_epochs=1,
            logger=False,
            enable_checkpointing=False,
            enable_progress_bar=False,
            enable_model_summary=False,
        )
        trainer.fit(module, batches)
        return {name: value.item() for name, value in trainer.callback_metrics.items()}

    return run


WAYS: dict[str, Callable[[Tiny, list[Tensor]], Any]] = {
    "bare": bare,
    "Lightning": trained(lambda: "auto"),
    "this project": trained(PipelineStrategy),
}


def measure(logs: bool, limit: float, options: argparse.Namespace) -> Figure:
    """Measure all loops, alternating; print the result and return the ratio."""
    # The bare loop has no self.log.
    data = list(torch.randn(options.steps, 4, WIDTH, generator=torch.Generator().manual_seed(1)))
    times: dict[str, list[float]] = {name: [] for name in WAYS}
    ended: dict[str, tuple[list[Tensor], Any]] = {}
    for turn in range(options.rounds + 1):
        for name in list(WAYS) if turn % 2 else reversed(WAYS):
            module = Tiny(logs and name != "bare")
            logged = WAYS[name](module, data)
            ended[name] = (module.losses, logged)
            if turn:
                times[name].append(module.step_time())
    first = torch.stack(ended["bare"][0])
    assert all(torch.equal(torch.stack(losses), first) for losses, _ in ended.values()), "the losses differ"
    assert ended["Lightning"][1] == ended["this project"][1], "the logged values differ"
    costs = {
        name: [seconds - base for seconds, base in zip(times[name], times["bare"], strict=True)]
        for name in ("Lightning", "this project")
    }

    def ratio(indices: Any) -> float:
        project_cost, lightning_cost = (
            statistics.median(costs[name][index] for index in indices) for name in ("this project", "Lightning")
        )
        return project_cost / lightning_cost

    rounds = range(options.rounds)
    spread = interval(ratio, options.rounds)
    case = "one log" if logs else "no log"
    middle = {name: 1e3 * statistics.median(seconds) for name, seconds in costs.items()}
    print(
        f"{case}: over a bare loop ({1e3 * statistics.median(times['bare']):.3f} ms) Lightning"
        f" {middle['Lightning']:.3f} ms, this project {middle['this project']:.3f} ms; ratio {ratio(rounds):.3f}"
        f" ({spread[0]:.3f} .. {spread[1]:.3f}), aim at most {limit}"
    )
    return at_most(f"framework cost of a step, {case} / that of Lightning's loop", ratio(rounds), limit, spread)


def main() -> None:
    """Print both results."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--steps", type=int, default=400)
    parser.add_argument("--rounds", type=int, default=15)
    add_options(parser)
    options = parser.parse_args()
    torch.set_num_threads(1)
    warnings.simplefilter("ignore")
    for name in ("lightning.pytorch", "lightning.fabric", "lightning_pipe"):
        logging.getLogger(name).setLevel(logging.ERROR)
    save([measure(False, 1.0, options), measure(True, 1.0, options)], options.json)


if __name__ == "__main__":
    main()
