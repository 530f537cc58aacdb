"""Checkpoints and plans that an earlier version wrote are read to the bit (``kept_files.py`` writes them)."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import lightning.pytorch as pl
import pytest
import torch
from lightning.pytorch.callbacks import Callback

from lightning_pipe.recsys import PLANS, recsys_plan, recsys_tasks
from tests.distributed import run_ranks
from tests.scenarios.checkpoints.kept_files import KINDS, STEP, state_of
from tests.scenarios.faults.training import fit, module
from tests.strategies.cases import difference

KEPT = Path(__file__).parent / "kept"
VERSIONS = sorted(path.name for path in KEPT.iterdir())


class Loaded(Callback):
    def __init__(self, kind: str) -> None:
        self._kind = kind
        self.values: dict[str, torch.Tensor] = {}
        self.steps: list[int] = []

    def on_train_start(self, trainer: pl.Trainer, pl_module: pl.LightningModule) -> None:
        self.values = state_of(trainer, self._kind)

    def on_train_batch_end(self, trainer: pl.Trainer, *args: Any) -> None:
        self.steps.append(trainer.global_step)


def resume(rank: int, world_size: int, folder: Path) -> dict[str, Any]:
    found = {}
    for kind in KINDS:
        loaded = Loaded(kind)
        fit(kind, world_size, module(kind), ckpt_path=folder / kind / "checkpoint", callbacks=[loaded])
        kept = torch.load(folder / kind / f"values_{rank}.pt")
        found[kind] = len(kept), difference(loaded.values, kept), loaded.steps
    return found


@pytest.mark.parametrize("version", VERSIONS)
def test_training_goes_on_from_a_checkpoint_of_an_earlier_version(version: str) -> None:
    for of_rank in run_ranks(resume, 2, KEPT / version):
        for kind, (count, differing, steps) in of_rank.items():
            assert count > 0, kind
            assert differing == [], kind
            assert steps == [STEP + 1, STEP + 2, STEP + 3], kind


@pytest.mark.parametrize("version", VERSIONS)
def test_a_plan_that_an_earlier_version_wrote_is_the_same_plan(version: str) -> None:
    files = sorted((KEPT / version).glob("*.yaml"))
    assert files
    for path in files:
        plan = recsys_plan(path, recsys_tasks())
        assert plan.to_yaml() == path.read_text()
        if path.stem in PLANS:
            assert plan.description() == recsys_plan(path.stem, recsys_tasks()).description()
