"""The guess to beat: what most people have rated, for everyone alike."""

from __future__ import annotations

import time

import lightning.pytorch as pl
import numpy as np
import torch

from examples.recsys_sequences.data import seen
from examples.recsys_sequences.histories import Histories, Part
from examples.recsys_sequences.ranking import AT, Score, gains


def training_counts(histories: Histories) -> torch.Tensor:
    """How often each item is rated in the training part, whole histories of it, int64 [items]."""
    trained_on = np.concatenate([histories.item[histories.rows(user, "train")] for user in range(histories.users)])
    return torch.from_numpy(np.bincount(trained_on, minlength=histories.items))


def popularity(histories: Histories, part: Part) -> Score:
    """What it scores on *part* to rank for every user the items not rated yet by their number of ratings."""
    users = range(histories.users)
    scores = training_counts(histories).expand(histories.users, -1)
    target = torch.tensor([histories.target(user, part) for user in users])
    hits, gained = gains(scores, target, torch.from_numpy(seen(histories, users, part)))
    return Score(hits.mean().item(), gained.mean().item())


class CompareWithPopularity(pl.Callback):
    """Prints, when training ends, the model's last scores beside those of popularity, on the same users."""

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
                "no score to compare with popularity: no validation ran. With few epochs, have one in each:"
                " --trainer.check_val_every_n_epoch 1"
            )
            return
        # A trial of some batches ranks for those users only.
        partly = "" if _evaluates_all(trainer) else "; the model: only some of them, so do not compare"
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
