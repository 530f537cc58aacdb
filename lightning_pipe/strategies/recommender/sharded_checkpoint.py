"""Checkpoints of a sharded model: a folder with the tables' shards and the state of their fused optimisers.

What Lightning keeps beside them (loops, callbacks, dense optimisers) is the same on every rank; rank 0's is written.
"""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch.distributed as dist
from lightning.pytorch.trainer.states import TrainerFn

from lightning_pipe.checkpoints.folder_reading import fill_from_folder, misfits, read_metadata, read_rest
from lightning_pipe.checkpoints.folder_writing import DYNAMIC_ROWS, WriteFolder, write_folder
from lightning_pipe.engine import SetupError
from lightning_pipe.engine.ranks.together import on_all_ranks
from lightning_pipe.recsys.sharding.shard import ShardedModel
from lightning_pipe.recsys.tasks.table_rates import TableRates
from lightning_pipe.strategies.checkpoint_contents import checked_contents
from lightning_pipe.strategies.checkpoint_folder import FolderCheckpointStrategy

_KIND = "under a recsys plan. Give the path of one, or load the module's state before it is sharded"
_FIX = "Build the module, and shard its tables, as when it was written"


def save_sharded_checkpoint(
    checkpoint: dict[str, Any], path: str | Path, sharded: ShardedModel, write: WriteFolder = write_folder
) -> None:
    """Write *checkpoint*, as Lightning made it, to the folder *path*; every rank calls this.

    Args:
        checkpoint: Lightning's dictionary, its ``state_dict`` holding this rank's shards. Without states of optimisers
            (``save_weights_only``), those of the tables are left out too.
        path: the same on every rank, which all ranks can write to. What is there is replaced.
        sharded: the model, for the state of the tables' optimisers.
        write: writes the folder, at once or in the background.

    Raises:
        SetupError: on every rank, if any cannot write; what was there before is as it was.
    """
    sharded.sync_replicas()  # in place, so what the dictionary holds is averaged too
    rest = {key: value for key, value in checkpoint.items() if key != "state_dict"}
    state = {"model": sharded.without_dynamic(checkpoint["state_dict"])}
    if "optimizer_states" in checkpoint:
        state["tables"] = _table_states(sharded)
    if sharded.dynamic_rows:
        rest[DYNAMIC_ROWS] = sharded.commit_rows()
    write(path, state, rest, sharded.write_rows if sharded.dynamic_rows else None)


def load_sharded_checkpoint(
    path: str | Path,
    sharded: ShardedModel,
    *,
    with_optimizers: bool,
    strict: bool = True,
    weights_only: bool | None = None,
) -> dict[str, Any]:
    """Fill the model, and its tables' optimisers, from the folder *path*; every rank calls this.

    Args:
        path: what :func:`save_sharded_checkpoint` wrote.
        sharded: the model, sharded in whatever way.
        with_optimizers: whether to load the state of the tables' optimisers too, where the checkpoint has them. That of
            rows of dynamic tables is always loaded with them.
        strict: whether the checkpoint must hold everything that the model does.
        weights_only: False to allow any class in what is no tensor, whose code runs then.

    Returns:
        The rest of Lightning's dictionary, its ``state_dict`` empty.

    Raises:
        SetupError: on every rank, if any finds no such folder, the checkpoint is of another model, or damaged.
    """
    folder = Path(path)
    saved, rest = on_all_ranks(
        lambda: (read_metadata(folder, ("model",), _KIND), read_rest(folder, weights_only)),
        f"the checkpoint {str(folder)!r} cannot be read",
        dist.group.WORLD,
    )
    state: dict[str, Any] = {"model": sharded.without_dynamic(sharded.dmp.state_dict())}
    if with_optimizers and "optimizer_states" in rest:
        state["tables"] = _table_states(sharded)
    problems = misfits(saved, state, strict)
    if problems:
        raise SetupError(f"the checkpoint {str(folder)!r} does not fit the module: {'; '.join(problems)}. {_FIX}")
    fill_from_folder(folder, saved, state, strict=strict, weights_only=weights_only, fix=_FIX)
    if sharded.replicas is not None:
        sharded.replicas.steps = 0  # each has read the same
    sharded.dmp.load_state_dict({**sharded.dmp.state_dict(), **state["model"]})
    if "tables" in state:
        present = sharded.fused_optimizer.state_dict()
        sharded.fused_optimizer.load_state_dict({**present, "state": {**present["state"], **state["tables"]["state"]}})
    if sharded.dynamic_rows:
        # With states for an evaluation, too: rows are committed, and who trains on from the store wants them whole.
        sharded.read_rows(folder, rest.pop(DYNAMIC_ROWS, None), with_optimizers="optimizer_states" in rest)
    return {**rest, "state_dict": {}}


def _table_states(sharded: ShardedModel) -> dict[str, Any]:
    """Of the tables' optimisers, but for those of dynamic tables, which are part of their rows."""
    state = sharded.fused_optimizer.state_dict()
    return {**state, "state": sharded.without_dynamic(state["state"])}


class ShardedCheckpointStrategy(FolderCheckpointStrategy):
    """What a strategy for sharded tables saves and loads; what it trains is for its subclass.

    Args:
        arguments: of :class:`~lightning_pipe.strategies.checkpoint_folder.FolderCheckpointStrategy`.
    """

    def __init__(self, **arguments: Any) -> None:
        super().__init__(**arguments)
        self._sharded: ShardedModel | None = None
        self._rates: TableRates | None = None  # of the last training

    @property
    def sharded_model(self) -> ShardedModel:
        """The sharded module, its tables and their optimisers; there once the trainer has set the strategy up."""
        if self._sharded is None:
            raise SetupError("the model is not sharded yet; Trainer.fit, validate, test or predict shards it")
        return self._sharded

    def save_checkpoint(self, checkpoint: dict[str, Any], filepath: str | Path, storage_options: Any = None) -> None:
        """Write a folder that every rank writes its own shards into (``torch.distributed.checkpoint``)."""
        path = self._agreed_path(filepath, storage_options)
        if self._rates is not None and self._rates.schedule is not None:
            checkpoint["sparse_lr_scheduler"] = self._rates.schedule.state_dict()
        self.sharded_model.share_buffers()  # the state dict holds the buffers themselves
        save_sharded_checkpoint(checkpoint, path, self.sharded_model, self._write_folder)

    def load_checkpoint(self, checkpoint_path: str | Path, weights_only: bool | None = None) -> dict[str, Any]:
        """Read a folder that :meth:`save_checkpoint` wrote, on any number of ranks."""
        module = self.lightning_module
        assert module is not None
        fitting = module.trainer.state.fn == TrainerFn.FITTING
        checkpoint = load_sharded_checkpoint(
            checkpoint_path,
            self.sharded_model,
            with_optimizers=fitting,
            strict=module.strict_loading,
            weights_only=self._allowed(weights_only),
        )
        schedule = None if self._rates is None else self._rates.schedule
        if fitting and schedule is not None and "sparse_lr_scheduler" in checkpoint:
            schedule.load_state_dict(checkpoint["sparse_lr_scheduler"])
        return checked_contents(checkpoint, checkpoint_path, module)

    def lightning_module_state_dict(self) -> dict[str, Any]:
        return self.sharded_model.without_dynamic(self.sharded_model.dmp.state_dict())

    def load_model_state_dict(self, checkpoint: Mapping[str, Any], strict: bool = True) -> None:
        """Nothing is left to do: :meth:`load_checkpoint` has filled the module's own tensors."""
