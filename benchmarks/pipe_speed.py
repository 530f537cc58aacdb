"""Speed-up of an in-process pipe of CPU partitions over its Sequential on the same micro-batches.

``OMP_NUM_THREADS=1 python -m benchmarks.pipe_speed`` trains a transformer with equal layers as a pipe of two partitions
and as the plain module on one thread, on the same micro-batches, alternating and in both orders. The ideal speed-up of
*n* partitions with *m* micro-batches is ``n * m / (m + n - 1)``. Aim: 90 % of that, with ``checkpoint="never"``. The
output is medians over rounds, and the interquartile range of the ratio.

The column *at once* shows the slowdown of the plain module while one independent copy per further partition trains in
another thread. This is the loss from several threads on this machine, regardless of their work.
"""

from __future__ import annotations

import argparse
import statistics
import threading
import time
from collections.abc import Callable, Sequence
from functools import partial

import torch
from torch import Tensor, nn

from benchmarks.figures import add_options, at_least, quartiles, save
from lightning_pipe.pipe import Pipe
from lightning_pipe.pipe.scatter import scatter

LIMIT = 0.9


def main() -> None:
    """Print a row for each way of training."""
    parser = argparse.ArgumentParser(description="speed-up of an in-process pipe on CPUs")
    parser.add_argument("--partitions", type=int, default=2)
    parser.add_argument("--chunks", type=int, nargs="+", default=[4, 8])
    parser.add_argument("--rounds", type=int, default=12)
    parser.add_argument("--width", type=int, default=256)
    parser.add_argument("--length", type=int, default=64)
    parser.add_argument("--rows", type=int, default=32)
    parser.add_argument("--checkpoint", choices=("never", "always", "except_last"), default="never")
    add_options(parser)
    options = parser.parse_args()
    torch.set_num_threads(1)
    inputs, targets = (
        torch.randn(options.rows, options.length, options.width),
        torch.randn(options.rows, options.length, options.width),
    )
    heads = (
        f"{'way':8}{'chunks':>7}{'plain ms':>10}{'at once':>9}{'pipe ms':>9}{'faster':>8}{'ideal':>7}{'of ideal':>10}"
    )
    print(f"{heads}  quartiles of the last; median in each order")
    figures = []
    for chunks in options.chunks:
        plain, *copies = (transformer(options.width, options.partitions) for _ in range(options.partitions))
        pipe = Pipe(
            transformer(options.width, options.partitions), chunks, options.checkpoint, ["cpu"] * options.partitions
        )
        ideal = options.partitions * chunks / (chunks + options.partitions - 1)
        for way, of_pipe, of_plain in (("forward", by_forward, whole), ("loss", by_loss, in_turns)):
            steps = [
                partial(of_plain, plain, inputs, targets, chunks),
                partial(of_pipe, pipe, inputs, targets),
                partial(at_once, [partial(of_plain, module, inputs, targets, chunks) for module in (plain, *copies)]),
            ]
            rounds = measure(steps, options.rounds)
            for parameter, reference in zip(pipe.parameters(), plain.parameters(), strict=True):
                torch.testing.assert_close(parameter.grad, reference.grad, msg=f"{way}: the pipe has other gradients")
            ratios = [before / after / ideal for before, after, _ in rounds]
            low, high = quartiles(ratios)
            name = (
                f"in-process pipe, speed-up by {way} / ideal, {options.partitions} partitions, {chunks} micro-batches"
            )
            figures.append(at_least(name, statistics.median(ratios), LIMIT, (low, high)))
            slow, fast, _ = (statistics.median(column) for column in zip(*rounds, strict=True))
            together = statistics.median(all_of_them / alone for alone, _, all_of_them in rounds)
            orders = [statistics.median(ratios[first::2]) for first in (0, 1)]
            print(
                f"{way:8}{chunks:7}{slow * 1e3:10.1f}{together:9.3f}{fast * 1e3:9.1f}{slow / fast:8.3f}{ideal:7.3f}"
                f"{statistics.median(ratios):10.3f}  {low:.3f} .. {high:.3f}; {orders[0]:.3f} and {orders[1]:.3f}",
                flush=True,
            )
        pipe.close()
    save(figures, options.json)


def transformer(width: int, partitions: int) -> nn.Sequential:
    """Two equal layers for each partition."""
    torch.manual_seed(0)
    return nn.Sequential(
        *(nn.TransformerEncoderLayer(width, 4, 4 * width, 0.0, batch_first=True) for _ in range(2 * partitions))
    )


def by_forward(pipe: Pipe, inputs: Tensor, targets: Tensor) -> None:
    """Train in the order of GPipe."""
    pipe.zero_grad()
    nn.functional.mse_loss(pipe(inputs), targets).backward()


def by_loss(pipe: Pipe, inputs: Tensor, targets: Tensor) -> None:
    """Train in the order of 1F1B."""
    pipe.zero_grad()
    pipe.loss(inputs, targets, nn.MSELoss()).backward()


def whole(module: nn.Sequential, inputs: Tensor, targets: Tensor, chunks: int) -> None:
    """Train the plain module with all forwards before one backward."""
    module.zero_grad()
    output = torch.cat([module(piece) for piece in scatter(inputs, chunks)])
    nn.functional.mse_loss(output, targets).backward()


def in_turns(module: nn.Sequential, inputs: Tensor, targets: Tensor, chunks: int) -> None:
    """Train the plain module with a backward after each forward."""
    module.zero_grad()
    for piece, target in zip(scatter(inputs, chunks), scatter(targets, chunks), strict=True):
        (nn.functional.mse_loss(module(piece), target) / chunks).backward()


def at_once(steps: Sequence[Callable[[], None]]) -> None:
    """Run each step in a separate thread."""
    threads = [threading.Thread(target=step) for step in steps]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()


def measure(steps: Sequence[Callable[[], None]], rounds: int) -> list[list[float]]:
    """Seconds of each step in each round. Every second round runs the steps in reverse order."""
    for step in steps:
        step()
        step()
    measurements = []
    for number in range(rounds):
        seconds = [0.0] * len(steps)
        order = range(len(steps))
        for index in order if number % 2 == 0 else reversed(order):
            begin = time.perf_counter()
            steps[index]()
            seconds[index] = time.perf_counter() - begin
        measurements.append(seconds)
    return measurements


if __name__ == "__main__":
    main()
