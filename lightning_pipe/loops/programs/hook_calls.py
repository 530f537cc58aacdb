"""Lightning's hook calls, without the work for hooks that nobody listens to.

Lightning calls some twenty hooks a batch, most of which do nothing, and for each notes its name at the module, through
``nn.Module.__setattr__``, and enters the profiler: a tenth of a millisecond a batch. While a loop of this package runs,
its helpers in ``lightning.pytorch.trainer.call`` are replaced by these, which do the same, but

- pass over methods that are those of Lightning's base classes, whose bodies are empty or give back what they are given;
- note the name where ``__setattr__`` would, directly;
- leave the profiler out, where it is the one that does nothing;
- look at the signature of a method once, and not at every batch.

With a profiler, or Lightning's debug messages, Lightning's own helpers do it all.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import lightning.pytorch as pl
from lightning.pytorch.core import module as module_file
from lightning.pytorch.loops import training_epoch_loop
from lightning.pytorch.plugins.precision import Precision
from lightning.pytorch.profilers import PassThroughProfiler
from lightning.pytorch.strategies import Strategy
from lightning.pytorch.trainer import call
from lightning.pytorch.utilities import signature_utils
from torch import nn

__all__ = ["is_watched", "quick_hook_calls"]

_EMPTY = ("on_train_batch_start", "on_train_batch_end", "on_before_zero_grad", "on_before_backward",
          "on_after_backward", "on_before_optimizer_step", "on_validation_batch_start", "on_validation_batch_end",
          "on_test_batch_start", "on_test_batch_end", "on_predict_batch_start", "on_predict_batch_end")  # fmt: skip
_GIVES_BACK = ("on_before_batch_transfer", "on_after_batch_transfer")
_OF_CALLBACKS = {name: getattr(pl.Callback, name) for name in _EMPTY}
_OF_MODULES = {name: getattr(pl.LightningModule, name) for name in (*_EMPTY, *_GIVES_BACK)}
_CLIPPING = {name: getattr(pl.LightningModule, name) for name in ("configure_gradient_clipping", "clip_gradients")}
_OF_STRATEGIES = {name: getattr(Strategy, name) for name in _EMPTY if hasattr(Strategy, name)}

_HELPERS: dict[str, Callable[..., Any]] = {
    name: getattr(call, name) for name in ("_call_callback_hooks", "_call_lightning_module_hook", "_call_strategy_hook")
}
_in_signature = signature_utils.is_param_in_hook_signature
# What was found in signatures; the functions are held, so that no other takes their place.
_signatures: dict[tuple[Any, ...], bool] = {}
_log = logging.getLogger(call.__name__)
_depth = 0
_debugs = False


@contextmanager
def quick_hook_calls() -> Iterator[None]:
    """In the body Lightning calls hooks as above. May be entered in the body of another; on the main thread."""
    global _depth, _debugs
    _depth += 1
    if _depth == 1:
        _debugs = _log.isEnabledFor(logging.DEBUG)
        for place, name, own, quick in _REPLACED:
            # Somebody else's in Lightning's place stays.
            if getattr(place, name) is own:
                setattr(place, name, quick)
    try:
        yield
    finally:
        _depth -= 1
        if not _depth:
            _signatures.clear()
            for place, name, own, quick in _REPLACED:
                if getattr(place, name) is quick:
                    setattr(place, name, own)


def is_watched(trainer: pl.Trainer) -> bool:
    """Whether somebody wants to know of every call."""
    return _debugs or type(trainer.profiler) is not PassThroughProfiler  # type: ignore[attr-defined]


def _listens(holder: Any, name: str, empty: dict[str, Any]) -> bool:
    """Whether *holder* has a method of its own."""
    return name not in empty or getattr(type(holder), name, None) is not empty[name] or name in vars(holder)


def _note(module: pl.LightningModule, name: str | None) -> None:
    if type(module).__setattr__ is nn.Module.__setattr__:
        module.__dict__["_current_fx_name"] = name
    else:
        module._current_fx_name = name


def _call_callback_hooks(trainer: pl.Trainer, hook_name: str, *args: Any, **kwargs: Any) -> None:
    # At the end of an epoch Lightning calls some callbacks after all others: not in the body, and not often.
    if is_watched(trainer) or "monitoring_callbacks" in kwargs:
        _HELPERS["_call_callback_hooks"](trainer, hook_name, *args, **kwargs)
        return
    callbacks = trainer.callbacks  # type: ignore[attr-defined]
    noted, module, before = False, None, None
    for callback in callbacks:
        if not _listens(callback, hook_name, _OF_CALLBACKS):
            continue
        if not noted:
            noted, module = True, trainer.lightning_module
            if module:
                before = module._current_fx_name
                _note(module, hook_name)
        function = getattr(callback, hook_name)
        if callable(function):
            function(trainer, trainer.lightning_module, *args, **kwargs)
    if module:
        _note(module, before)


def _call_lightning_module_hook(
    trainer: pl.Trainer, hook_name: str, *args: Any, pl_module: pl.LightningModule | None = None, **kwargs: Any
) -> Any:
    module = pl_module or trainer.strategy.lightning_module
    if module is None or is_watched(trainer):
        helper = _HELPERS["_call_lightning_module_hook"]
        return helper(trainer, hook_name, *args, pl_module=pl_module, **kwargs)
    if not _listens(module, hook_name, _OF_MODULES):
        return args[0] if hook_name in _GIVES_BACK and args else None
    if hook_name == "configure_gradient_clipping" and _does_not_clip(trainer, module):
        return None
    function = getattr(module, hook_name)
    if not callable(function):
        return None
    before = module._current_fx_name
    _note(module, hook_name)
    output = function(*args, **kwargs)
    _note(module, before)
    return output


def _call_strategy_hook(trainer: pl.Trainer, hook_name: str, *args: Any, **kwargs: Any) -> Any:
    if is_watched(trainer):
        return _HELPERS["_call_strategy_hook"](trainer, hook_name, *args, **kwargs)
    strategy = trainer.strategy
    if not _listens(strategy, hook_name, _OF_STRATEGIES):
        return None
    module = trainer.lightning_module
    before = module._current_fx_name
    _note(module, hook_name)
    function = getattr(strategy, hook_name)
    if not callable(function):
        return None
    output = function(*args, **kwargs)
    _note(module, before)
    return output


def _is_param_in_hook_signature(hook_fx: Any, param: str, explicit: bool = False, min_args: int | None = None) -> bool:
    key = (getattr(hook_fx, "__func__", hook_fx), param, explicit, min_args)
    found = _signatures.get(key)
    if found is None:
        found = _signatures[key] = _in_signature(hook_fx, param, explicit, min_args)
    return found


def _does_not_clip(trainer: pl.Trainer, module: pl.LightningModule) -> bool:
    """Whether Lightning's own clipping would look at its arguments and do nothing."""
    return (
        trainer.gradient_clip_val is None
        and trainer.gradient_clip_algorithm is None
        and module._fabric is None
        and not _listens(module, "configure_gradient_clipping", _CLIPPING)
        and not _listens(module, "clip_gradients", _CLIPPING)
        and getattr(type(trainer.precision_plugin), "clip_gradients", None) is Precision.clip_gradients
    )


_QUICK: dict[str, Callable[..., Any]] = {
    "_call_callback_hooks": _call_callback_hooks,
    "_call_lightning_module_hook": _call_lightning_module_hook,
    "_call_strategy_hook": _call_strategy_hook,
}
# Where, what, and what takes its place.
_REPLACED: list[tuple[Any, str, Any, Any]] = [
    *((call, name, _HELPERS[name], _QUICK[name]) for name in _QUICK),
    *(
        (place, "is_param_in_hook_signature", _in_signature, _is_param_in_hook_signature)
        for place in (training_epoch_loop, module_file)
    ),
]
