"""Train tables of any id with a Trainer, dynamic or with managed collision, and save all values of each way.

A way is the name of a plan, with one variant after a colon.

- Both kinds: ``resumed`` (a checkpoint in the middle of the epoch; dynamic tables write it and their commits in the
  background).
- Dynamic tables: ``device`` (ids are looked up on the tables' device), ``host_rows`` (rows in host memory),
  ``profiled`` (exposed time of each task), ``adam`` (another optimizer), ``fp16`` (rows in fp16).
- Managed collision: ``filtered`` (random draws decide which ids get a row), ``window`` (tables step once for two
  batches), ``micro_batch`` (tables step for each of two batches).

Ways without evicted rows are an error, since they would not test the order of evictions.
"""

from __future__ import annotations

import argparse
import os
import traceback
from collections.abc import Iterator
from itertools import count
from pathlib import Path
from typing import Any

import lightning.pytorch as pl
import torch
from torch import Tensor, nn
from torchrec import EmbeddingBagCollection, EmbeddingBagConfig, EmbeddingCollection, EmbeddingConfig, KeyedJaggedTensor
from torchrec.modules.embedding_configs import DataType, PoolingType
from torchrec.modules.mc_embedding_modules import (
    ManagedCollisionEmbeddingBagCollection,
    ManagedCollisionEmbeddingCollection,
)
from torchrec.modules.mc_modules import (
    DistanceLFU_EvictionPolicy,
    LFU_EvictionPolicy,
    LRU_EvictionPolicy,
    ManagedCollisionCollection,
    MCHManagedCollisionModule,
    probabilistic_threshold_filter,
)

from benchmarks.figures import Figure, add_options
from benchmarks.figures import save as save_figures
from benchmarks.recsys_model import EPS, RATE, Batch
from lightning_pipe.callbacks import PipelineProfiler
from lightning_pipe.recsys import DynamicEmbeddingBagCollection, DynamicEmbeddingCollection, DynamicTable
from lightning_pipe.recsys.kernels.fused_kernels import find_fused_kernels
from lightning_pipe.strategies import RecsysPipelineStrategy
from scripts.gpu.devices import backend, parser, save, separate_machines
from scripts.gpu.fitting import figures_of
from scripts.gpu.fitting import state as state_of_tables
from scripts.gpu.trainers import fit
from scripts.gpu.training import fill_tables

__all__: list[str] = []

_WIDTH, _DENSE, _LONGEST = 16, 4, 8
_KEYS = ["first", "second", "recent"]
_OPTIMIZERS = {
    "": {"class_path": "torchrec.optim.RowWiseAdagrad", "init_args": {"lr": RATE, "eps": EPS}},
    "adam": {"class_path": "torch.optim.Adam", "init_args": {"lr": 0.01, "betas": [0.9, 0.99], "eps": EPS}},
}


def batches(size: int, steps: int, rank: int, ranks: int) -> list[Batch]:
    """Batches with ids in 63 bits, some of which occur often."""
    generator, data = torch.Generator().manual_seed(rank), []
    for _ in range(steps):
        lengths = torch.randint(0, _LONGEST + 1, (len(_KEYS) * size,), generator=generator)
        drawn = torch.rand(int(lengths.sum()), generator=generator) ** 2 * (12 * size * ranks)
        ids = ((drawn.long() + 1) * 0x5851F42D4C957F2D) & (2**63 - 1)
        dense = torch.randn(size, _DENSE, generator=generator)
        label = torch.randint(0, 2, (size,), generator=generator).float()
        data.append(Batch(dense, KeyedJaggedTensor(keys=_KEYS, values=ids, lengths=lengths), label))
    return data


def dynamic(variant: str, rows: int, store: Path) -> tuple[nn.Module, nn.Module]:
    """Modules of pooled tables and of sequences, whose rows have a store."""
    more: dict[str, Any] = {"host_rows": {"host_rows": rows // 8}, "fp16": {"data_type": DataType.FP16}}.get(
        variant, {}
    )
    bags = [
        DynamicTable(name="first", embedding_dim=_WIDTH, feature_names=["first"], cache_rows=rows, **more),
        DynamicTable(
            name="second",
            embedding_dim=_WIDTH,
            feature_names=["second"],
            cache_rows=rows,
            pooling="mean",
            admission_threshold=2,
            ttl=8,
            eviction="lfu",
            **more,
        ),
    ]
    recent = [DynamicTable(name="recent", embedding_dim=_WIDTH, feature_names=["recent"], cache_rows=rows, **more)]
    options: dict[str, Any] = {"seed": 3, "commit_every": 3 if variant == "resumed" else None}
    options["id_map_device"] = "device" if variant == "device" else "host"
    return (
        DynamicEmbeddingBagCollection(bags, store / "bags", **options),
        DynamicEmbeddingCollection(recent, store / "recent", **options),
    )


def _by_chance(counts: Tensor) -> Any:
    return probabilistic_threshold_filter(counts, 0.6)


@torch.no_grad()
def _initial(rows: Tensor) -> Tensor:
    """Values from the host's generator, which are the same on a CPU and a GPU."""
    return rows.copy_(torch.rand(rows.shape) / 10 - 0.05)


def managed(variant: str, rows: int) -> tuple[nn.Module, nn.Module]:
    """Modules of pooled tables and of sequences, whose ids are mapped to rows."""
    options: dict[str, Any] = {"embedding_dim": _WIDTH, "num_embeddings": rows, "init_fn": _initial}
    bags = [
        EmbeddingBagConfig(name="first", feature_names=["first"], **options),
        EmbeddingBagConfig(name="second", feature_names=["second"], pooling=PoolingType.MEAN, **options),
    ]
    recent = [EmbeddingConfig(name="recent", feature_names=["recent"], **options)]
    chosen = _by_chance if variant == "filtered" else None
    policies = {
        "first": DistanceLFU_EvictionPolicy(),
        "second": LFU_EvictionPolicy(threshold_filtering_func=chosen),
        "recent": LRU_EvictionPolicy(),
    }

    def maps(configs: Any) -> ManagedCollisionCollection:
        cpu, every = torch.device("cpu"), 2
        modules = {
            config.name: MCHManagedCollisionModule(rows, cpu, policies[config.name], every) for config in configs
        }
        return ManagedCollisionCollection(modules, configs)

    return (
        ManagedCollisionEmbeddingBagCollection(EmbeddingBagCollection(tables=bags), maps(bags)),
        ManagedCollisionEmbeddingCollection(EmbeddingCollection(tables=recent), maps(recent)),
    )


class Clicks(pl.LightningModule):
    """Pooled tables, a table of sequences, and an MLP over them."""

    def __init__(self, modules: tuple[nn.Module, nn.Module]) -> None:
        super().__init__()
        self.bags, self.recent = modules
        self.over = nn.Sequential(nn.Linear(_DENSE + 3 * _WIDTH, 32), nn.ReLU(), nn.Linear(32, 1))
        self.losses: list[Tensor] = []

    def training_step(self, batch: Batch, batch_idx: int) -> Tensor:
        pooled, recent = (_first(module(batch.sparse)) for module in (self.bags, self.recent))
        sequences = recent["recent"].to_padded_dense(_LONGEST).sum(1)
        logits = self.over(torch.cat([batch.dense, pooled.values(), sequences], dim=1)).squeeze(1)
        return nn.functional.binary_cross_entropy_with_logits(logits, batch.label)

    def on_train_batch_end(self, outputs: Any, batch: Batch, batch_idx: int) -> None:
        self.losses.append(outputs["loss"])  # not those of a profile, which restores the tables

    def configure_optimizers(self) -> torch.optim.Optimizer:
        return torch.optim.SGD(self.over.parameters(), lr=RATE)


def _first(output: Any) -> Any:
    """Embeddings of a module, which returns remapped ids as well if it has managed collision."""
    return output[0] if isinstance(output, tuple) else output


class Counted(pl.Callback):
    """Gives tables of managed collision the same values on each device, and counts the rows that are evicted."""

    def __init__(self) -> None:
        self.evicted = 0

    def on_train_start(self, trainer: pl.Trainer, module: pl.LightningModule) -> None:
        sharded = trainer.strategy.sharded_model  # type: ignore[attr-defined]
        if not (trainer.global_step or sharded.dynamic_rows):
            fill_tables(sharded.dmp)
        for submodule in sharded.dmp.modules():
            if callable(evict := getattr(submodule, "_evict", None)):
                submodule._evict = self._counting(evict)

    def _counting(self, evict: Any) -> Any:
        def counted(rows: Any) -> None:
            self.evicted += sum(ids.numel() for ids in rows.values() if ids is not None)
            evict(rows)

        return counted

    def on_train_end(self, trainer: pl.Trainer, module: pl.LightningModule) -> None:
        for rows in trainer.strategy.sharded_model.dynamic_rows.values():  # type: ignore[attr-defined]
            self.evicted += sum(cache.stats.evicted for cache in rows.caches.values())


def state(trainer: pl.Trainer) -> dict[str, Any]:
    """Values of tables, maps, stores and dense parameters. Rows of dynamic tables are in the order of their ids."""
    sharded = trainer.strategy.sharded_model  # type: ignore[attr-defined]
    if not sharded.dynamic_rows:
        return {**state_of_tables(trainer), "window": sharded.id_maps.collect_id_histories()}
    values: dict[str, Any] = {name: value.detach() for name, value in sharded.dense_parameters()}
    for name, rows in sharded.dynamic_rows.items():
        for table in rows.caches:
            chunks = [[chunk.ids, chunk.counts, chunk.last_seen, *chunk.columns] for chunk in rows.rows(table)]
            columns = [torch.cat(parts) for parts in zip(*chunks, strict=True)]
            values[f"{name}.{table}"] = [part[columns[0].argsort()] for part in columns]
    return values


def trained(way: str, options: argparse.Namespace, kind: str) -> tuple[dict[str, Any], list[Figure]]:
    """Losses and values of one way, and its figures."""
    plan, _, variant = way.partition(":")
    rank, ranks = int(os.environ.get("RANK", "0")), int(os.environ.get("WORLD_SIZE", "1"))
    folder = options.save.parent / f"{options.save.stem}-{way.replace(':', '-')}"
    numbers: Iterator[int] = count()
    arguments: dict[str, Any] = {"process_group_backend": kind}
    if options.tables == "dynamic":
        arguments["async_checkpoints"] = variant == "resumed"
    if variant == "window":
        arguments["accumulate_tables"] = "window"
    counted = Counted()
    profiler = PipelineProfiler((3,), rounds=3, iterations=3, path=folder / "profile.json", report=None)

    def make() -> Clicks:
        if options.tables == "managed":
            return Clicks(managed(variant, 3 * options.batch * ranks))
        return Clicks(dynamic(variant, 8 * options.batch * ranks, folder / f"store{next(numbers)}"))

    def strategy() -> RecsysPipelineStrategy:
        return RecsysPipelineStrategy(plan, sparse_optimizer=_OPTIMIZERS.get(variant, _OPTIMIZERS[""]), **arguments)

    result, trainer = fit(
        variant if variant == "resumed" else "",
        options.device,
        folder,
        make,
        strategy,
        batches(options.batch, options.steps, rank, ranks),
        state,
        [counted, *([profiler] if variant == "profiled" else [])],
        accumulate_grad_batches=2 if variant in ("window", "micro_batch") else 1,
    )
    if not counted.evicted:
        raise AssertionError(f"{way} has evicted no rows")
    sharded = trainer.strategy.sharded_model  # type: ignore[attr-defined]
    kernels = sorted({f"{kernel.optimizer} on {kernel.current_device}" for kernel in find_fused_kernels(sharded.dmp)})
    name, evicted = f"{way}: rows evicted ({', '.join(kernels)})", counted.evicted
    figures = [Figure(name, evicted, "rows", (evicted, evicted))]
    figures += figures_of(plan, folder, trainer, profiler if variant == "profiled" else None)
    sharded.close()
    return result, figures


def main() -> None:
    arg_parser = parser(__doc__, "plans, with variants")
    arg_parser.add_argument("--tables", choices=("dynamic", "managed"), required=True)
    arg_parser.add_argument("--batch", type=int, default=64, help="samples of a batch on each rank")
    add_options(arg_parser)
    options = arg_parser.parse_args()
    kind = backend(options.device)
    if kind == "gloo":
        separate_machines()
    results: dict[str, Any] = {}
    figures: list[Figure] = []
    for way in options.ways:
        try:
            results[way], more = trained(way, options, kind)
            figures += more
        except Exception as error:
            if os.environ.get("WORLD_SIZE", "1") != "1":
                raise  # the other ranks would wait for this one
            traceback.print_exc()
            results[way] = {"error": f"{type(error).__name__}: {error}"}
        save(results, options.save)
    save_figures(figures, options.json)


if __name__ == "__main__":
    main()
