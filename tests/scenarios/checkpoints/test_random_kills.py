"""A run in which one rank is killed again and again, at random moments, ends where an undisturbed run ends, to the bit.

Each time it continues from the newest checkpoint there is, as a job does that a cluster starts again. A kill comes a
random share of a step after a random batch has begun: before, in or after a write, or while others write.
LIGHTNING_PIPE_KILL_SEED gives another seed.
"""

from __future__ import annotations

import os
import random
import signal
import threading
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import lightning.pytorch as pl
import pytest
import torch
from lightning.pytorch.callbacks import Callback, ModelCheckpoint

from tests.scenarios.checkpoints.resuming import BATCHES, EPOCHS, Noted, Setting, run
from tests.scenarios.faults.forked_ranks import Ended, Here, Nursery, nursery, told

pytestmark = pytest.mark.exhaustive

# For hangs.
TIMEOUT = 900.0
KILLS = 5
SEED = int(os.environ.get("LIGHTNING_PIPE_KILL_SEED", "1"))

FEW = [
    (Setting("recsys", "1 worker", validates=2), 2),
    (Setting("pipeline", "2 persistent workers", validates=2, reloads=1), 2),
    (Setting("llm", "1 worker", validates=2), 2),
]


class Dies(Callback):
    """Kills this process a while after a batch has begun, that is trained so many batches after the run has."""

    def __init__(self, after: int, share: float) -> None:
        self.after, self.share, self.begun = after, share, 0
        self.times: list[float] = []

    def on_train_batch_start(self, trainer: pl.Trainer, module: Any, batch: Any, batch_idx: int) -> None:
        self.times.append(time.monotonic())
        if self.begun == self.after:
            steps = [late - early for early, late in zip(self.times, self.times[1:], strict=False)]
            delay = self.share * max(steps, default=0.1)
            threading.Thread(target=self._die, args=(delay,), daemon=True).start()
        self.begun += 1

    def _die(self, delay: float) -> None:
        time.sleep(delay)  # the moment is what is tested
        os.kill(os.getpid(), signal.SIGKILL)


class Tells(Callback):
    """Writes which step the checkpoint that a run continues from is of."""

    def __init__(self, path: Path) -> None:
        self.path = path

    def on_train_start(self, trainer: pl.Trainer, module: Any) -> None:
        self.path.write_text(str(trainer.global_step))


def undisturbed(here: Here, setting: Setting) -> Noted:
    return run(setting, here.world_size, 1)


def attempt(here: Here, setting: Setting, kept: Path, seed: int, dies: tuple[int, int, float] | None) -> Noted:
    """Train from the newest checkpoint on, or from the beginning where there is none."""
    saves = ModelCheckpoint(
        kept, every_n_train_steps=1, save_top_k=-1, save_on_train_epoch_end=False, filename="{step}"
    )
    callbacks: list[Callback] = [saves, Tells(here.folder / f"begun_{here.rank}")]
    if dies is not None and dies[0] == here.rank:
        callbacks.append(Dies(*dies[1:]))
    found = list(kept.glob("*.ckpt")) if kept.is_dir() else []
    newest = max(found, key=lambda path: int(path.stem.removeprefix("step=")), default=None)
    noted = run(
        setting,
        here.world_size,
        # What no checkpoint was written of begins as the undisturbed run did.
        1 if newest is None else seed,
        ckpt_path=newest,
        enable_checkpointing=True,
        callbacks=callbacks,
    )
    noted.saved = {"begun": int((here.folder / f"begun_{here.rank}").read_text())}
    return noted


@pytest.fixture(scope="module")
def ranks() -> Iterator[Nursery]:
    with nursery(["tests.scenarios.checkpoints.resuming"]) as made:
        yield made


def check(ranks: Nursery, setting: Setting, world: int, folder: Path) -> None:
    drawn = random.Random(f"{setting} {world} {SEED}")
    whole = ranks.run(undisturbed, world, setting, timeout=TIMEOUT)
    assert all(one.code == 0 for one in whole), told(whole)
    kept = folder / "kept"
    for number in range(KILLS):
        # Two batches between kills, or fewer, so that the run is not over before the last of them.
        dies = drawn.randrange(world), drawn.randrange(3), drawn.random() * 1.5
        ended = ranks.run(attempt, world, setting, kept, 100 + number, dies, timeout=TIMEOUT)
        assert ended[dies[0]].code in (-signal.SIGKILL, 0), told(ended)
        assert all(one.code is not None for one in ended), told(ended)  # none hangs
        # When the last checkpoint is written, a rank that dies while it ends leaves the others to end well.
        trained = (kept / f"step={EPOCHS * BATCHES}.ckpt").exists()
        assert trained or sum(one.code == 0 for one in ended) in (0, world), told(ended)
    last = ranks.run(attempt, world, setting, kept, 200, None, timeout=TIMEOUT)
    assert all(one.code == 0 for one in last), told(last)
    _same_end(whole, last)


def _same_end(whole: list[Ended], last: list[Ended]) -> None:
    for rank, (one, other) in enumerate(zip(whole, last, strict=True)):
        expected, found = one.value, other.value
        begun = found.saved["begun"]
        assert found.samples == expected.samples[begun:], f"rank {rank}, from step {begun}"
        assert found.losses == expected.losses[begun:], f"rank {rank}, from step {begun}"
        assert expected.final.keys() == found.final.keys()
        for name, value in expected.final.items():
            assert torch.equal(found.final[name], value), f"rank {rank}: {name}"
        assert len(expected.samples) == EPOCHS * BATCHES


@pytest.mark.parametrize(("setting", "world"), FEW, ids=str)
def test_a_run_killed_five_times_ends_where_it_would_have(
    setting: Setting, world: int, ranks: Nursery, tmp_path: Path
) -> None:
    check(ranks, setting, world, tmp_path)
