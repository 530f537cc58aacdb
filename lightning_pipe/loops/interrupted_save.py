"""Checkpoints after an error. They need all ranks, so they are skipped if only some ranks were interrupted."""

from __future__ import annotations

import functools
import itertools
import sys
import threading
from datetime import timedelta
from typing import Any

import lightning.pytorch as pl
import torch.distributed as dist
from lightning.pytorch.utilities.rank_zero import rank_zero_warn

from lightning_pipe._compat.lightning import teardown_trainer
from lightning_pipe._compat.torch import get_default_process_group_store

# An error or a signal that all ranks receive reaches them within less than this time.
_WAIT = timedelta(seconds=5)
_KEY = "lightning_pipe/interrupted"
_ALL, _LEFT = "all", "left"
# Numbers the trainers of a process, whose ranks share a store.
_trainers = itertools.count()


def install_all_ranks_save_check(trainer: pl.Trainer) -> None:
    """Make ``trainer.save_checkpoint`` check, after an error, that every rank has called it.

    A single rank would wait in the collectives of the save, while the other ranks wait for it in collectives of
    training. If a rank does not call it within 5 s, no checkpoint is written, training is torn down, and the original
    error is raised immediately, with a note. Later callbacks do not run, because they may need all ranks, too. Before
    the first batch, no checkpoint is written either.
    """
    if "save_checkpoint" in vars(trainer):
        return
    save = trainer.save_checkpoint
    trainer_key, saves = f"{_KEY}/{next(_trainers)}", itertools.count()

    @functools.wraps(save)
    def save_if_all_come(*args: Any, **kwargs: Any) -> None:
        if trainer.interrupted and not trainer.fit_loop.epoch_loop.batch_progress.total.ready:
            # An error in the set-up. A save would replace the checkpoint that this run reads by initial values.
            rank_zero_warn("no checkpoint was written after this error, because training had not begun")
            return
        if trainer.interrupted and trainer.world_size > 1 and dist.is_initialized():
            key, store = f"{trainer_key}/{next(saves)}", get_default_process_group_store()
            error = sys.exc_info()[1]
            if error is not None and not _wait_for_all_ranks(store, key, trainer.global_rank, trainer.world_size):
                error.add_note(
                    "no checkpoint was written after this error, because a save needs all ranks and other ranks did not"
                    f" start it within {_WAIT.total_seconds():g} s. Resume from the previous checkpoint, which is"
                    " complete"
                )
                trainer.strategy.on_exception(error)
                teardown_trainer(trainer)
                raise error
        save(*args, **kwargs)

    trainer.save_checkpoint = save_if_all_come  # type: ignore[method-assign]


def _wait_for_all_ranks(store: dist.Store, key: str, rank: int, world_size: int) -> bool:
    """Return True if every rank calls this within ``_WAIT``. Uses the store: other ranks may be in a collective."""
    answers: list[bool] = []
    # The store's own timeout does not hold if the node that hosts it is gone and no connection was closed.
    asks = threading.Thread(
        target=lambda: answers.append(_agree_whether_all_ranks_arrived(store, key, rank, world_size)),
        name="asks who saves",
        daemon=True,
    )
    asks.start()
    asks.join(3 * _WAIT.total_seconds())
    return answers == [True]


def _agree_whether_all_ranks_arrived(store: dist.Store, key: str, rank: int, world_size: int) -> bool:
    try:
        store.set(f"{key}/{rank}", "")
        try:
            store.wait([f"{key}/{peer}" for peer in range(world_size)], _WAIT)
            outcome = _ALL
        except dist.DistError:
            outcome = _LEFT
        # The last rank may arrive just after another rank has stopped waiting: the first answer holds for all ranks.
        answer = store.compare_set(f"{key}/answer", "", outcome)
    except dist.DistError:
        return False  # the rank that hosts the store has ended
    return bool(answer == _ALL.encode())
