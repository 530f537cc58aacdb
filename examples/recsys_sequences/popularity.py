"""Baseline for the model: ranks the most frequently rated items first, for all users alike."""

from __future__ import annotations

import time

import lightning.pytorch as pl
import numpy as np
import torch

from examples.recsys_sequences.data import seen
from examples.recsys_sequences.histories import Histories, Part
from examples.recsys_sequences.ranking import AT, Score, gains


def training_counts(histories: Histories) -> torch.Tensor:
    """Number of ratings of each item in the training part, over whole histories, int64 [items]."""
    trained_on = np.concatenate([histories.item[histories.rows(user, "train")] for user in range(histories.users)])
    return torch.from_numpy(np.bincount(trained_on, minlength=histories.items))


def popularity(histories: Histories, part: Part) -> Score:
    """Score on *part* of ranking each user's unrated items by their number of training ratings."""
    users = range(histories.users)
    scores = training_counts(histories).expand(histories.users, -1)
    target = torch.tensor([histories.target(user, part) for user in users])
    hits, gained = gains(scores, target, torch.from_numpy(seen(histories, users, part)))
    return Score(hits.mean().item(), gained.mean().item())


class CompareWithPopularity(pl.Callback):
    """Prints the model's last scores and those of popularity on the same users, at the end of training."""

    def __init__(self) -> None:
        self._began = 0.0

    def on_train_start(self, trainer: pl.Trainer, pl_module: pl.LightningModule) -> None:
        self._began = time.perf_counter()

    def on_fit_end(self, trainer: pl.Trainer, pl_module: pl.LightningModule) -> None:
        metrics = trainer.callback_metrics
        if not trainer.is_global_zero:
            return
        if "test/hit_rate" not in metrics:
            print(
                "no score to compare with popularity, because no validation ran. For a run of few epochs, validate"
                " after each one: --trainer.check_val_every_n_epoch 1"
            )
            return
        # A trial run with few batches only ranks for the users in them.
        partly = "" if _evaluates_all(trainer) else "; the model was evaluated on some users only, so do not compare"
        seconds = time.perf_counter() - self._began
        histories: Histories = trainer.datamodule.histories  # type: ignore[attr-defined]
        print(f"\n{'':<28}{'validation':>22}{'test':>22}")
        print(f"{f'{histories.users} users':<28}" + f"{f'hit rate@{AT}':>13}{f'NDCG@{AT}':>9}" * 2)
        parts: tuple[Part, Part] = ("val", "test")
        model = [Score(metrics[f"{part}/hit_rate"].item(), metrics[f"{part}/ndcg"].item()) for part in parts]
        baseline = [popularity(histories, part) for part in parts]
        for name, scores in (("popularity", baseline), (type(pl_module).__name__, model)):
            print(f"{name:<28}" + "".join(f"{score.hit_rate:>13.4f}{score.ndcg:>9.4f}" for score in scores))
        print(f"trained in {seconds:.0f} s, evaluations included{partly}")


def _evaluates_all(trainer: pl.Trainer) -> bool:
    return not trainer.fast_dev_run and trainer.limit_val_batches == 1.0  # type: ignore[attr-defined]
