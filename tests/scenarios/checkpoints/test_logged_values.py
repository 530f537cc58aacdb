"""Rates, stops and best checkpoints that depend on logged values are those of the whole run, from every checkpoint."""

from __future__ import annotations

from collections.abc import Iterator
from itertools import product
from pathlib import Path
from typing import Any

import pytest

from tests.scenarios.checkpoints.monitoring import Noted, Setting, from_every_checkpoint
from tests.scenarios.checkpoints.resuming import BATCHES, EPOCHS, FAMILIES
from tests.scenarios.faults.forked_ranks import Here, Nursery, nursery, told
from tests.tiers import sampled_rows

EACH_STEP: dict[str, Any] = {"every_n_train_steps": 1}
AFTER_VALIDATION: dict[str, Any] = {"save_on_train_epoch_end": False}

SETTINGS = [
    Setting("plateau by step", "step", "followed_step", validates=0, saving=EACH_STEP),
    Setting("plateau by step on validation", "step", validates=2, saving=AFTER_VALIDATION, frequency=2),
    Setting("plateau by epoch", "epoch"),
    Setting("plateau by epoch on training", "epoch", "followed_epoch", validates=0, saving=EACH_STEP),
    Setting("plateau by epoch on a metric", "epoch", "seen", validates=2, saving=EACH_STEP),
    Setting("stop by training", stop="followed_epoch", saving=EACH_STEP),
    Setting("stop by validation in mid-epoch", stop="val_loss", validates=2, saving=AFTER_VALIDATION),
    Setting("stop by validation", "epoch", stop="val_loss", saving=AFTER_VALIDATION),
    Setting("best by training", "epoch", saving={"monitor": "followed_epoch", "filename": "{step}-{followed_epoch}"}),
    Setting(
        "best by validation",
        "step",
        validates=2,
        saving={"monitor": "val_loss", "filename": "{step}-{val_loss}"},
        frequency=2,
    ),
]


def check(setting: Setting, whole: Noted, found: dict[str, list[str]]) -> None:
    # Otherwise there is nothing to restore.
    assert len(set(whole.rates)) > 1 or setting.interval is None
    assert len(whole.rates) < EPOCHS * BATCHES or setting.stop is None
    assert len(found) >= 2
    differing = {name: differences for name, differences in found.items() if differences}
    assert not differing, "\n".join(f"from {name}: {what}" for name, what in differing.items())


@pytest.mark.parametrize("setting", SETTINGS, ids=str)
def test_from_every_checkpoint_on_one_rank(setting: Setting, tmp_path: Path) -> None:
    check(setting, *from_every_checkpoint(0, 1, "pipeline", setting, tmp_path))


@pytest.fixture(scope="module")
def ranks() -> Iterator[Nursery]:
    with nursery(["tests.scenarios.checkpoints.monitoring"]) as made:
        yield made


def continued(here: Here, family: str, setting: Setting) -> Any:
    return from_every_checkpoint(here.rank, here.world_size, family, setting, here.folder)


OFTEN = [
    ("recsys", 2, "plateau by step on validation"),
    ("llm", 2, "stop by validation"),
    ("in_process", 1, "stop by training"),
    ("pipeline", 2, "plateau by epoch on a metric"),
]
RUNS = [
    (family, world, setting)
    for family, setting, world in product(FAMILIES, SETTINGS, (1, 2))
    if world == 1 or family != "in_process"
]


@pytest.mark.parametrize(
    ("family", "world", "setting"),
    sampled_rows(RUNS, lambda run: (*run[:2], run[2].name) in OFTEN, "{0[0]}-{0[1]}-{0[2]}".format),
)
def test_from_every_checkpoint_of_each_family(family: str, world: int, setting: Setting, ranks: Nursery) -> None:
    ended = ranks.run(continued, world, family, setting)
    assert all(rank.code == 0 for rank in ended), told(ended)
    for rank in ended:
        check(setting, *rank.value)
