"""Checkpoints on the way out of an error, which take all ranks: where only some were interrupted, none is written."""

from __future__ import annotations

import functools
import sys
from contextlib import suppress
from datetime import timedelta
from typing import Any

import lightning.pytorch as pl
import torch.distributed as dist

__all__ = ["install_interrupted_saves"]

# An error that all ranks raise together, and a signal that all get, reach them within less.
_WAIT = timedelta(seconds=5)
_KEY = "lightning_pipe/interrupted"


def install_interrupted_saves(trainer: pl.Trainer) -> None:
    """Let ``trainer.save_checkpoint`` see, after an error, that every rank has come to it.

    A rank alone would wait in the save's collectives, while the others wait for it in those of training. Where a rank
    does not come in 5 s, nothing is written, training is torn down, and the error that was on its way is raised at
    once, with a note: what the callbacks would do next may take all ranks, too.
    """
    if "save_checkpoint" in vars(trainer):
        return
    save = trainer.save_checkpoint
    saves = 0

    @functools.wraps(save)
    def save_if_all_come(*args: Any, **kwargs: Any) -> None:
        nonlocal saves
        if trainer.interrupted and trainer.world_size > 1 and dist.is_initialized():
            saves += 1
            error = sys.exc_info()[1]
            if error is not None and not _all_come(f"{_KEY}/{saves}", trainer.global_rank, trainer.world_size):
                error.add_note(
                    "no checkpoint was written on the way out: it takes all ranks, and others did not come to it in"
                    f" {_WAIT.total_seconds():g} s; the last one that was written is whole"
                )
                trainer.strategy.on_exception(error)
                trainer._teardown()
                raise error
        save(*args, **kwargs)

    trainer.save_checkpoint = save_if_all_come  # type: ignore[method-assign]


def _all_come(key: str, rank: int, world_size: int) -> bool:
    """Whether every rank calls this at about the same time; no collective, since others may be in the middle of one."""
    store = dist.distributed_c10d._get_default_store()
    try:
        store.set(f"{key}/{rank}", "")
        if store.check([f"{key}/left"]):
            return False  # another one has waited for this one
        store.wait([f"{key}/{other}" for other in range(world_size)], _WAIT)
        return not store.check([f"{key}/left"])
    except dist.DistError:
        # Too late, or the store has ended with its rank: who comes now need not wait.
        with suppress(dist.DistError):
            store.set(f"{key}/left", "")
        return False
