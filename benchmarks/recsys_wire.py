"""Bytes sent and time per step, for different types of embeddings, gradients and ids in messages.

``torchrun --nproc-per-node 2 -m benchmarks.recsys_wire`` trains the model of :mod:`recsys_model` with table-wise
sharding, alternating between the types in one run. ``python -m benchmarks.slow_link --rate 1gbit
benchmarks.recsys_wire`` does so over a link of that rate (requires root). It also prints the cost of converting an id
to int32 and back. The benchmark fails if losses with fp32 messages are not equal to the bit. The figures have no aim,
because the benefit depends on the network.

``--sequences`` trains sequence tables instead, whose ids can be sent once per rank and batch. Ids are then drawn by
Zipf's law: the share of the k-th most frequent id is in proportion to k to the power of -1.1.
"""

from __future__ import annotations

import argparse
import os
import statistics
import time
from collections.abc import Callable, Iterator
from functools import partial
from typing import Any, cast

import torch
import torch.distributed as dist
from torchrec import EmbeddingCollection, EmbeddingConfig

from benchmarks.figures import Figure, add_options, median_ratio, quartiles, save
from benchmarks.recsys_model import EPS, RATE, Batch, Model, batches, forever, seed_tables
from benchmarks.traffic import recorded_traffic
from lightning_pipe.recsys.modules.ids_on_wire import narrow_ids
from lightning_pipe.recsys.sharding.shard_model import shard_model
from lightning_pipe.recsys.tasks.train_pipeline import TrainPipeline

# Types of embeddings and gradients, and of ids, and whether each id is sent once.
WIRES = {
    "fp32, int64 ids": (None, "int64", False),
    "fp32, int32 ids": (None, "int32", False),
    "fp16, int32 ids": ("fp16", "int32", False),
    "bf16, int32 ids": ("bf16", "int32", False),
    "int8, int32 ids": ("int8", "int32", False),
}
SEQUENCE_WIRES = {
    "fp32": (None, "int32", False),
    "fp32, ids once": (None, "int32", True),
    "bf16": ("bf16", "int32", False),
    "bf16, ids once": ("bf16", "int32", True),
}


class Sequences(Model):
    """The same model with sequence tables, whose rows it adds up itself."""

    def __init__(self, options: argparse.Namespace) -> None:
        super().__init__(options)
        configs = [
            EmbeddingConfig(
                name=config.name,
                embedding_dim=config.embedding_dim,
                num_embeddings=config.num_embeddings,
                feature_names=config.feature_names,
            )
            for config in self.tables.embedding_bag_configs()
        ]
        self.tables = EmbeddingCollection(tables=configs, device=torch.device("meta"))

    def forward(self, batch: Batch) -> tuple[torch.Tensor, tuple[torch.Tensor, torch.Tensor]]:
        rows = self.tables(batch.sparse)
        sums = [
            torch.segment_reduce(rows[name].values(), "sum", lengths=rows[name].lengths(), axis=0, unsafe=True)
            for name in self.features
        ]
        logits = self.mlp(torch.cat([*sums, batch.dense], dim=1)).squeeze(1)
        loss = torch.nn.functional.binary_cross_entropy_with_logits(logits, batch.label)
        return loss, (loss.detach(), logits.detach())


def draw_by_zipf(data: list[Batch], rows: int) -> None:
    """Replace the ids of the batches."""
    shares = torch.arange(1, rows + 1, dtype=torch.float64) ** -1.1
    for batch in data:
        ids = batch.sparse.values()
        ids.copy_(torch.multinomial(shares, ids.numel(), replacement=True))


def pipeline(
    options: argparse.Namespace, precision: str | None, ids: Any, dedup: bool
) -> Callable[[Iterator[Any]], Any]:
    """Function ``progress`` of a pipeline with these types."""
    torch.manual_seed(1)
    model = Sequences(options) if options.sequences else Model(options)
    sharded = shard_model(
        model,
        device=torch.device("cpu"),
        group=cast(dist.ProcessGroup, dist.new_group()),
        sparse_optimizer={"class_path": "torchrec.optim.RowWiseAdagrad", "init_args": {"lr": RATE, "eps": EPS}},
        constraints={f"table{index}": {"sharding_types": ["table_wise"]} for index in range(options.tables)},
        quantized_comms=None if precision is None else {"forward": precision, "backward": precision},
        dedup=dedup,
    )
    seed_tables(sharded.dmp)
    dense = torch.optim.SGD([parameter for _, parameter in sharded.dense_parameters()], lr=RATE)
    return TrainPipeline(sharded, dense, "cpu", plan=options.plan, options={"wire": {"ids": ids}}).progress


def conversion(ids: torch.Tensor, repetitions: int = 50) -> list[list[float]]:
    """Nanoseconds per id of the conversions to int32 and back, for each repetition."""
    measurements = []
    for run in (partial(narrow_ids, ids), narrow_ids(ids).long):
        nanoseconds = []
        for _ in range(repetitions):
            start = time.perf_counter()
            run()
            nanoseconds.append((time.perf_counter() - start) / ids.numel() * 1e9)
        measurements.append(nanoseconds)
    return measurements


def _ratio_fields(seconds: list[float], plain: list[float]) -> tuple[float, str, tuple[float, float]]:
    ratio, spread = median_ratio(seconds, plain)
    return ratio, "ratio", spread


def main() -> None:
    """Run and print on rank 0."""
    parser = argparse.ArgumentParser(description=__doc__)
    for name, default in (
        ("tables", 8),
        ("rows", 100_000),
        ("width", 64),
        ("pooling", 10),
        ("batch", 1024),
        ("dense", 16),
        ("steps", 5),
        ("rounds", 11),
    ):
        parser.add_argument(f"--{name}", type=int, default=default)
    parser.add_argument("--mlp", type=int, nargs="*", default=[256, 128])
    parser.add_argument("--plan", default="serial", help="serial waits for all messages")
    parser.add_argument("--sequences", action="store_true", help="train sequence tables with ids by Zipf's law")
    add_options(parser)
    options = parser.parse_args()
    rank = int(os.environ["RANK"])
    dist.init_process_group("gloo")
    data = batches(options, rank, False)
    if options.sequences:
        torch.manual_seed(rank)
        draw_by_zipf(data, options.rows)
    wires, kind = (SEQUENCE_WIRES, " sequences") if options.sequences else (WIRES, "")
    runs = {name: (pipeline(options, *wire), forever(data)) for name, wire in wires.items()}
    times: dict[str, list[float]] = {name: [] for name in runs}
    sent: dict[str, float] = {}
    losses: dict[str, float] = {}
    for turn in range(options.rounds):
        for place in range(len(runs)):
            # The first one of a round is faster than the others, so each comes first in turn.
            name = list(runs)[(turn + place) % len(runs)]
            progress, endless = runs[name]
            dist.barrier()
            start = time.perf_counter()
            with recorded_traffic() as traffic:
                for _ in range(options.steps):
                    losses[name] = float(progress(endless)[0])
            if turn:  # the first round warms up and resolves the model
                times[name].append((time.perf_counter() - start) / options.steps * 1000)
                sent[name] = sum(message.bytes for message in traffic if message.kind == "all_to_all") / options.steps
    # With each id sent once, gradients are added up in another order.
    exact = {losses[name] for name, (precision, _, dedup) in wires.items() if precision is None and not dedup}
    if len(exact) != 1:
        raise SystemExit(f"the loss with int32 ids differs from that with int64 ids: {losses}")
    if rank == 0:
        figures = []
        plain = next(iter(runs))
        most, slowest = sent[plain], statistics.median(times[plain])
        print(f"{'':<18}{'MB/step':>10}{'ratio':>7}{'ms/step':>11}{'ratio':>7}{'loss':>10}")
        for name in runs:
            seconds = times[name]
            middle = statistics.median(seconds)
            print(
                f"{name:<18}{sent[name] / 1e6:>10.3f}{sent[name] / most:>7.3f}{middle:>11.2f}{middle / slowest:>7.3f}"
                f"{losses[name]:>10.6f}"
            )
            if name != plain:
                ratio = sent[name] / most
                figures.append(Figure(f"recsys{kind} bytes sent, {name} / {plain}", ratio, "ratio", (ratio, ratio)))
                figures.append(Figure(f"recsys{kind} step, {name} / {plain}", *_ratio_fields(seconds, times[plain])))
        for way, took in zip(("to int32", "back to int64"), conversion(data[0].sparse.values()), strict=True):
            print(f"conversion of an id {way}: {statistics.median(took):.2f} ns")
            figures.append(Figure(f"an id's way {way}", statistics.median(took), "ns an id", quartiles(took)))
        save(figures, options.json)
    dist.barrier()
    os._exit(0)  # pipeline threads still wait for batches


if __name__ == "__main__":
    main()
