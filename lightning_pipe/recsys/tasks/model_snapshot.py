"""Snapshot and restoration of all state that training a sharded model changes."""

from __future__ import annotations

import copy
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from torch.distributed.tensor import DTensor

from lightning_pipe._compat.torch import ShardedTensor, version_counters_preserved
from lightning_pipe.recsys.kernels.fused_kernels import find_fused_kernels
from lightning_pipe.recsys.sharding.sharded_model import ShardedModel

# State of a parameter, by key.
State = dict[str, Any]


@dataclass(frozen=True)
class _Snapshot:
    tensors: list[tuple[Tensor, Tensor]]
    states: list[dict[Tensor, State]]
    groups: list[list[State]]
    gradients: list[Tensor | None]
    replica_steps: int
    rows: list[Any]


class ModelSnapshotter:
    """Snapshot of a rank's model shards, a :class:`~lightning_pipe.engine.profiling.profiler.Snapshottable`.

    The snapshot is a copy on the host. It takes as much memory as the rank's tables (for dynamic tables, their caches),
    the dense part with its gradients, and all optimizer states. Random generators and state that user code holds
    elsewhere are not included.
    """

    def __init__(self, sharded: ShardedModel, optimizers: Sequence[torch.optim.Optimizer]) -> None:
        self._sharded = sharded
        self._optimizers = [*optimizers, *sharded.data_parallel_table_optimizers]

    def snapshot(self) -> _Snapshot:
        """Return a snapshot of the current state."""
        states = [
            {
                parameter: {key: _copied(value) for key, value in state.items()}
                for parameter, state in optimizer.state.items()
            }
            for optimizer in self._optimizers
        ]
        # Parameter groups hold the learning rates, and the step counts of some optimizers.
        groups = [
            [
                {key: _copied(value) for key, value in group.items() if key != "params"}
                for group in optimizer.param_groups
            ]
            for optimizer in self._optimizers
        ]
        gradients = [
            None if parameter.grad is None else parameter.grad.clone()
            for _, parameter in self._sharded.dense_parameters()
        ]
        replicas = self._sharded.replicas
        steps = 0 if replicas is None else replicas.steps
        rows = [table_rows.snapshot() for table_rows in self._sharded.dynamic_rows.values()]
        tensors = [(tensor, _copied(tensor)) for tensor in self._tensors()]
        return _Snapshot(tensors, states, groups, gradients, steps, rows)

    @torch.no_grad()
    def restore(self, snapshot: _Snapshot) -> None:
        """Restore a snapshot in place."""
        if torch.cuda.is_initialized():
            torch.cuda.synchronize()  # abandoned batches may still read, on any stream, what is replaced
        if self._sharded.replicas is not None:
            self._sharded.replicas.steps = snapshot.replica_steps
        for rows, values in zip(self._sharded.dynamic_rows.values(), snapshot.rows, strict=True):
            rows.restore(values)
        # Lookups made ahead may still run backward: the rows they read have the same values again. Buffers that the
        # first input dist has created since the snapshot are constants.
        with version_counters_preserved(tuple(tensor for tensor, _ in snapshot.tensors)):
            for tensor, value in snapshot.tensors:
                tensor.copy_(value)
        for optimizer, states in zip(self._optimizers, snapshot.states, strict=True):
            for parameter in [parameter for parameter in optimizer.state if parameter not in states]:
                del optimizer.state[parameter]
            for parameter, state in states.items():
                _restore(optimizer.state[parameter], state)
        replicated = self._sharded.data_parallel_table_optimizers
        for optimizer, groups in zip(self._optimizers, snapshot.groups, strict=True):
            # The rates of all tables are left as they are: the model sets a rate only when it changes.
            alone = (
                ("params", "lr") if any(optimizer is table_optimizer for table_optimizer in replicated) else ("params",)
            )
            for group, values in zip(optimizer.param_groups, groups, strict=True):
                _restore(group, {**values, "params": group["params"]}, alone)
        self._sharded.zero_grad()
        # Gradients as the module's optimizer_zero_grad() left them: possibly zeros, or sums over several batches.
        for (_, parameter), gradient in zip(self._sharded.dense_parameters(), snapshot.gradients, strict=True):
            parameter.grad = None if gradient is None else gradient.clone()

    def _tensors(self) -> list[Tensor]:
        """Tensors on this rank, in place: the module's, the fused optimizers' and the kernels' step counters."""
        module = self._sharded.module
        # Rows of dynamic tables are kept by their caches.
        tensors = list(_local(self._sharded.drop_dynamic_entries(self._sharded.dmp.state_dict())))
        # Includes buffers that no state dict contains.
        tensors += list(module.buffers())
        tensors += _local(self._sharded.drop_dynamic_entries(self._sharded.fused_optimizer.state_dict()["state"]))
        for sharded in self._sharded.sharded_modules.values():
            for kernel in find_fused_kernels(sharded):
                tensors += [kernel.iter, kernel.iter_cpu]
        return list({id(tensor): tensor for tensor in tensors}.values())


def _copied(value: Any) -> Any:
    return value.detach().to("cpu", copy=True) if isinstance(value, Tensor) else copy.deepcopy(value)


def _restore(state: State, snapshot: State, alone: tuple[str, ...] = ()) -> None:
    """Restore *state* from *snapshot*, except for the keys *alone*."""
    for key in [key for key in state if key not in snapshot]:
        del state[key]
    for key, value in snapshot.items():
        if key in alone:
            continue
        if isinstance(value, Tensor) and isinstance(state.get(key), Tensor):
            state[key].copy_(value)
        else:
            state[key] = copy.deepcopy(value)


def _local(value: Any) -> Iterator[Tensor]:
    """Yield the tensors of this rank, at any depth."""
    if isinstance(value, ShardedTensor):
        for shard in value.local_shards():
            yield shard.tensor
    elif isinstance(value, DTensor):
        yield value.to_local()
    elif isinstance(value, Tensor):
        yield value
    elif isinstance(value, dict):
        for entry in value.values():
            yield from _local(entry)
