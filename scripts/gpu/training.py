"""Train a small recommender under plans and TorchRec's train pipelines, and save all values of each.

A way is the name of a plan or of a class of TorchRec, with ``:pageable`` for batches that are not pinned. A plan may
have ``:clipped`` (gradients), or ``:evaluated`` (an evaluation after every third batch, which changes nothing). All
ways train the same model on the same batches with the same sharding. Losses, tables, dense parameters and the states of
their optimizers are saved after each way, and so are the caching allocator's peak and the error of a way that failed.
"""

from __future__ import annotations

import argparse
import os
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torchrec.distributed.embeddingbag import EmbeddingBagCollectionSharder
from torchrec.distributed.planner import EmbeddingShardingPlanner, ParameterConstraints, Topology
from torchrec.distributed.train_pipeline import train_pipelines
from torchrec.distributed.types import CacheParams

from benchmarks.recsys_model import Batch, Model, batches, ours, theirs
from lightning_pipe.recsys import TrainPipeline
from lightning_pipe.recsys.kernels.fused_kernels import find_uvm_caching_kernels
from lightning_pipe.recsys.plans.recsys_plans import PLANS
from scripts.gpu.devices import connect, parser, peak_bytes, recorded_kernels, save, tensors

__all__ = ["SIZES"]

SIZES: dict[str, Any] = {"tables": 4, "rows": 2000, "width": 16, "pooling": 4, "batch": 64, "dense": 4, "mlp": [32]}
_ARGUMENTS: dict[str, dict[str, Any]] = {"TrainPipelineSemiSync": {"start_batch": 0}}


def sharding(options: argparse.Namespace, device: torch.device, kernel: str | None) -> tuple[Any, Any]:
    """Plan of the tables for all ways, and TorchRec's sharders of modules with a cache (None otherwise)."""
    if kernel is None:
        return theirs(options, device)[0].plan, None
    cached = ParameterConstraints(
        sharding_types=["table_wise"], compute_kernels=[kernel], cache_params=CacheParams(load_factor=0.3)
    )
    constraints = {f"table{index}": cached for index in range(options.tables)}
    sharders: Any = [EmbeddingBagCollectionSharder(fused_params={"prefetch_pipeline": True})]
    planner = EmbeddingShardingPlanner(
        topology=Topology(world_size=dist.get_world_size(), compute_device=device.type), constraints=constraints
    )
    return planner.collective_plan(Model(options), sharders, dist.group.WORLD), sharders


def fill_tables(model: nn.Module) -> None:
    """Fill the tables with values from the host's generator, which are the same on a CPU and a GPU."""
    torch.manual_seed(2)
    for value in model.state_dict().values():
        for shard in getattr(value, "local_shards", list)():
            if not shard.tensor.is_floating_point():
                continue  # a map of ids
            shard.tensor.copy_(torch.rand(shard.tensor.shape) / 10 - 0.05)


def trained(
    way: str, options: argparse.Namespace, device: torch.device, plan: Any, sharders: Any, steps: int
) -> dict[str, Any]:
    """Train *way* and return its losses and values."""
    name, _, variant = way.partition(":")
    pin = device.type == "cuda" and variant != "pageable"
    batch_pool = batches(options, dist.get_rank(), pin)
    data: list[Batch] = [batch_pool[index % len(batch_pool)] for index in range(steps)]
    if name in PLANS:
        sharded, optimizer = ours(options, device, plan)
        model = sharded.dmp
        if not all(kernel.prefetch_pipeline for kernel in find_uvm_caching_kernels(sharded.sharded_modules.values())):
            raise AssertionError("tables with a cache are made without prefetch_pipeline")
        # TorchRec's pipelines do not record the first batch, after which semi_sync looks up the second with new values.
        more: dict[str, Any] = {"options": {"rewrite": {"method": "direct"}}}
        if variant == "clipped":
            more["max_norm"] = 1e-3
        pipeline: Any = TrainPipeline(sharded, optimizer, device, plan=name, **more)
    else:
        model, optimizer = theirs(options, device, plan, sharders=sharders)
        pipeline = getattr(train_pipelines, name)(model, optimizer, device, **_ARGUMENTS.get(name, {}))
    fill_tables(model)
    before = tensors(model.state_dict())
    losses, feed = [], iter(data)
    with recorded_kernels() as kernels, peak_bytes(device) as peak:
        while True:
            try:
                losses.append(pipeline.progress(feed)[0])
            except StopIteration:
                break
            if variant == "evaluated" and len(losses) % 3 == 0:
                list(pipeline.evaluate(iter(batch_pool)))
    if name in PLANS:
        pipeline.close()
    for module in model.modules():
        if callable(flush := getattr(module, "flush", None)):
            flush()  # cached rows to the tables
    dense = [optimizer.state_dict()] if name in PLANS else []
    states = {"tables": model.fused_optimizer.state_dict()["state"], "dense": dense}
    values = tensors(model.state_dict())
    if unchanged := [key for key, value in values.items() if torch.equal(value, before[key])]:
        raise AssertionError(f"training has not changed {', '.join(unchanged)}")
    return {
        "losses": torch.stack(losses).cpu(),
        "values": {**values, **{f"state {key}": value for key, value in tensors(states).items()}},
        "peak": peak,
        "kernels": kernels,
    }


def main() -> None:
    arg_parser = parser(__doc__, "plans, and classes of TorchRec")
    arg_parser.add_argument("--kernel", help="kernel of the tables, such as fused_uvm_caching (default: the planner's)")
    arg_parser.add_argument("--batch", type=int, default=SIZES["batch"], help="samples of a batch on each rank")
    options = arg_parser.parse_args()
    device = connect(options.device)
    sizes = argparse.Namespace(**{**SIZES, "batch": options.batch})
    plan, sharders = sharding(sizes, device, options.kernel)
    results: dict[str, Any] = {}
    for way in options.ways:
        try:
            results[way] = trained(way, sizes, device, plan, sharders, options.steps)
        except Exception as error:
            if dist.get_world_size() > 1:
                raise  # the other ranks would wait for this one
            results[way] = {"error": f"{type(error).__name__}: {error}"}
        save(results, options.save)
    dist.barrier()
    os._exit(0)  # TorchRec's pipelines may have batches in flight


if __name__ == "__main__":
    main()
