"""Averaged weights (``WeightAveraging``, ``EMAWeightAveraging``) of a module whose tables are sharded.

Each rank averages its copy of the dense parameters and buffers and, on request, its own shards of the tables. A
checkpoint has the averages in the part ``model``, where Lightning has them in ``state_dict``, and the values
that training continues with in the part ``current_model_state``.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import lightning.pytorch as pl
import torch
from lightning.pytorch.callbacks import WeightAveraging
from lightning.pytorch.utilities.rank_zero import rank_zero_warn
from torch import Tensor

from lightning_pipe._compat.torch import ShardedTensor, copy_sharded_tensor
from lightning_pipe._compat.torchrec import cached_tables
from lightning_pipe._compat.weight_averaging import (
    TrainedTensors,
    discard_averages,
    get_averages,
    replace_averaging_methods,
    set_number_of_averaged_steps,
    start_averaging,
)
from lightning_pipe.engine import SetupError
from lightning_pipe.recsys.sharding.sharded_model import ShardedModel
from lightning_pipe.recsys.sharding.table_values import local_shards

TRAINED, AVERAGING = "current_model_state", "averaging_state"  # Lightning's keys


def prepare_averaging(trainer: pl.Trainer, average_tables: bool) -> ShardedWeightAverages | None:
    """Find the trainer's averaging callback, before it copies the module. Return None without one."""
    callbacks = [c for c in trainer.callbacks if isinstance(c, WeightAveraging)]  # type: ignore[attr-defined]
    if len(callbacks) > 1:
        raise SetupError(
            f"expected at most one callback that averages weights, got {len(callbacks)}, but a checkpoint has one set"
            " of averages. Remove the others"
        )
    if callbacks:
        return ShardedWeightAverages(callbacks[0], trainer.strategy, average_tables)
    if average_tables:
        raise SetupError(
            "average_tables is True, but the trainer has no callback that averages weights. Add EMAWeightAveraging or"
            " WeightAveraging, or remove average_tables"
        )
    return None


class ShardedWeightAverages:
    """Averages of a sharded module's values, which Lightning's callback updates and puts into the module."""

    _sharded: ShardedModel | None = None

    def __init__(self, callback: WeightAveraging, strategy: Any, average_tables: bool) -> None:
        self._callback, self._average_tables = callback, average_tables
        self._shards: dict[tuple[str, int], Tensor] = {}  # of tables that are averaged
        replace_averaging_methods(callback, strategy)

    def start(self, sharded: ShardedModel, device: torch.device) -> None:
        """Create the averages, with the current values of the module."""
        self._sharded = sharded
        if self._average_tables:
            _check_tables_can_be_averaged(sharded)
            state = sharded.dmp.state_dict()
            for name in self._list_averaged_tables():
                self._shards |= {(name, index): shard.values for index, shard in enumerate(local_shards(state[name]))}

        def prepare(averaged_buffers: list[Tensor]) -> None:
            if self._shards and device.type == "cuda":
                torch.cuda.synchronize(device)  # a batch in flight may be looked up on another stream
            sharded.broadcast(averaged_buffers)

        parameters: dict[Any, Tensor] = {**dict(sharded.dense_parameters()), **self._shards}
        tensors = TrainedTensors(lambda: parameters, sharded.dense_buffers, prepare)
        start_averaging(self._callback, tensors, device)

    def discard_unless_of(self, sharded: ShardedModel) -> None:
        """Release the averages if they are those of another module, which the trainer has fitted before."""
        if self._sharded is not sharded:
            self._sharded = None
            discard_averages(self._callback)

    def _list_averaged_tables(self) -> list[str]:
        assert self._sharded is not None
        tables = self._sharded.tables.items() if self._average_tables else ()
        return [name for name, table in tables if not table.is_frozen]

    def add_to_checkpoint(self, checkpoint: dict[str, Any]) -> None:
        """Replace the weights in Lightning's dictionary by their averages, and add the trained weights."""
        if AVERAGING not in checkpoint:
            return  # with save_weights_only, Lightning saves the weights that the module has
        assert self._sharded is not None
        state, module = checkpoint["state_dict"], self._sharded.module
        averaged, trained = get_averages(self._callback)
        shared = [*module.named_parameters(remove_duplicate=False), *module.named_buffers(remove_duplicate=False)]
        first_names: dict[int, str] = {}
        checkpoint[TRAINED] = {}
        for name, tensor in shared:
            key = first_names.setdefault(id(tensor), name)
            if name in state and key in averaged:
                state[name], checkpoint[TRAINED][name] = averaged[key], trained[key]
        for name in self._list_averaged_tables():
            parts = [
                [value for key, value in values.items() if isinstance(key, tuple) and key[0] == name]
                for values in (averaged, trained)
            ]
            state[name], checkpoint[TRAINED][name] = (
                copy_sharded_tensor(state[name], values) if isinstance(state[name], ShardedTensor) else values[0]
                for values in parts
            )

    def load(self, read_trained_weights: Callable[[], None] | None, averaging_state: Any) -> None:
        """Take the module's weights, just read from a checkpoint, as averages, and read the trained weights.

        Args:
            read_trained_weights: function that reads them into the module; None to evaluate the averages.
            averaging_state: what the checkpoint has under that key, None if it was written without averages.
        """
        if self._sharded is None:
            return
        averaged, trained = get_averages(self._callback)
        with torch.no_grad():
            for key, value in trained.items():
                averaged[key].copy_(value)
        if read_trained_weights is None:
            return
        if averaging_state is None:
            rank_zero_warn(
                "the checkpoint was written without a callback that averages weights, so the averages begin with its"
                " weights"
            )
        else:
            set_number_of_averaged_steps(self._callback, averaging_state)
            read_trained_weights()


def _check_tables_can_be_averaged(sharded: ShardedModel) -> None:
    reasons = {
        name: reason
        for name, table in sharded.tables.items()
        for reason in [
            "dynamic, with its rows on disk" if table.is_dynamic else "",
            "of managed collision, whose rows change their ids" if table.maps_ids else "",
            "in a kernel with a cache of rows" if cached_tables(sharded.sharded_modules[table.module_name]) else "",
        ]
        if reason
    }
    if reasons or sharded.replicas is not None:
        described = [f"table {name} is {reason}" for name, reason in reasons.items()] or ["they have replicas"]
        raise SetupError(
            f"average_tables is True, but {'; '.join(described)}. Set it to False, which averages the dense part only"
        )
