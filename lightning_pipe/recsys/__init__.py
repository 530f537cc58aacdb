"""TorchRec recommenders: sharding, the rewrite, the tasks, their plans, and a train pipeline without Lightning.

Sub-packages, lowest first: ``plans``, ``kernels``, ``batches``, ``modules``, ``dense``, ``balancing``, ``dynamic``,
``sharding``, ``rewrite``, ``tasks``.
"""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING, Any

from lightning_pipe.recsys.plans.recsys_plans import PLANS, recsys_plan

if TYPE_CHECKING:
    from lightning_pipe.recsys.balancing.balancer import BatchBalancer as BatchBalancer
    from lightning_pipe.recsys.batches.token_weighted_loss import GlobalTokenCount as GlobalTokenCount
    from lightning_pipe.recsys.batches.token_weighted_loss import token_weighted_mean as token_weighted_mean
    from lightning_pipe.recsys.dynamic.store.row_files import read_rows as read_rows
    from lightning_pipe.recsys.kernels.table_optimizer import SparseOptimizerConfig as SparseOptimizerConfig
    from lightning_pipe.recsys.modules.dynamic_modules import (
        DynamicEmbeddingBagCollection as DynamicEmbeddingBagCollection,
    )
    from lightning_pipe.recsys.modules.dynamic_modules import DynamicEmbeddingCollection as DynamicEmbeddingCollection
    from lightning_pipe.recsys.modules.dynamic_modules import DynamicTable as DynamicTable
    from lightning_pipe.recsys.rewrite.model_rewrite import ModelRewrite as ModelRewrite
    from lightning_pipe.recsys.sharding.replicas import make_replica_groups as make_replica_groups
    from lightning_pipe.recsys.sharding.shard_model import shard_model as shard_model
    from lightning_pipe.recsys.sharding.sharded_model import ShardedModel as ShardedModel
    from lightning_pipe.recsys.tasks.actions import RecsysActions as RecsysActions
    from lightning_pipe.recsys.tasks.context import RecsysContext as RecsysContext
    from lightning_pipe.recsys.tasks.declarations import RecsysTask as RecsysTask
    from lightning_pipe.recsys.tasks.options import CheckOptions as CheckOptions
    from lightning_pipe.recsys.tasks.options import MemoryOptions as MemoryOptions
    from lightning_pipe.recsys.tasks.options import RewriteOptions as RewriteOptions
    from lightning_pipe.recsys.tasks.options import ShardingOptions as ShardingOptions
    from lightning_pipe.recsys.tasks.options import WireOptions as WireOptions
    from lightning_pipe.recsys.tasks.task_list import recsys_tasks as recsys_tasks
    from lightning_pipe.recsys.tasks.train_pipeline import TrainPipeline as TrainPipeline

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
    "ShardedModel": "sharding.sharded_model",
    "ShardingOptions": "tasks.options",
    "SparseOptimizerConfig": "kernels.table_optimizer",
    "GlobalTokenCount": "batches.token_weighted_loss",
    "TrainPipeline": "tasks.train_pipeline",
    "WireOptions": "tasks.options",
    "make_replica_groups": "sharding.replicas",
    "read_rows": "dynamic.store.row_files",
    "recsys_tasks": "tasks.task_list",
    "shard_model": "sharding.shard_model",
    "token_weighted_mean": "batches.token_weighted_loss",
}

__all__ = ["PLANS", "recsys_plan", *_MODULES]


def __getattr__(name: str) -> Any:
    if name not in _MODULES:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    from lightning_pipe.environment import import_torchrec

    import_torchrec()
    exported = globals()[name] = getattr(importlib.import_module(f"{__name__}.{_MODULES[name]}"), name)
    return exported


def __dir__() -> list[str]:
    return sorted({*globals(), *__all__})
