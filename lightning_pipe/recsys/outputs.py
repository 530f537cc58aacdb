"""A sharded module's output, as the unsharded module would have returned it.

TorchRec returns an awaitable, and orders features by how their tables are sharded. A user's module must not depend on
either: ``values()`` of the same module has the same columns on one device and under any sharding.
"""

from __future__ import annotations

from typing import Any

import torch
from torchrec.distributed.types import Awaitable, ShardedModule
from torchrec.modules.embedding_modules import get_embedding_names_by_table
from torchrec.sparse.jagged_tensor import KeyedJaggedTensor, KeyedTensor

__all__ = ["unsharded_names", "wait_output"]


def unsharded_names(module: ShardedModule[Any, Any, Any, Any]) -> list[str]:
    """The names of a module's outputs in the order of its tables; empty if it does not keep their configs."""
    for child in module.modules():
        configs = getattr(child, "_embedding_bag_configs", None) or getattr(child, "_embedding_configs", None)
        if configs:
            return [name for of_table in get_embedding_names_by_table(configs) for name in of_table]
    return []


def wait_output(output: Any, names: list[str]) -> Any:
    """Waits for the output dist.

    Args:
        output: what a sharded module's forward or ``compute_and_output_dist`` returned.
        names: of ``unsharded_names``.

    Returns:
        A ``KeyedTensor`` (B x sum of dims), a dict of ``JaggedTensor``, or for managed-collision modules a pair of
        one of these and the remapped ids; keys in the order of ``names``.
    """
    if isinstance(output, tuple):
        return tuple(wait_output(part, names) for part in output)
    waited = output.wait() if isinstance(output, Awaitable) else output
    keys = list(waited.keys()) if isinstance(waited, (KeyedTensor, KeyedJaggedTensor, dict)) else names
    if keys == names or sorted(keys) != sorted(names):
        return waited
    if isinstance(waited, KeyedTensor):
        lengths = dict(zip(keys, waited.length_per_key(), strict=True))
        return KeyedTensor(
            keys=names,
            length_per_key=[lengths[name] for name in names],
            values=torch.cat([waited[name] for name in names], dim=waited.key_dim()),
            key_dim=waited.key_dim(),
        )
    if isinstance(waited, KeyedJaggedTensor):
        return waited.permute([keys.index(name) for name in names])
    return {name: waited[name] for name in names}
