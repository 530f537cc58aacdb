"""A run goes on exactly from a checkpoint of any moment: in a batch, around a validation, at either end of an epoch."""

from __future__ import annotations

import json
import random
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import Any

import lightning.pytorch as pl
import pytest
import torch
from lightning.pytorch.callbacks import (
    Callback,
    GradientAccumulationScheduler,
    ModelCheckpoint,
    OnExceptionCheckpoint,
    StochasticWeightAveraging,
)
from lightning.pytorch.loggers.logger import DummyLogger
from lightning.pytorch.utilities.exceptions import SIGTERMException
from torch import Tensor
from torch.utils.data import DataLoader

from lightning_pipe.engine import SetupError
from tests.distributed import run_ranks
from tests.loops.models import Net, Rows, trainer
from tests.tiers import sampled


class Drawing(Net):
    """Six batches an epoch; draws in every step, validation and fetch of its own order; notes what it did."""

    def __init__(self, loader: dict[str, Any], validation: dict[str, Any]) -> None:
        super().__init__(Rows(24))
        self.loader, self.validation = loader, validation
        self.validated: list[int] = []
        self.ended: list[int] = []

    def validation_step(self, batch: Tensor, batch_idx: int) -> None:
        super().validation_step(batch, batch_idx)
        torch.rand(2)
        random.random()
        if batch_idx == 1 and not self.trainer.sanity_checking:
            self.validated.append(len(self.trained))

    def on_train_epoch_end(self) -> None:
        self.ended.append(len(self.trained))

    def train_dataloader(self) -> DataLoader[Tensor]:
        return DataLoader(self.dataset, self.batch_size, shuffle=True, **self.loader)

    def val_dataloader(self) -> DataLoader[Tensor]:
        return DataLoader(Rows(8), 4, shuffle=True, **self.validation)


class Lines(DummyLogger):
    """A logger that keeps the steps that losses are logged at."""

    def __init__(self) -> None:
        super().__init__()
        self.losses: list[tuple[int | None, float]] = []

    def log_metrics(self, metrics: Any, step: int | None = None) -> None:
        if "train_loss_step" in metrics:
            self.losses.append((step, metrics["train_loss_step"]))


class Saves(Callback):
    """Writes a checkpoint where a hook is called behind so many batches trained, or raises there."""

    def __init__(self, path: Path, hook: str, batches: int, raises: BaseException | None = None) -> None:
        self.path, self.batches, self.raises = path, batches, raises
        self.saved = False
        setattr(self, hook, self._called)

    def _called(self, used: pl.Trainer, module: Any, *args: Any) -> None:
        if self.saved or len(module.trained) != self.batches or used.sanity_checking:
            return
        self.saved = True
        if self.raises is not None:
            raise self.raises
        used.save_checkpoint(self.path)


def run(
    checkpoint: Path | None = None,
    *callbacks: Callback,
    loader: dict[str, Any] | None = None,
    validation: dict[str, Any] | None = None,
    **options: Any,
) -> Drawing:
    pl.seed_everything(3 if checkpoint is None else 99)
    torch.manual_seed(3)
    module = Drawing(loader or {}, validation or {})
    if checkpoint is not None:
        torch.manual_seed(99)
    used = trainer(strategy="pipeline", callbacks=list(callbacks), **{"max_epochs": 3, **options})
    used.fit(module, ckpt_path=checkpoint, weights_only=True)
    return module


_WHOLE: dict[str, Drawing] = {}


def whole_run(**options: Any) -> Drawing:
    """A run that nothing interrupts, computed once for the same options."""
    key = json.dumps(options, sort_keys=True)
    if key not in _WHOLE:
        _WHOLE[key] = run(**options)
    return _WHOLE[key]


Write = Callable[..., Path]


@pytest.fixture(scope="module")
def write(tmp_path_factory: pytest.TempPathFactory) -> Write:
    """The checkpoint of a moment: one run writes those of all moments, once for the same options."""
    made: dict[str, Path] = {}

    def write(moment: tuple[str, int], moments: Iterable[tuple[str, int]], **options: Any) -> Path:
        key = json.dumps(options, sort_keys=True)
        if key not in made:
            made[key] = tmp_path_factory.mktemp("written")
            saves = [Saves(made[key] / f"{hook}-{batches}.ckpt", hook, batches) for hook, batches in moments]
            run(None, *saves, **options)
            assert all(one.saved for one in saves)
        hook, batches = moment
        return made[key] / f"{hook}-{batches}.ckpt"

    return write


def assert_goes_on(whole: Drawing, after: Drawing, done: int, due: bool) -> None:
    """*after* has trained what *whole* had behind *done* batches, to the same bits."""
    assert after.trained == whole.trained[done:]
    assert after.losses == whole.losses[done:]
    for ours, theirs in ((after.validated, whole.validated), (after.ended, whole.ended)):
        assert [done + count for count in ours] == [one for one in theirs if one > done or (due and one == done)]
    for one, other in zip(after.parameters(), whole.parameters(), strict=True):
        assert torch.equal(one, other)


EVERY_OTHER: dict[str, Any] = {"val_check_interval": 2}
AT_THE_END: dict[str, Any] = {"val_check_interval": 1.0}
NONE: dict[str, Any] = {"limit_val_batches": 0}

# A hook; how many batches have begun by then; how many of them are trained.
MOMENTS = [
    *[("on_before_optimizer_step", batches, batches - 1) for batches in (1, 3, 6, 7)],
    *[("on_train_batch_start", batches, batches) for batches in (0, 2, 5, 6)],
    *[("on_validation_start", batches, batches) for batches in (2, 6)],
    *[("on_validation_batch_start", batches, batches) for batches in (2, 6)],
    *[("on_validation_batch_end", batches, batches) for batches in (2, 6)],
    *[("on_validation_epoch_end", batches, batches) for batches in (2, 6)],
    *[("on_train_epoch_start", batches, batches) for batches in (0, 6, 12)],
    ("on_train_start", 0, 0),
]


VALIDATIONS: dict[str, dict[str, Any]] = {"every 2": EVERY_OTHER, "at the end": AT_THE_END, "none": NONE}


def is_called(hook: str, batches: int, validation: str) -> bool:
    """Whether a hook of validation is called behind so many batches."""
    return "validation" not in hook or validation == "every 2" or (validation == "at the end" and batches == 6)


@pytest.mark.parametrize(
    ("hook", "batches", "done", "validation"),
    [(*moment, "every 2") for moment in MOMENTS]
    + [("on_before_optimizer_step", 6, 5, "at the end"), ("on_validation_start", 6, 6, "at the end")]
    + [("on_train_epoch_start", 6, 6, "none"), ("on_before_optimizer_step", 6, 5, "none")],
)
def test_from_every_hook(hook: str, batches: int, done: int, validation: str, write: Write) -> None:
    options = VALIDATIONS[validation]
    moments = [moment[:2] for moment in MOMENTS if is_called(*moment[:2], validation)]
    path = write((hook, batches), moments, **options)
    assert_goes_on(whole_run(**options), run(path, **options), done, due="validation" in hook)


# Where a run has written its checkpoint; where the one that continued from it wrote another before its first batch;
# whether the validation behind batch 2 or 6 is then still to come.
TWICE = [
    ("on_train_batch_end", 2, "on_train_start", True),
    ("on_train_batch_end", 2, "on_validation_batch_end", True),
    ("on_train_batch_end", 2, "on_validation_end", False),
    ("on_train_batch_end", 6, "on_validation_start", True),
    ("on_validation_batch_start", 2, "on_train_start", True),
    ("on_train_batch_start", 3, "on_train_batch_start", False),
    ("on_train_epoch_start", 6, "on_train_batch_start", False),
]


@pytest.mark.parametrize(("first", "done", "second", "due"), TWICE)
@pytest.mark.parametrize(
    "loader",
    sampled([{}, {"num_workers": 1}], lambda loader: not loader, lambda loader: "1 worker" if loader else "no workers"),
)
def test_from_what_a_continued_run_has_written_before_its_first_batch(
    first: str, done: int, second: str, due: bool, loader: dict[str, Any], tmp_path: Path, write: Write
) -> None:
    options = {**EVERY_OTHER, "loader": loader}
    path = write((first, done), dict.fromkeys(row[:2] for row in TWICE), **options)
    saves = Saves(tmp_path / "b.ckpt", second, 0)
    run(path, saves, **options)
    assert saves.saved
    assert_goes_on(whole_run(**options), run(tmp_path / "b.ckpt", **options), done, due)


@pytest.mark.parametrize(
    ("batches", "hook"),
    [(4, "on_train_batch_start"), (1, "on_before_optimizer_step"), (8, "on_before_optimizer_step")],
)
def test_batches_are_counted_over_epochs_from_within_a_batch(hook: str, batches: int, tmp_path: Path) -> None:
    """Lightning counts the batch twice, and validates a batch too early from then on."""
    across: dict[str, Any] = {"val_check_interval": 4, "check_val_every_n_epoch": None, "log_every_n_steps": 1}
    logged, logged_after = Lines(), Lines()
    whole = run(None, **across, logger=logged)
    run(None, Saves(tmp_path / "a.ckpt", hook, batches), **across)
    done = batches - (hook == "on_before_optimizer_step")
    assert_goes_on(whole, run(tmp_path / "a.ckpt", **across, logger=logged_after), done, due=False)
    assert len(logged_after.losses) == 18 - done
    assert logged_after.losses == logged.losses[done:]
    # So does a run that goes on from this one.
    resaves = Saves(tmp_path / "b.ckpt", "on_train_batch_end", 4)
    run(tmp_path / "a.ckpt", resaves, **across)
    assert_goes_on(whole, run(tmp_path / "b.ckpt", **across), done + 4, due=True)


@pytest.mark.parametrize("done", [0, 3])
def test_workers_of_a_validation_draw_their_seed_once_when_the_first_one_begins(done: int, tmp_path: Path) -> None:
    workers = {"num_workers": 1, "persistent_workers": True}
    options: dict[str, Any] = {**EVERY_OTHER, "validation": workers, "num_sanity_val_steps": 0}
    whole = whole_run(**options)
    run(None, Saves(tmp_path / "a.ckpt", "on_train_batch_start", done), **options)
    assert_goes_on(whole, run(tmp_path / "a.ckpt", **options), done, due=False)


RAISING = [
    *[("on_before_optimizer_step", batches) for batches in (1, 6)],
    *[("on_validation_start", batches) for batches in (2, 6)],
    *[("on_validation_batch_end", batches) for batches in (2, 6)],
]


@pytest.mark.parametrize(
    ("hook", "batches", "validation"),
    [*((*moment, "every 2") for moment in RAISING), ("on_before_optimizer_step", 6, "at the end")],
)
def test_from_the_checkpoint_of_an_exception(hook: str, batches: int, validation: str, tmp_path: Path) -> None:
    options = VALIDATIONS[validation]
    whole = whole_run(**options)
    saves = Saves(tmp_path / "a.ckpt", hook, batches, ValueError("no such column"))
    keeps = OnExceptionCheckpoint(tmp_path, "a")
    with pytest.raises(ValueError, match="no such column"):
        run(None, saves, keeps, enable_checkpointing=True, **options)
    done = batches if "validation" in hook else batches - 1
    assert_goes_on(whole, run(tmp_path / "a.ckpt", **options), done, due="validation" in hook)


@pytest.mark.parametrize(("batches", "validation"), [(1, "every 2"), (2, "every 2"), (6, "every 2"), (6, "at the end")])
def test_from_the_checkpoint_of_a_termination(batches: int, validation: str, tmp_path: Path) -> None:
    options, ended = VALIDATIONS[validation], list[int]()

    class Told(Callback):
        def on_train_batch_end(self, used: pl.Trainer, module: Any, *args: Any) -> None:
            if len(module.trained) == batches:
                used._signal_connector.received_sigterm = True

        def on_train_epoch_end(self, used: pl.Trainer, module: Any) -> None:
            ended.append(len(module.trained))

    whole = whole_run(**options)
    with pytest.raises(SIGTERMException):
        run(None, Told(), OnExceptionCheckpoint(tmp_path, "a"), enable_checkpointing=True, **options)
    after = run(tmp_path / "a.ckpt", **options)
    done = len(whole.trained) - len(after.trained)
    assert done in (batches, batches + 1)
    # It ends where the next batch would begin; where a validation follows, behind that one's first batch.
    assert_goes_on(whole, after, done, due=done in whole.validated and done not in ended)


@pytest.mark.parametrize(
    ("validation", "options"),
    [
        ("none", {"max_epochs": -1, "max_steps": 18}),
        ("at the end", {"max_epochs": 3, "max_steps": 40}),
    ],
)
def test_with_a_limit_of_steps_from_the_end_of_an_epoch(
    options: dict[str, Any], validation: str, tmp_path: Path
) -> None:
    options = {**options, **VALIDATIONS[validation]}
    whole = whole_run(**options)
    saves = ModelCheckpoint(tmp_path, "{step}", every_n_epochs=1, save_top_k=-1, save_on_train_epoch_end=True)
    run(None, saves, enable_checkpointing=True, **options)
    for done in (6, 12):
        after = run(tmp_path / f"step={done}.ckpt", **options)
        assert after.trained == whole.trained[done:]
        assert after.losses == whole.losses[done:]
        assert [done + count for count in after.ended if count] == [count for count in whole.ended if count > done]
        assert [done + count for count in after.validated] == [count for count in whole.validated if count > done]
        for one, other in zip(after.parameters(), whole.parameters(), strict=True):
            assert torch.equal(one, other)


# A hook; how many batches have begun by then; how many of them are trained; whether a validation is due.
LAST_MOMENTS = [
    ("on_before_optimizer_step", 8, 7, True),
    ("on_train_batch_end", 8, 8, True),
    ("on_validation_batch_end", 8, 8, True),
    ("on_validation_end", 8, 8, False),
    ("on_train_batch_start", 8, 8, False),
]


@pytest.mark.parametrize(("hook", "batches", "done", "validates"), LAST_MOMENTS)
def test_a_run_ends_the_epoch_in_which_a_limit_of_steps_ends_it(
    hook: str, batches: int, done: int, validates: bool, write: Write
) -> None:
    limited: dict[str, Any] = {**EVERY_OTHER, "max_epochs": -1, "max_steps": 8}
    path = write((hook, batches), [moment[:2] for moment in LAST_MOMENTS], **{**limited, "max_steps": 9})
    whole, after = whole_run(**limited), run(path, **limited)
    assert after.trained == whole.trained[done:]
    assert [done + count for count in after.validated] == ([8] if validates else [])
    assert [done + count for count in after.ended] == [8]
    for one, other in zip(after.parameters(), whole.parameters(), strict=True):
        assert torch.equal(one, other)


CALLBACKS: dict[str, Callable[[], Callback]] = {
    "accumulation": lambda: GradientAccumulationScheduler({1: 2}),
    "averaging": lambda: StochasticWeightAveraging(0.01, swa_epoch_start=2, annealing_epochs=3),
}


@pytest.mark.parametrize("callback", CALLBACKS.values(), ids=CALLBACKS)
@pytest.mark.parametrize("batches", [8, 12, 16])
def test_a_resumed_epoch_has_what_callbacks_set_at_its_start(
    batches: int, callback: Callable[[], Callback], tmp_path: Path
) -> None:
    whole = run(None, callback(), **NONE)
    run(None, callback(), Saves(tmp_path / "a.ckpt", "on_train_batch_end", batches), **NONE)
    assert_goes_on(whole, run(tmp_path / "a.ckpt", callback(), **NONE), batches, due=batches == 12)


def test_a_damaged_state_of_the_data_is_an_error_in_words(tmp_path: Path) -> None:
    run(None, Saves(tmp_path / "a.ckpt", "on_train_batch_end", 2), **NONE)
    checkpoint = torch.load(tmp_path / "a.ckpt", weights_only=True)
    found = checkpoint["loops"]["fit_loop"]["state_dict"]
    (own,) = found["lightning_pipe"]["ranks"]
    (loader,) = own["loaders"]
    assert set(own["streams"]) == {"fetch", "prepare", "transfer"}
    damaged: list[Any] = [3, {"ranks": 3}, {"ranks": []}]
    of_rank: list[Any] = [None, {}, {**own, "streams": {"fetch": 3}}, {**own, "common": "{"}, {**own, "loaders": ["a"]}]
    damaged += [{"ranks": [state]} for state in of_rank]
    damaged += [{"ranks": [{**own, "loaders": [{**loader, "created": {}}]}]}, {"ranks": [own] * 2 + [3]}]
    for damage in damaged:
        found["lightning_pipe"] = damage
        torch.save(checkpoint, tmp_path / "b.ckpt")
        named = r"state of rank 0's (loops and )?data in the checkpoint '.*b\.ckpt' is damaged"
        with pytest.raises(SetupError, match=named):
            run(tmp_path / "b.ckpt", **NONE)


def damaged_on_one_rank(rank: int, world: int, folder: Path) -> list[str]:
    options: dict[str, Any] = {"strategy": "pipeline", "devices": world, **NONE}
    trainer(**options, callbacks=[Saves(folder / "a.ckpt", "on_train_batch_end", 1)]).fit(Net(Rows(24)))
    said = []
    for part, damage in (("common", "{"), ("loaders", [])):
        checkpoint = torch.load(folder / "a.ckpt", weights_only=True)
        checkpoint["loops"]["fit_loop"]["state_dict"]["lightning_pipe"]["ranks"][1][part] = damage
        path = folder / f"of_{rank}.ckpt"
        torch.save(checkpoint, path)
        with pytest.raises(SetupError) as caught:
            trainer(**options).fit(Net(Rows(24)), ckpt_path=path, weights_only=True)
        said.append(str(caught.value))
    return said


def test_what_is_damaged_of_one_rank_is_an_error_on_all(tmp_path: Path) -> None:
    first, second = run_ranks(damaged_on_one_rank, 2, tmp_path)
    assert first == second
    assert all("state of rank 1's" in one and "rank 0" not in one for one in first)
