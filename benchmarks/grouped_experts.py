"""Time of forward and backward of a mixture's experts, against a loop over the experts.

``OMP_NUM_THREADS=1 python -m benchmarks.grouped_experts`` runs ``lightning_pipe.llm.model.moe.Experts`` and the loop in
turns, on the same tokens and weights in float32, for each number of experts (``--experts``), number of tokens
(``--tokens``) and pair of widths (``--widths``, each ``dim:hidden_dim``). Tokens choose experts at random.

Aim: at most 1.05 times the loop's time. The output is medians over rounds of the ratios in one round, with 95 %
intervals, and the loop's median time in ms.
"""

from __future__ import annotations

import argparse
import statistics
import time
from collections.abc import Callable
from functools import partial
from itertools import product

import torch
import torch.nn.functional as F
from torch import Tensor

from benchmarks.figures import Figure, add_options, at_most, median_ratio, quartiles, save
from lightning_pipe.llm.model.moe import Experts

LIMIT = 1.05


def main() -> None:
    """Print the ratios, and save the figures."""
    parser = argparse.ArgumentParser(description="experts of a mixture")
    parser.add_argument("--experts", type=int, nargs="+", default=[8, 32, 128, 256])
    parser.add_argument("--tokens", type=int, nargs="+", default=[256, 2048])
    parser.add_argument("--widths", nargs="+", default=["64:64", "128:256"])
    parser.add_argument("--rounds", type=int, default=9)
    add_options(parser)
    options = parser.parse_args()
    torch.set_num_threads(1)
    figures: list[Figure] = []
    for widths, number, tokens in product(options.widths, options.experts, options.tokens):
        dim, hidden = map(int, widths.split(":"))
        torch.manual_seed(0)
        experts = Experts(dim, hidden, number)
        counts = torch.randint(number, (tokens,)).bincount(minlength=number)
        ways: dict[str, Callable[[Tensor, Tensor], Tensor]] = {"grouped": experts, "loop": partial(in_a_loop, experts)}
        times: dict[str, list[float]] = {way: [] for way in ways}
        for warm in [False] + [True] * options.rounds:
            for way, run in ways.items():
                took = step(experts, run, torch.randn(tokens, dim), counts)
                times[way] += [took] if warm else []
        name = f"{number} experts of {dim} x {hidden}, {tokens} tokens"
        ratio, spread = median_ratio(times["grouped"], times["loop"])
        figures.append(at_most(f"{name}, grouped / loop", ratio, LIMIT, spread))
        figures.append(
            Figure(
                f"{name}, loop",
                statistics.median(times["loop"]) * 1e3,
                "ms",
                quartiles([1e3 * value for value in times["loop"]]),
            )
        )
        print(
            f"{name:42} {ratio:6.2f} {spread[0]:6.2f} .. {spread[1]:.2f}  loop {figures[-1].value:8.2f} ms", flush=True
        )
    save(figures, options.json)


def step(experts: Experts, run: Callable[[Tensor, Tensor], Tensor], rows: Tensor, counts: Tensor) -> float:
    """Seconds of a forward and its backward."""
    experts.zero_grad()
    rows.requires_grad_()
    gradient = torch.randn(len(rows), rows.shape[1])
    begun = time.perf_counter()
    run(rows, counts).backward(gradient)
    return time.perf_counter() - begun


def in_a_loop(experts: Experts, rows: Tensor, counts: Tensor) -> Tensor:
    """Results of the experts one after the other."""
    parts = zip(
        rows.split(counts.tolist()), experts.gate.unbind(), experts.up.unbind(), experts.down.unbind(), strict=True
    )
    return torch.cat([F.linear(F.silu(F.linear(x, gate)) * F.linear(x, up), down) for x, gate, up, down in parts])


if __name__ == "__main__":
    main()
