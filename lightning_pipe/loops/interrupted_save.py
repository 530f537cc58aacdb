"""Checkpoints on the way out of an error, which take all ranks: where only some were interrupted, none is written."""

from __future__ import annotations

import functools
import itertools
import sys
from datetime import timedelta
from typing import Any

import lightning.pytorch as pl
import torch.distributed as dist

from lightning_pipe._compat.torch import default_store

__all__ = ["install_interrupted_saves"]

# An error that all ranks raise together, and a signal that all get, reach them within less.
_WAIT = timedelta(seconds=5)
_KEY = "lightning_pipe/interrupted"
_ALL, _LEFT = "all", "left"
# Trainers of one process, whose ranks share a store.
_trainers = itertools.count()


def install_interrupted_saves(trainer: pl.Trainer) -> None:
    """Let ``trainer.save_checkpoint`` see, after an error, that every rank has come to it.

    A rank alone would wait in the save's collectives, while the others wait for it in those of training. Where a rank
    does not come in 5 s, nothing is written, training is torn down, and the error that was on its way is raised at
    once, with a note: what the callbacks would do next may take all ranks, too.
    """
    if "save_checkpoint" in vars(trainer):
        return
    save = trainer.save_checkpoint
    trainer_key, saves = f"{_KEY}/{next(_trainers)}", itertools.count()

    @functools.wraps(save)
    def save_if_all_come(*args: Any, **kwargs: Any) -> None:
        if trainer.interrupted and trainer.world_size > 1 and dist.is_initialized():
            key, store = f"{trainer_key}/{next(saves)}", default_store()
            error = sys.exc_info()[1]
            if error is not None and not _all_come(store, key, trainer.global_rank, trainer.world_size):
                error.add_note(
                    "no checkpoint was written on the way out: it takes all ranks, and others did not come to it in"
                    f" {_WAIT.total_seconds():g} s; the last one that was written is whole"
                )
                trainer.strategy.on_exception(error)
                trainer._teardown()
                raise error
        save(*args, **kwargs)

    trainer.save_checkpoint = save_if_all_come  # type: ignore[method-assign]


def _all_come(store: dist.Store, key: str, rank: int, world_size: int) -> bool:
    """Whether every rank calls this at about the same time; no collective, since others may be in the middle of one."""
    try:
        store.set(f"{key}/{rank}", "")
        try:
            store.wait([f"{key}/{other}" for other in range(world_size)], _WAIT)
            found = _ALL
        except dist.DistError:
            found = _LEFT
        # The last rank may come just after another one has stopped waiting: the first answer holds for all ranks.
        answer = store.compare_set(f"{key}/answer", "", found)
    except dist.DistError:
        return False  # the store has ended with its rank
    return bool(answer == _ALL.encode())
