"""Writes down every hook of a run, in the order of the calls, with what its caller saw.

Two runs are equal if their recordings are. Hooks are wrapped on the objects themselves, behind ``functools.wraps``, so
that Lightning still sees which of them are overridden, and which arguments they take.
"""

from __future__ import annotations

import dataclasses
import functools
import io
import math
import re
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from typing import Any

import lightning.pytorch as pl
import torch
from lightning.pytorch.callbacks import Callback, TQDMProgressBar
from lightning.pytorch.callbacks.progress.tqdm_progress import Tqdm
from lightning.pytorch.loggers.logger import DummyLogger
from lightning.pytorch.profilers import Profiler
from torch import Tensor

# What moves a batch; it may come before the hooks of earlier batches.
TRANSFERS = (
    *("train_dataloader_next", "val_next", "test_next", "predict_next", "batch_to_device"),
    *("on_before_batch_transfer", "transfer_batch_to_device", "on_after_batch_transfer"),
)


def _hooks_of(owner: type, *others: str) -> list[str]:
    own = [name for name in dir(owner) if name.startswith("on_") and callable(getattr(owner, name))]
    return [*own, *others]


MODULE_HOOKS = _hooks_of(
    pl.LightningModule,
    *("setup", "teardown", "prepare_data", "configure_callbacks", "configure_optimizers", "configure_model"),
    *("train_dataloader", "val_dataloader", "transfer_batch_to_device", "forward", "state_dict"),
    *("training_step", "validation_step", "backward", "configure_gradient_clipping", "clip_gradients"),
    *("optimizer_step", "optimizer_zero_grad", "lr_scheduler_step"),
)
CALLBACK_HOOKS = _hooks_of(Callback, "setup", "teardown", "state_dict", "load_state_dict")
LOGGER_HOOKS = ("log_metrics", "log_hyperparams", "log_graph", "save", "finalize", "after_save_checkpoint")
STRATEGY_HOOKS = (
    *("on_train_start", "on_train_end", "on_train_batch_start", "on_validation_start", "on_validation_end"),
    *("training_step", "post_training_step", "validation_step", "batch_to_device", "backward", "optimizer_step"),
    *("pre_backward", "post_backward", "lightning_module_state_dict", "save_checkpoint", "teardown"),
)
# Where their arguments are all that a checkpoint holds, or a path, there is more in them than a call's order.
WITHOUT_ARGUMENTS = ("save_checkpoint", "on_save_checkpoint", "after_save_checkpoint", "state_dict")


@dataclasses.dataclass(frozen=True)
class Call:
    """One call of a hook."""

    name: str
    arguments: Any
    where: Mapping[str, Any]
    metrics: Mapping[str, Any]

    @property
    def is_transfer(self) -> bool:
        """Whether the call moves a batch."""
        return self.name.endswith(TRANSFERS)


class HookRecorder:
    """The recording of one run."""

    def __init__(self) -> None:
        self.calls: list[Call] = []
        self.transfers: list[Call] = []
        self.evaluated: list[Call] = []
        self.profiler = _RecordingProfiler(self)
        self.bar = _SilentBar()
        self._trainer: pl.Trainer | None = None

    def trainer(self, make: Callable[..., pl.Trainer], module: pl.LightningModule, **options: Any) -> pl.Trainer:
        """A trainer with two loggers, a progress bar and a profiler, all of which are written down."""
        callback, loggers = Callback(), [DummyLogger(), DummyLogger()]
        callbacks = [callback, *options.pop("callbacks", ()), self.bar]
        options = {**options, "logger": loggers, "profiler": self.profiler, "enable_progress_bar": True}
        self._trainer = used = make(callbacks=callbacks, **options)
        self._wrap(callback, "callback", CALLBACK_HOOKS)
        self._wrap(module, "module", MODULE_HOOKS)
        self._wrap(used.strategy, "strategy", STRATEGY_HOOKS)
        for index, logger in enumerate(loggers):
            self._wrap(logger, f"logger {index}", LOGGER_HOOKS)
        return used

    def note(self, name: str, arguments: Any = ()) -> None:
        """Write a call down."""
        used = self._trainer
        if used is None:
            return  # the trainer is being made
        call = Call(name, describe(arguments), {}, {})
        if not call.is_transfer:
            # What else has happened by then is what may differ, and to look at metrics changes them.
            call = dataclasses.replace(call, where=self._where(used), metrics=_metrics(used))
        (self.calls if not call.is_transfer else self.transfers if used.training else self.evaluated).append(call)

    def names(self) -> set[str]:
        """Of the calls."""
        return {call.name for call in (*self.calls, *self.transfers, *self.evaluated)}

    def _wrap(self, owner: Any, kind: str, names: Iterable[str]) -> None:
        for name in names:
            setattr(owner, name, self._noted(getattr(owner, name), f"{kind} {name}"))

    def _noted(self, method: Callable[..., Any], name: str) -> Callable[..., Any]:
        @functools.wraps(method)
        def hook(*args: Any, **kwargs: Any) -> Any:
            self.note(name, () if name.endswith(WITHOUT_ARGUMENTS) else (args, kwargs))
            return method(*args, **kwargs)

        return hook

    def _where(self, used: pl.Trainer) -> dict[str, Any]:
        loop, module = used.fit_loop.epoch_loop, used.lightning_module
        current: Any = loop.batch_progress.current
        return {
            "stage": str(used.state.stage),
            "global_step": used.global_step,
            "current_epoch": used.current_epoch,
            "is_last_batch": loop.batch_progress.is_last_batch,
            "batches": (current.ready, current.started, current.processed, current.completed),
            "total_batch_idx": loop.total_batch_idx,
            "should_stop": used.should_stop,
            "grad": torch.is_grad_enabled(),
            "bars": self.bar.shown(),
            "in_hook": None if module is None else module._current_fx_name,
            "training": None if module is None else module.training,
        }


class _RecordingProfiler(Profiler):
    def __init__(self, recorder: HookRecorder) -> None:
        super().__init__()
        self._recorder = recorder

    def start(self, action_name: str) -> None:
        # The class of the strategy is what differs between runs.
        self._recorder.note("start " + re.sub(r"\[Strategy\]\w+", "[Strategy]", action_name))

    def stop(self, action_name: str) -> None:
        self._recorder.note("stop " + re.sub(r"\[Strategy\]\w+", "[Strategy]", action_name))


class _SilentBar(TQDMProgressBar):
    """Lightning's progress bar, which writes nowhere."""

    def init_train_tqdm(self) -> Tqdm:
        return Tqdm(file=io.StringIO(), disable=False)

    init_validation_tqdm = init_sanity_tqdm = init_train_tqdm

    def shown(self) -> tuple[Any, ...]:
        """Place and length of the bars."""
        bars = (self._train_progress_bar, self._val_progress_bar)
        return tuple(None if bar is None else (bar.n, bar.total) for bar in bars)


def _metrics(used: pl.Trainer) -> dict[str, Any]:
    kinds: dict[str, Any] = {
        "callback": used.callback_metrics,
        "logged": used.logged_metrics,
        "bar": used.progress_bar_metrics,
    }
    return {kind: describe(metrics) for kind, metrics in kinds.items()}


def describe(value: Any) -> Any:
    """What can be compared of an argument: numbers, sums of tensors, and whether a gradient can flow into one."""
    if value is None or isinstance(value, (bool, int, float, str)):
        return value
    if isinstance(value, Tensor):
        return (value.detach().double().sum().item(), tuple(value.shape), value.requires_grad)
    if isinstance(value, Mapping):
        return {key: describe(one) for key, one in value.items()}
    if isinstance(value, (list, tuple)):
        return [describe(one) for one in value]
    if dataclasses.is_dataclass(value) and not isinstance(value, type):
        return {field.name: describe(getattr(value, field.name)) for field in dataclasses.fields(value)}
    return type(value).__name__


def fractions(recorder: HookRecorder) -> list[float]:
    """All numbers of a recording that are no integers, in the order of the calls."""

    def of(value: Any) -> Iterator[float]:
        if isinstance(value, float) and not value.is_integer():
            yield value
        elif isinstance(value, (Mapping, list, tuple)):
            for one in value.values() if isinstance(value, Mapping) else value:
                yield from of(one)

    calls = (*recorder.calls, *recorder.transfers, *recorder.evaluated)
    return [number for call in calls for number in of((call.arguments, call.where, call.metrics))]


def first_difference(ours: Sequence[Call], theirs: Sequence[Call], within: float = 0.0) -> str | None:
    """Where one recording leaves the other, in words; None for nowhere."""
    for index, (our, their) in enumerate(zip(ours, theirs, strict=False)):
        for what in ("name", "arguments", "where", "metrics"):
            one, other = getattr(our, what), getattr(their, what)
            if not _same(one, other, within):
                before = ", ".join(call.name for call in theirs[max(0, index - 3) : index])
                return f"call {index} (after {before}), {their.name!r}: {what} is {one}, and should be {other}"
    if len(ours) != len(theirs):
        longer, index = (ours, len(theirs)) if len(ours) > len(theirs) else (theirs, len(ours))
        return f"{len(ours)} calls, and should be {len(theirs)}; the first more is {longer[index].name!r}"
    return None


def _same(one: Any, other: Any, within: float) -> bool:
    if isinstance(one, float) and isinstance(other, float):
        return one == other or math.isclose(one, other, rel_tol=0.0, abs_tol=within)
    if isinstance(one, Mapping) and isinstance(other, Mapping):
        return one.keys() == other.keys() and all(_same(one[key], other[key], within) for key in one)
    if isinstance(one, (list, tuple)) and isinstance(other, (list, tuple)):
        return len(one) == len(other) and all(_same(a, b, within) for a, b in zip(one, other, strict=True))
    return bool(one == other)
