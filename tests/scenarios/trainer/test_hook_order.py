"""Every hook of a run comes where it comes in Lightning's loop, and sees what it sees there.

Only what moves a batch to the device may come earlier.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import Any

import lightning.pytorch as pl
import pytest
import torch
from lightning.pytorch.callbacks import EarlyStopping, LearningRateMonitor, ModelCheckpoint
from lightning.pytorch.utilities import CombinedLoader
from torch import Tensor
from torch.optim.lr_scheduler import StepLR
from torch.utils.data import DataLoader

from tests.loops.hook_recorder import Call, HookRecorder, first_difference, fractions
from tests.loops.models import Net, Rows, Stream
from tests.loops.models import trainer as plain_trainer
from tests.rounding import Reference
from tests.strategies import llm_cases
from tests.strategies.cases import ADAGRAD, PLANS, SGD, Batch, Clicks, adam, loader, recsys
from tests.strategies.cases import trainer as recsys_trainer
from tests.tiers import sampled, wanted

EXACTLY = Reference.exactly({"numbers": 0.0})


class Logging:
    """Logs from many hooks, and a metric that gets worse."""

    def on_train_batch_start(self: Any, batch: Any, batch_idx: int) -> None:
        self.log("start", float(batch_idx))

    def on_train_batch_end(self: Any, outputs: Any, batch: Any, batch_idx: int) -> None:
        self.log("end", float(self.global_step), on_step=True, on_epoch=True, prog_bar=True)

    def on_train_epoch_end(self: Any) -> None:
        self.log("epochs", float(self.current_epoch))

    def on_validation_epoch_end(self: Any) -> None:
        self.log("worse", float(self.global_step))


def stopping() -> EarlyStopping:
    return EarlyStopping("worse", mode="min", patience=1, check_on_train_epoch_end=False)


def record(
    module: pl.LightningModule, make: Callable[..., pl.Trainer], train: Any, val: Any, **options: Any
) -> HookRecorder:
    """Fit with all hooks written down; ``callbacks`` are functions that make them."""
    module.train_dataloader = lambda: train  # type: ignore[method-assign]
    module.val_dataloader = lambda: val  # type: ignore[method-assign]
    recorder = HookRecorder()
    callbacks = [callback() for callback in options.pop("callbacks", ())]
    used = recorder.trainer(make, module, callbacks=callbacks, **options)
    pl.seed_everything(5)
    used.fit(module)
    return recorder


def assert_same_calls(ours: HookRecorder, theirs: HookRecorder, reference: Reference = EXACTLY) -> None:
    assert_same(ours.calls, theirs.calls, reference)


def assert_same_transfers(
    ours: HookRecorder, theirs: HookRecorder, reference: Reference = EXACTLY, abandoned: int = 0
) -> None:
    """The batches moved are the same, in the same order; *abandoned* more are moved, and not trained."""
    assert theirs.transfers
    surplus = len(theirs.transfers) // moved_batches(theirs) * abandoned
    assert_same(ours.transfers[: len(ours.transfers) - surplus], theirs.transfers, reference)
    assert theirs.evaluated
    assert_same(ours.evaluated, theirs.evaluated, reference)


def assert_same(ours: Sequence[Call], theirs: Sequence[Call], reference: Reference) -> None:
    for within in reference.bounds("numbers"):
        different = first_difference(ours, theirs, within)
        if different is None:
            return
    raise AssertionError(different)


def with_rounding(run: Callable[[], HookRecorder]) -> tuple[HookRecorder, Reference]:
    """A recording, and how far its numbers may be from those of another implementation."""
    recorders = []

    def numbers() -> dict[str, Any]:
        recorders.append(run())
        return {"numbers": fractions(recorders[-1])}

    reference = Reference.of(numbers)
    return recorders[0], reference


def moved_batches(recorder: HookRecorder) -> int:
    return sum(call.name == "module transfer_batch_to_device" for call in recorder.transfers)


# ---------------------------------------------------------------------- any module


class Everything(Logging, Net):
    """Trains on one loader or on a mapping of two, validates on two."""

    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        rows = batch if isinstance(batch, Tensor) else torch.cat([batch["a"], batch["b"]])
        return super().training_step(rows, batch_idx)

    def validation_step(self, batch: Tensor, batch_idx: int, dataloader_idx: int = 0) -> None:
        super().validation_step(batch, batch_idx)


class Manual(Everything):
    def __init__(self) -> None:
        super().__init__()
        self.automatic_optimization = False

    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        optimizer: Any = self.optimizers()
        loss = super().training_step(batch, batch_idx)
        optimizer.zero_grad()
        self.manual_backward(loss)
        optimizer.step()
        return loss


def rows(length: int, shuffle: bool = True) -> DataLoader[Tensor]:
    # A loader that begins again in mid-epoch would draw its seed between the model's numbers in Lightning's loop.
    return DataLoader(Rows(length), 4, shuffle=shuffle, generator=torch.Generator().manual_seed(length))


def two(mode: Any) -> CombinedLoader:
    return CombinedLoader({"a": rows(20), "b": rows(32)}, mode)


RUNS: dict[str, tuple[type[Everything], Callable[[], Any], dict[str, Any]]] = {
    "accumulation, clipping, validation every few batches": (
        Everything,
        lambda: rows(28),
        {"accumulate_grad_batches": 2, "gradient_clip_val": 0.1, "val_check_interval": 3},
    ),
    "a mapping of loaders, validation twice an epoch": (
        Everything,
        lambda: two("max_size_cycle"),
        {"val_check_interval": 0.5, "gradient_clip_val": 0.01, "gradient_clip_algorithm": "value"},
    ),
    "an early stop in mid-epoch": (
        Everything,
        lambda: two("min_size"),
        {"val_check_interval": 2, "callbacks": [stopping], "max_epochs": 4},
    ),
    "a stream, checkpoints and schedules that are followed": (
        Everything,
        lambda: DataLoader(Stream(22), 4),
        {
            "val_check_interval": 4,
            "callbacks": [LearningRateMonitor, lambda: ModelCheckpoint(every_n_train_steps=3, save_top_k=-1)],
        },
    ),
    "manual optimization": (Manual, lambda: rows(20), {"val_check_interval": 2}),
    "several checks before training, the last batch limited": (
        Everything,
        lambda: rows(28),
        {"limit_train_batches": 5, "limit_val_batches": 1, "num_sanity_val_steps": 1, "accumulate_grad_batches": 3},
    ),
}


def run_everything(run: str, strategy: str, root: Any) -> HookRecorder:
    make_module, train, options = RUNS[run]
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(3)
        module = make_module()
    checkpoints = any(callback not in (stopping,) for callback in options.get("callbacks", ()))
    given = {"strategy": strategy, "log_every_n_steps": 2, "default_root_dir": root, "max_epochs": 2, **options}
    val = [rows(8, shuffle=False), rows(6, shuffle=False)]
    return record(module, plain_trainer, train(), val, enable_checkpointing=checkpoints, **given)


@pytest.mark.parametrize("run", RUNS)
def test_with_the_next_batch_copied_ahead_hooks_come_in_lightnings_order(run: str, tmp_path: Any) -> None:
    theirs = run_everything(run, "auto", tmp_path / "theirs")
    ours = run_everything(run, "pipeline", tmp_path / "ours")
    assert_same_calls(ours, theirs)
    assert_same_transfers(ours, theirs, abandoned=1 if "early stop" in run else 0)


def test_a_recording_has_the_hooks_of_all_kinds(tmp_path: Any) -> None:
    """What is compared above is not empty."""
    names = run_everything("a stream, checkpoints and schedules that are followed", "pipeline", tmp_path).names()
    hooks = {"on_train_batch_start", "on_before_zero_grad", "on_validation_batch_end", "on_save_checkpoint"}
    assert {f"{kind} {hook}" for kind in ("callback", "module") for hook in hooks} <= names
    assert {"module optimizer_step", "module backward", "module lr_scheduler_step", "module val_dataloader"} <= names
    assert {"strategy training_step", "strategy backward", "strategy optimizer_step", "strategy teardown"} <= names
    assert {"logger 1 log_metrics", "logger 1 after_save_checkpoint", "logger 1 finalize"} <= names
    assert {"start run_training_batch", "stop [Strategy].batch_to_device"} <= names
    assert {"stop [_TrainingEpochLoop].train_dataloader_next", "stop [_EvaluationLoop].val_next"} <= names


# ---------------------------------------------------------------------- tables


def of_all(module: Clicks) -> Any:
    """One optimizer for tables and the rest, as an unsharded module has it."""
    optimizer = torch.optim.SGD(module.parameters(), lr=0.5)
    return {"optimizer": optimizer, "lr_scheduler": {"scheduler": StepLR(optimizer, 2, 0.5), "interval": "step"}}


def of_dense(module: Clicks) -> Any:
    """For tables with optimizers in backward, which step in each micro-batch; they would not follow a schedule."""
    optimizer = adam(module)
    return {"optimizer": optimizer, "lr_scheduler": {"scheduler": StepLR(optimizer, 2, 1.0), "interval": "step"}}


class EverythingClicked(Logging, Clicks):
    """The same for tables; of a mapping of loaders, the second one's batches have the labels."""

    def training_step(self, batch: Any, batch_idx: int) -> Any:
        if isinstance(batch, dict):
            batch = replace(batch["a"], label=batch["b"].label)
        return super().training_step(batch, batch_idx)

    def validation_step(self, batch: Batch, batch_idx: int, dataloader_idx: int = 0) -> None:
        super().validation_step(batch, batch_idx)


TABLE_RUNS: dict[str, tuple[Callable[[], Any], dict[str, Any], dict[str, Any]]] = {
    "accumulation, validation every few batches": (
        lambda: loader(28, shuffle=True),
        {"in_backward": ADAGRAD, "optimizers": of_dense},
        {"accumulate_grad_batches": 2, "val_check_interval": 3},
    ),
    "a mapping of loaders, clipping, an early stop in mid-epoch": (
        lambda: CombinedLoader({"a": loader(20), "b": loader(28)}, "max_size_cycle"),
        {"optimizers": of_all},
        {"val_check_interval": 2, "callbacks": [stopping], "max_epochs": 4, "gradient_clip_val": 0.1},
    ),
}
# How many batches a plan has in flight behind the one that trains.
AHEAD = {"serial": 0, "base": 2, "prefetch": 2, "fused_sparse_dist": 2, "compute_ahead": 2, "threaded_input": 1}


@pytest.mark.parametrize("run", sampled(TABLE_RUNS, lambda run: run == next(iter(TABLE_RUNS))))
def test_under_every_plan_for_tables_hooks_come_in_lightnings_order(run: str, pytestconfig: pytest.Config) -> None:
    train, arguments, options = TABLE_RUNS[run]

    def recorded(strategy: Any) -> HookRecorder:
        module, val = EverythingClicked(**arguments), [loader(8), loader(6)]
        return record(module, recsys_trainer, train(), val, strategy=strategy, **options)

    theirs, rounding = with_rounding(lambda: recorded("auto"))
    # The serial plan, which has nothing in flight, adds nothing to the others here.
    for plan in wanted(pytestconfig, PLANS, lambda plan: plan != "serial"):
        ours = recorded(recsys(plan, optimizer=None if "in_backward" in arguments else SGD))
        assert_same_calls(ours, theirs, rounding)
        abandoned = AHEAD[plan] if "early stop" in run else 0
        assert_same_transfers(ours, theirs, rounding, abandoned)


# ---------------------------------------------------------------------- stages


class EverythingSaid(Logging, llm_cases.Tiny):
    def configure_optimizers(self) -> Any:
        optimizer = super().configure_optimizers()
        return {"optimizer": optimizer, "lr_scheduler": {"scheduler": StepLR(optimizer, 2, 0.5), "interval": "step"}}

    def validation_step(self, batch: Any, batch_idx: int, dataloader_idx: int = 0) -> None:
        super().validation_step(batch, batch_idx)


def as_in_stages(calls: Sequence[Call]) -> list[Call]:
    """Lightning's calls, with what the schedule changes.

    It runs backward in ``training_step``. So gradients are zeroed before, with the hooks around that, which see the
    metrics of the last batch; the hooks around ``backward`` get a loss without a gradient; and the module's own
    ``backward`` has nothing left to do, and is not called.
    """
    expected: list[Call] = []
    step = after = 0
    for call in calls:
        if call.name == "start [Strategy].training_step":
            step = len(expected)
        elif call.name == "strategy post_training_step":
            after = len(expected) + 1
        elif call.name == "start [Strategy].backward":
            zeroing = [replace(one, metrics=expected[step].metrics) for one in expected[after:]]
            expected[after:] = []
            expected[step:step] = zeroing
        if call.name == "module backward":
            continue
        expected.append(replace(call, arguments=without_gradient(call.arguments)) if is_backward(call) else call)
    return expected


def is_backward(call: Call) -> bool:
    return call.name.endswith(("on_before_backward", "on_after_backward", "strategy backward", "_backward"))


def without_gradient(arguments: Any) -> Any:
    if isinstance(arguments, list):
        return [without_gradient(one) for one in arguments]
    if isinstance(arguments, tuple):  # a tensor
        return (*arguments[:2], False)
    return arguments


STAGE_RUNS: dict[str, dict[str, Any]] = {
    "accumulation, clipping, validation every few batches": {
        "accumulate_grad_batches": 2,
        "gradient_clip_val": 0.1,
        "val_check_interval": 3,
    },
    "an early stop in mid-epoch": {"val_check_interval": 0.3, "callbacks": [stopping], "max_epochs": 4},
}


@pytest.mark.parametrize("run", sampled(STAGE_RUNS, lambda run: run == next(iter(STAGE_RUNS))))
def test_in_stages_hooks_come_in_lightnings_order_but_for_zeroing_gradients(run: str) -> None:
    def recorded(strategy: Any) -> HookRecorder:
        # All labels count, so that the mean over the tokens of two batches is that of the means.
        ids = [batch["input_ids"] for batch in llm_cases.row_batches(7, rows=4, lengths=[6])]
        train = llm_cases.loader([{"input_ids": one, "labels": one.roll(-1, 1)} for one in ids])
        val = [llm_cases.loader(llm_cases.row_batches(2, rows=4)), llm_cases.loader(llm_cases.row_batches(1, rows=4))]
        options = {"max_epochs": 2, **STAGE_RUNS[run]}
        return record(EverythingSaid(), llm_cases.trainer, train, val, strategy=strategy, **options)

    ours = recorded(llm_cases.llm(num_microbatches=2))
    theirs, rounding = with_rounding(lambda: recorded("auto"))
    theirs.calls = as_in_stages(theirs.calls)
    assert_same_calls(ours, theirs, rounding)
    assert_same_transfers(ours, theirs, rounding, abandoned=1 if "early stop" in run else 0)
