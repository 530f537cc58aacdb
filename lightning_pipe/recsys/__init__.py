"""TorchRec recommenders: sharding, the rewrite, the tasks, their plans, and a train pipeline without Lightning.

Sub-packages, lowest first: ``plans``, ``kernels``, ``batches``, ``modules``, ``dense``, ``balancing``, ``dynamic``,
``sharding``, ``rewrite``, ``tasks``.
"""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING, Any

from lightning_pipe.recsys.plans.named import PLANS, recsys_plan

if TYPE_CHECKING:
    from lightning_pipe.recsys.balancing.balancer import BatchBalancer
    from lightning_pipe.recsys.batches.token_weighted_loss import TokenCount, token_weighted_mean
    from lightning_pipe.recsys.dynamic.store.row_files import read_rows
    from lightning_pipe.recsys.kernels.table_optimizer import SparseOptimizer
    from lightning_pipe.recsys.modules.dynamic_modules import (
        DynamicEmbeddingBagCollection,
        DynamicEmbeddingCollection,
        DynamicTable,
    )
    from lightning_pipe.recsys.rewrite.model_rewrite import ModelRewrite
    from lightning_pipe.recsys.sharding.replicas import make_replica_groups
    from lightning_pipe.recsys.sharding.shard import ShardedModel, shard_model
    from lightning_pipe.recsys.tasks.actions import RecsysActions
    from lightning_pipe.recsys.tasks.context import RecsysContext
    from lightning_pipe.recsys.tasks.declarations import RecsysTask
    from lightning_pipe.recsys.tasks.options import (
        CheckOptions,
        MemoryOptions,
        RewriteOptions,
        ShardingOptions,
        WireOptions,
    )
    from lightning_pipe.recsys.tasks.task_list import recsys_tasks
    from lightning_pipe.recsys.tasks.train_pipeline import TrainPipeline

__all__ = [
    "PLANS",
    "BatchBalancer",
    "CheckOptions",
    "DynamicEmbeddingBagCollection",
    "DynamicEmbeddingCollection",
    "DynamicTable",
    "MemoryOptions",
    "ModelRewrite",
    "RecsysActions",
    "RecsysContext",
    "RecsysTask",
    "RewriteOptions",
    "ShardedModel",
    "ShardingOptions",
    "SparseOptimizer",
    "TokenCount",
    "TrainPipeline",
    "WireOptions",
    "make_replica_groups",
    "read_rows",
    "recsys_plan",
    "recsys_tasks",
    "shard_model",
    "token_weighted_mean",
]

# Imported on first use: if packages conflict, the error names the fix, and plans do not require TorchRec.
_MODULES = {
    "BatchBalancer": "balancing.balancer",
    "CheckOptions": "tasks.options",
    "DynamicEmbeddingBagCollection": "modules.dynamic_modules",
    "DynamicEmbeddingCollection": "modules.dynamic_modules",
    "DynamicTable": "modules.dynamic_modules",
    "MemoryOptions": "tasks.options",
    "ModelRewrite": "rewrite.model_rewrite",
    "RecsysActions": "tasks.actions",
    "RecsysContext": "tasks.context",
    "RecsysTask": "tasks.declarations",
    "RewriteOptions": "tasks.options",
    "ShardedModel": "sharding.shard",
    "ShardingOptions": "tasks.options",
    "SparseOptimizer": "kernels.table_optimizer",
    "TokenCount": "batches.token_weighted_loss",
    "TrainPipeline": "tasks.train_pipeline",
    "WireOptions": "tasks.options",
    "make_replica_groups": "sharding.replicas",
    "read_rows": "dynamic.store.row_files",
    "recsys_tasks": "tasks.task_list",
    "shard_model": "sharding.shard",
    "token_weighted_mean": "batches.token_weighted_loss",
}


def __getattr__(name: str) -> Any:
    if name not in _MODULES:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    from lightning_pipe.environment import import_torchrec

    import_torchrec()
    found = globals()[name] = getattr(importlib.import_module(f"{__name__}.{_MODULES[name]}"), name)
    return found


def __dir__() -> list[str]:
    return sorted({*globals(), *__all__})
