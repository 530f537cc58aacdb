"""Ids released early, in the strategy: training and evaluation are the same to the bit.

One spawn of two ranks runs every case; each test looks at one of them.
"""

from __future__ import annotations

from functools import partial
from typing import Any

import pytest
import torch
from lightning.pytorch.callbacks import Callback

from tests.distributed import run_ranks
from tests.recsys.batch_memory_cases import Copying
from tests.strategies.cases import (
    Clicks,
    Memory,
    Mixed,
    Pooled,
    collate,
    difference,
    fit,
    loader,
    predictions,
    recsys,
    state_of,
)

KINDS = {"people": "row_wise", "things": "table_wise", "tags": "column_wise"}
EARLY: dict[str, Any] = {"free_features_early": True}
# Options of the trainer, and plans.
CASES: dict[str, tuple[dict[str, Any], tuple[str, ...]]] = {
    "as it is": ({}, ("threaded_input", "fused_sparse_dist")),
    "accumulation": ({"accumulate_grad_batches": 2}, ("prefetch",)),
    "clipping": ({"gradient_clip_val": 0.05}, ("base",)),
}
CELLS = [(name, plan) for name, (_, plans) in CASES.items() for plan in plans]


copies = partial(loader, collate_fn=lambda rows: Copying(collate(rows)))


def trained(plan: str, options: dict[str, Any], **memory: Any) -> dict[str, Any]:
    module, logger = Clicks(Mixed), Memory()
    strategy = recsys(plan, KINDS, **memory)
    used = fit(module, strategy, copies(), copies(16), logger=logger, max_epochs=2, **options)
    state = state_of(used)
    return {
        "losses": module.losses,
        "logged": logger.lines,
        "state": state,
        "predicted": predictions(used, module, copies(16)),
    }


class Profiles(Callback):
    def on_train_batch_end(self, trainer: Any, pl_module: Any, outputs: Any, batch: Any, batch_idx: int) -> None:
        if trainer.global_step == 3:
            self.losses = len(pl_module.losses)
            trainer.strategy.profile(list(copies(8)), ["EmbInputDistStart", "DenseForward"], rounds=1, iterations=1)
            del pl_module.losses[self.losses :]


def profiled(**options: Any) -> tuple[list[float], dict[str, torch.Tensor]]:
    module = Clicks(Pooled)
    return module.losses, state_of(fit(module, recsys(**EARLY), copies(), **options))


def on_two_ranks(rank: int, world_size: int) -> dict[str, Any]:
    return {
        "plain": {name: trained("serial", options) for name, (options, _) in CASES.items()},
        "trained": {(name, plan): trained(plan, CASES[name][0], **EARLY) for name, plan in CELLS},
        "profiled": [profiled(), profiled(callbacks=[Profiles()])],
    }


@pytest.fixture(scope="module")
def ranks() -> list[dict[str, Any]]:
    return run_ranks(on_two_ranks, 2)


@pytest.mark.parametrize(("name", "plan"), CELLS)
def test_training_logging_validation_and_prediction_are_the_same_to_the_bit(
    ranks: list[dict[str, Any]], name: str, plan: str
) -> None:
    for of_rank in ranks:
        expected, found = of_rank["plain"][name], of_rank["trained"][name, plan]
        assert len(found["losses"]) == 6
        assert found["losses"] == expected["losses"]
        assert found["logged"] == expected["logged"]
        assert difference(found["state"], expected["state"]) == []
        assert torch.equal(found["predicted"], expected["predicted"])


def test_a_profile_in_the_middle_changes_nothing(ranks: list[dict[str, Any]]) -> None:
    for of_rank in ranks:
        (expected_losses, expected), (losses, state) = of_rank["profiled"]
        assert losses == expected_losses
        assert difference(state, expected) == []
