"""Exceptions in users' code, at each place of a training that runs it."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager, nullcontext
from typing import Any
from unittest import mock

import lightning.pytorch as pl
from lightning.pytorch.callbacks import Callback
from torch import nn
from torch.utils.data import DataLoader, Dataset

from lightning_pipe.recsys.rewrite.model_rewrite import ModelRewrite
from tests.scenarios.faults.training import loader

# The batch that has the fault.
AT = 3

# Where, by strategy. A worker thread runs no user's code: what fails there is the project's.
PLACES = {
    "pipeline": ("dataloader worker", "transfer hook", "callback", "forward", "backward"),
    "recsys": ("dataloader worker", "transfer hook", "callback", "forward", "backward", "worker thread"),
    "llm": ("dataloader worker", "transfer hook", "callback", "forward", "backward", "preparation"),
}


class UserError(Exception):
    """Known to nobody but the user."""


class Broken(Dataset[Any]):
    """Data of which nobody can read more than AT rows."""

    def __init__(self, dataset: Any) -> None:
        self.dataset = dataset
        self.read = 0

    def __len__(self) -> int:
        return len(self.dataset)

    def __getitem__(self, index: int) -> Any:
        self.read += 1
        if self.read > AT:
            raise UserError("the user's, in dataloader worker")
        return self.dataset[index]


class _Fault(Callback):
    """Raises in batch AT, once."""

    def __init__(self, place: str, note: Callable[[], None]) -> None:
        self.place, self.note = place, note

    def fail(self, *args: Any) -> None:
        self.note()
        raise UserError(f"the user's, in {self.place}")

    def from_call(self, number: int, original: Callable[..., Any]) -> Callable[..., Any]:
        """The function, which fails from its call of this number on."""
        calls = 0

        def called(*args: Any, **kwargs: Any) -> Any:
            nonlocal calls
            calls += 1
            if calls > number:
                self.fail()
            return original(*args, **kwargs)

        return called

    def on_train_batch_start(self, trainer: pl.Trainer, module: pl.LightningModule, batch: Any, batch_idx: int) -> None:
        if batch_idx != AT:
            return
        layer = next(one for one in module.modules() if isinstance(one, nn.Linear))
        if self.place == "callback":
            self.fail()
        elif self.place == "forward":
            self.hook = layer.register_forward_pre_hook(self.fail)
        elif self.place == "backward":
            self.hook = layer.register_forward_hook(self.fail_in_backward)

    def fail_in_backward(self, layer: nn.Module, inputs: Any, output: Any) -> None:
        output.register_hook(self.fail)

    def on_exception(self, trainer: pl.Trainer, module: pl.LightningModule, exception: BaseException) -> None:
        if self.place in ("forward", "backward"):
            self.hook.remove()


@contextmanager
def broken(
    kind: str, place: str, module: Any, note: Callable[[], None] = lambda: None
) -> Iterator[tuple[Callback, DataLoader[Any]]]:
    """A callback and data for a training of *module*, which fails at one place."""
    fault = _Fault(place, note)
    patch: Any = nullcontext()
    if place == "transfer hook":
        hook = module.on_after_batch_transfer
        patch = mock.patch.object(module, "on_after_batch_transfer", fault.from_call(AT, hook))
    elif place == "preparation":
        # Once for each micro-batch, of which there are four.
        patch = mock.patch.object(module, "loss_tokens", fault.from_call(4 * AT, module.loss_tokens))
    elif place == "worker thread":
        patch = mock.patch.object(ModelRewrite, "wait_inputs", fault.from_call(AT, ModelRewrite.wait_inputs))
    in_worker = place == "dataloader worker"
    with patch:
        yield fault, loader(kind, Broken, num_workers=1) if in_worker else loader(kind)
