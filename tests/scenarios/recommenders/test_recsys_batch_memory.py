"""Ids released early, in the strategy: a profile reads its batches again, and changes nothing."""

from __future__ import annotations

from functools import partial
from typing import Any

import torch
from lightning.pytorch.callbacks import Callback

from tests.recsys.batch_memory_cases import Copying
from tests.strategies.cases import Clicks, Pooled, collate, difference, fit, loader, recsys, state_of

copies = partial(loader, collate_fn=lambda rows: Copying(collate(rows)))


class Profiles(Callback):
    def on_train_batch_end(self, trainer: Any, pl_module: Any, outputs: Any, batch: Any, batch_idx: int) -> None:
        if trainer.global_step == 3:
            losses = len(pl_module.losses)
            trainer.strategy.profile(list(copies(8)), ["EmbInputDistStart", "DenseForward"], rounds=1, iterations=1)
            del pl_module.losses[losses:]


def trained(*callbacks: Callback) -> tuple[list[float], dict[str, torch.Tensor]]:
    module = Clicks(Pooled)
    used = fit(module, recsys(free_features_early=True), copies(), callbacks=list(callbacks))
    return module.losses, state_of(used)


def test_a_profile_in_the_middle_changes_nothing() -> None:
    (expected_losses, expected), (losses, state) = trained(), trained(Profiles())
    assert losses == expected_losses
    assert difference(state, expected) == []
