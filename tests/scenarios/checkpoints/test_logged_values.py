"""Rates, stops and best checkpoints that depend on logged values are those of the whole run, from every checkpoint."""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import lightning.pytorch as pl
import numpy as np
import pytest
import torch
from lightning.pytorch.callbacks import Callback, EarlyStopping, ModelCheckpoint, OnExceptionCheckpoint
from lightning.pytorch.utilities.exceptions import SIGTERMException
from torch import Tensor

from lightning_pipe.engine import SetupError
from tests.distributed import run_ranks
from tests.loops.models import Net, trainer
from tests.scenarios.checkpoints.monitoring import Noted, Setting, from_every_checkpoint
from tests.scenarios.checkpoints.resuming import BATCHES, EPOCHS, FAMILIES
from tests.scenarios.faults.forked_ranks import Here, Nursery, nursery, told
from tests.tiers import sampled, sampled_rows

EACH_STEP: dict[str, Any] = {"every_n_train_steps": 1}
AFTER_VALIDATION: dict[str, Any] = {"save_on_train_epoch_end": False}

SETTINGS = [
    Setting("plateau by step", "step", "followed_step", validates=0, saving=EACH_STEP),
    Setting("plateau by step on validation", "step", validates=2, saving=AFTER_VALIDATION, frequency=2),
    Setting("plateau by epoch on a metric", "epoch", "seen", validates=2, saving=EACH_STEP),
    Setting("stop by training", stop="followed_epoch", saving=EACH_STEP),
    Setting("stop by validation in mid-epoch", stop="val_loss", validates=2, saving=AFTER_VALIDATION),
    Setting("stop by validation", "epoch", stop="val_loss", saving=AFTER_VALIDATION),
    Setting(
        "best by validation",
        "step",
        validates=2,
        saving={"monitor": "val_loss", "filename": "{step}-{val_loss}"},
        frequency=2,
    ),
    Setting(
        "plateau by step of two batches",
        "step",
        "followed_step",
        validates=2,
        saving=AFTER_VALIDATION,
        options={"accumulate_grad_batches": 2},
    ),
    Setting("plateau by epoch of one step", "epoch", saving=EACH_STEP, options={"accumulate_grad_batches": BATCHES}),
    Setting(
        "plateau with a limit of steps",
        "epoch",
        validates=2,
        saving=EACH_STEP,
        options={"max_steps": 2 * BATCHES + 2, "max_epochs": -1},
    ),
    Setting(
        "best by a save that waits for a validation",
        "step",
        validates=1,
        saving={"monitor": "val_loss", "filename": "{step}-{val_loss}", **AFTER_VALIDATION, "every_n_train_steps": 4},
    ),
    Setting(
        "best by a validation after the checkpoint",
        "step",
        "followed_step",
        saving=EACH_STEP,
        best={"monitor": "val_loss", "filename": "{step}-{val_loss}", **AFTER_VALIDATION, "every_n_train_steps": 2},
    ),
]

# The family and number of ranks of a setting that `make test` runs, if not `pipeline` on one rank.
QUICK = {
    "plateau by step on validation": ("recsys", 2),
    "stop by validation": ("llm", 2),
    "stop by training": ("in_process", 1),
    "plateau by epoch on a metric": ("pipeline", 2),
}
RUNS = [
    (family, world, setting)
    for family, world in itertools.product(FAMILIES, (1, 2))
    if (family, world) != ("in_process", 2)  # has one rank
    for setting in SETTINGS
]


def is_quick(run: tuple[str, int, Setting]) -> bool:
    family, world, setting = run
    return (family, world) == QUICK.get(setting.name, ("pipeline", 1))


def check(setting: Setting, whole: Noted, found: dict[str, list[str]]) -> None:
    # Otherwise there is nothing to restore.
    assert len(set(whole.rates)) > 1 or setting.interval is None
    assert len(whole.rates) < EPOCHS * BATCHES or setting.stop is None
    assert len(found) >= 2
    differing = {name: differences for name, differences in found.items() if differences}
    assert not differing, "\n".join(f"from {name}: {what}" for name, what in differing.items())


@pytest.fixture(scope="module")
def ranks() -> Iterator[Nursery]:
    with nursery(["tests.scenarios.checkpoints.monitoring"]) as made:
        yield made


def continued(here: Here, family: str, setting: Setting) -> Any:
    return from_every_checkpoint(here.rank, here.world_size, family, setting, here.folder)


@pytest.mark.parametrize(
    ("family", "world", "setting"), sampled_rows(RUNS, is_quick, lambda run: "-".join(map(str, run)))
)
def test_from_every_checkpoint(family: str, world: int, setting: Setting, ranks: Nursery) -> None:
    ended = ranks.run(continued, world, family, setting)
    assert all(rank.code == 0 for rank in ended), told(ended)
    for rank in ended:
        check(setting, *rank.value)


class Plateau(Net):
    """Halves its rate at each step of the scheduler."""

    def __init__(self, every: int = 1, interval: str = "epoch", monitor: str = "val_loss", **logs: Any) -> None:
        super().__init__()
        self.rule, self.logs = {"interval": interval, "frequency": every, "monitor": monitor}, logs
        self.rates: list[float] = []
        self.means: list[float] = []

    def log(self, name: str, value: Any, **options: Any) -> None:  # type: ignore[override]
        super().log(name, value, **options, **(self.logs if name == "train_loss" else {}))

    def training_step(self, batch: Tensor, batch_idx: int) -> Tensor:
        self.rates.append(self.optimizers().param_groups[0]["lr"])  # type: ignore[union-attr]
        return super().training_step(batch, batch_idx)

    def on_train_epoch_end(self) -> None:
        self.means.append(float(self.trainer.callback_metrics["train_loss_epoch"]))

    def configure_optimizers(self) -> Any:
        optimizer = torch.optim.Adam(self.parameters(), lr=0.5)
        scheduler = torch.optim.lr_scheduler.ReduceLROnPlateau(optimizer, factor=0.5, patience=-1)
        return {"optimizer": optimizer, "lr_scheduler": {"scheduler": scheduler, **self.rule}}


def fitted(
    *callbacks: Callback, start: Path | None = None, rule: dict[str, Any] | None = None, **options: Any
) -> Plateau:
    """A module after three epochs of six batches, with *rule* as its arguments."""
    pl.seed_everything(3 if start is None else 99)
    module = Plateau(**(rule or {}))
    used = trainer(strategy="pipeline", callbacks=list(callbacks), **{"max_epochs": 3, "devices": 1, **options})
    used.fit(module, ckpt_path=start, weights_only=None if start is None else True)
    return module


class At(Callback):
    """Calls a function in a hook, once, after a number of batches of this run."""

    def __init__(self, hook: str, batches: int, function: Callable[[pl.Trainer], None]) -> None:
        self.batches, self.function, self.called = batches, function, False
        setattr(self, hook, self._call)

    def _call(self, used: pl.Trainer, module: Any, *args: Any) -> None:
        if not self.called and len(module.losses) == self.batches and not used.sanity_checking:
            self.called = True
            self.function(used)


def saved_at(path: Path, hook: str, batches: int, **options: Any) -> Path:
    """The checkpoint that a run writes in a hook."""
    fitted(At(hook, batches, lambda used: used.save_checkpoint(path)), **options)
    return path


EVERY_OTHER: dict[str, Any] = {"val_check_interval": 2, "rule": {"every": 2, "interval": "step"}}


@pytest.mark.parametrize(("hook", "done"), [("on_before_optimizer_step", 3), ("on_train_batch_start", 4)])
def test_a_batch_that_a_resumed_run_trains_again_counts_once_in_the_mean_of_the_epoch(
    hook: str, done: int, tmp_path: Path
) -> None:
    whole = fitted(**EVERY_OTHER)
    start = saved_at(tmp_path / "a.ckpt", hook, 4, **EVERY_OTHER)
    rest = fitted(start=start, **EVERY_OTHER)
    assert (rest.rates, rest.losses, rest.means) == (whole.rates[done:], whole.losses[done:], whole.means)
    # So it is from a checkpoint that the resumed run writes before its first batch.
    again = saved_at(tmp_path / "b.ckpt", "on_train_start", 0, start=start, **EVERY_OTHER)
    rest = fitted(start=again, **EVERY_OTHER)
    assert (rest.rates, rest.losses, rest.means) == (whole.rates[done:], whole.losses[done:], whole.means)


@pytest.mark.parametrize("hook", ["on_train_batch_end", "on_validation_end", "on_train_epoch_end"])
def test_due_steps_of_a_scheduler_are_done_once_if_the_resumed_run_saves_before_its_first_batch(
    hook: str, tmp_path: Path
) -> None:
    options = {} if hook == "on_train_epoch_end" else EVERY_OTHER
    whole = fitted(**options)
    start = saved_at(tmp_path / "a.ckpt", hook, 6, **options)
    again = saved_at(tmp_path / "b.ckpt", "on_train_start", 0, start=start, **options)
    for path in (start, again):
        assert fitted(start=path, **options).rates == whole.rates[6:]


@pytest.mark.parametrize("hook", ["on_train_batch_end", "on_validation_end"])
def test_a_scheduler_steps_once_after_the_batch_that_a_termination_ends(hook: str, tmp_path: Path) -> None:
    def tell(used: pl.Trainer) -> None:
        used._signal_connector.received_sigterm = True

    whole = fitted(**EVERY_OTHER)
    keeps = OnExceptionCheckpoint(tmp_path, "a")
    with pytest.raises(SIGTERMException):
        fitted(At(hook, 2, tell), keeps, enable_checkpointing=True, **EVERY_OTHER)
    rest = fitted(start=tmp_path / "a.ckpt", **EVERY_OTHER)
    assert len(rest.rates) >= 12
    assert rest.rates == whole.rates[-len(rest.rates) :]
    assert rest.losses == whole.losses[-len(rest.rates) :]


def test_a_stop_continues_only_for_early_stopping(tmp_path: Path) -> None:
    def stopping() -> EarlyStopping:
        return EarlyStopping("train_loss_epoch", min_delta=100.0, patience=1)

    saves = ModelCheckpoint(tmp_path, "{epoch}", save_top_k=-1)
    options: dict[str, Any] = {"enable_checkpointing": True, "max_epochs": 4}
    assert len(fitted(stopping(), saves, **options).losses) == 12
    start = tmp_path / "epoch=1.ckpt"
    assert fitted(stopping(), start=start, max_epochs=4).losses == []
    assert len(fitted(start=start, max_epochs=4).losses) == 12

    def stop(used: pl.Trainer) -> None:
        used.should_stop = True

    # A callback of the user stops the run to continue it later.
    saves = ModelCheckpoint(tmp_path / "of_user", "{epoch}", save_top_k=-1)
    fitted(At("on_train_batch_end", 6, stop), saves, stopping(), **options)
    start = tmp_path / "of_user" / "epoch=0.ckpt"
    assert len(fitted(stopping(), start=start, max_epochs=2).losses) == 6


def test_a_value_that_the_module_now_logs_with_other_arguments_starts_at_the_resumption(tmp_path: Path) -> None:
    start = saved_at(tmp_path / "a.ckpt", "on_train_batch_end", 4)
    rest = fitted(start=start, rule={"reduce_fx": "max"})
    assert rest.means[0] == pytest.approx(max(rest.losses[:2]))


def test_numbers_of_other_classes_and_keys_that_are_no_names_leave_a_checkpoint_readable(tmp_path: Path) -> None:
    def save(used: pl.Trainer) -> None:
        metrics: dict[Any, Any] = used.callback_metrics
        metrics |= {"of numpy": np.float64(1.5), 3: torch.tensor(2.0)}
        used.save_checkpoint(tmp_path / "a.ckpt")

    fitted(At("on_train_batch_end", 4, save))
    assert len(fitted(start=tmp_path / "a.ckpt").losses) == 14


def test_a_run_that_has_nothing_left_to_train_has_the_values_of_its_checkpoint(tmp_path: Path) -> None:
    start = saved_at(tmp_path / "a.ckpt", "on_train_batch_end", 4)
    module = fitted(start=start, max_steps=4)
    assert module.losses == []
    assert "train_loss" in module.trainer.callback_metrics


def test_damaged_logged_values_are_an_error_in_words(tmp_path: Path) -> None:
    start = saved_at(tmp_path / "a.ckpt", "on_train_batch_end", 4)
    checkpoint = torch.load(start, weights_only=True)
    (packed,) = checkpoint["loops"]["fit_loop"]["state_dict"]["lightning_pipe"]["ranks"]
    logged = packed["logged"]
    entry = logged["epoch"][0]
    damages: list[Any] = [3, {**logged, "latest": 3}, {**logged, "epoch": [{**entry, "value": "a"}]}]
    for damage in damages:
        packed["logged"] = damage
        torch.save(checkpoint, tmp_path / "b.ckpt")
        with pytest.raises(SetupError, match=r"state of rank 0's .* in the checkpoint '.*b\.ckpt' is damaged"):
            fitted(start=tmp_path / "b.ckpt")


def on_other_ranks(rank: int, world: int, start: Path, saves: bool) -> tuple[list[tuple[int, float]], list[float]]:
    """Rows and loss of each batch, and the mean of the epoch; two ranks have three batches of four rows each."""
    rule = {"monitor": "train_loss_epoch", "sync_dist": True}
    callbacks = [At("on_train_batch_end", 2, lambda used: used.save_checkpoint(start))] if saves else []
    options: dict[str, Any] = {"devices": world, "limit_val_batches": 0, "max_epochs": 1}
    module = fitted(*callbacks, start=None if saves else start, rule=rule, **options)
    return list(zip(map(len, module.trained), module.losses, strict=True)), module.means


@pytest.mark.parametrize("world", sampled([1, 3], {1}.__contains__))
def test_the_mean_of_an_epoch_is_of_all_batches_on_another_number_of_ranks(world: int, tmp_path: Path) -> None:
    (first, _), (second, _) = run_ranks(on_other_ranks, 2, tmp_path / "a.ckpt", True)
    ranks = run_ranks(on_other_ranks, world, tmp_path / "a.ckpt", False)
    batches = [*first[:2], *second[:2], *(batch for batches, _ in ranks for batch in batches)]
    expected = sum(rows * loss for rows, loss in batches) / sum(rows for rows, _ in batches)
    for _, (mean,) in ranks:
        assert mean == pytest.approx(expected)
