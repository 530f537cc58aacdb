"""Hooks of evaluation come in Lightning's order, with its arguments; test_hook_order has those of training."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import lightning.pytorch as pl
import pytest
from lightning.pytorch.callbacks import Callback

from tests.strategies.cases import ADAGRAD, Clicks, loader, recsys, trainer

TRANSFERS = ("on_before_batch_transfer", "transfer_batch_to_device", "on_after_batch_transfer")
# The methods of a LightningModule that Lightning calls around a run.
MODULE_HOOKS = sorted(
    {
        name
        for name in dir(pl.LightningModule)
        if name.startswith("on_") and callable(getattr(pl.LightningModule, name)) and name not in TRANSFERS
    }
    | {"setup", "teardown", "prepare_data", "configure_callbacks", "validation_step", "test_step", "predict_step"}
)
CALLBACK_HOOKS = sorted(name for name in dir(Callback) if name.startswith("on_") or name in ("setup", "teardown"))


class Recording(Clicks):
    """Writes down each of its hooks, with the indices that it gets."""

    def __init__(self) -> None:
        super().__init__(in_backward=ADAGRAD)
        self.calls: list[tuple[Any, ...]] = []


class RecordingCallback(Callback):
    def __init__(self, calls: list[tuple[Any, ...]]) -> None:
        self.calls = calls


def recorded(kind: type, name: str, prefix: str) -> Callable[..., Any]:
    def hook(self: Any, *args: Any, **kwargs: Any) -> Any:
        indices = [value for value in (*args, *kwargs.values()) if isinstance(value, int)]
        self.calls.append((f"{prefix} {name}", indices))
        return getattr(super(kind, self), name)(*args, **kwargs)

    return hook


for _name in MODULE_HOOKS:
    setattr(Recording, _name, recorded(Recording, _name, "module"))
for _name in CALLBACK_HOOKS:
    setattr(RecordingCallback, _name, recorded(RecordingCallback, _name, "callback"))


@pytest.mark.parametrize("entry", ["validate", "test", "predict"])
def test_hooks_of_evaluation_come_in_lightnings_order(entry: str) -> None:
    def calls(strategy: Any) -> list[tuple[Any, ...]]:
        module = Recording()
        used = trainer(strategy, callbacks=[RecordingCallback(module.calls)])
        quiet = {} if entry == "predict" else {"verbose": False}
        getattr(used, entry)(module, loader(8), **quiet)
        return module.calls

    expected = calls("auto")
    assert len(expected) > 10
    assert calls(recsys(optimizer=None)) == expected
