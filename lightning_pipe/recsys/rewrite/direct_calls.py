"""Calls of sharded modules that no task made ahead: all steps of a call at once, on the module's process group."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from typing import Any

import torch
import torch.distributed as dist
from torchrec.sparse.jagged_tensor import KeyedJaggedTensor

from lightning_pipe._compat.torch import tree_map_only
from lightning_pipe.engine.common.errors import InputError
from lightning_pipe.engine.ranks.together import on_all_ranks
from lightning_pipe.recsys.kernels.fused import caches_restored, evaluating, prefetches_suspended
from lightning_pipe.recsys.modules.call_arguments import Arguments
from lightning_pipe.recsys.modules.inputs import FeatureForm
from lightning_pipe.recsys.modules.output_order import wait_output
from lightning_pipe.recsys.rewrite.sharded_modules import Sharded

# Name of a module, and the arguments of a call with features replaced by their forms.
Announced = tuple[str, Arguments]


def lookup_mode(*modules: torch.nn.Module) -> AbstractContextManager[None]:
    """Context of lookups. Without grad mode, the kernels' step counters do not advance."""
    return nullcontext() if torch.is_grad_enabled() else evaluating(modules)


def _caches_of_training(modules: list[Any]) -> AbstractContextManager[None]:
    """Context of direct calls. Without grad mode, caches are restored for the backward of an earlier lookup."""
    return nullcontext() if torch.is_grad_enabled() else caches_restored(modules)


def call_now(
    entry: Sharded,
    prepare: Callable[[], Arguments],
    group: dist.ProcessGroup | None,
    announce: Callable[[Announced], None] | None,
) -> Any:
    """Call a sharded module and wait for its output."""
    with lookup_mode(entry.module):
        if announce is None:
            call = on_all_ranks(prepare, "", group, InputError)
        else:
            call = prepare()
            announce((entry.name, tree_map_only(KeyedJaggedTensor, FeatureForm.of, call, is_leaf=_is_features)))
        positional, named = call
        with entry.lock, prefetches_suspended([entry.module]), _caches_of_training([entry.module]):
            return wait_output(entry.forward(*positional, **named))


def join_call(entry: Sharded, forms: Arguments, device: torch.device) -> None:
    """Take part in a call that other ranks have announced, with empty features. The output is discarded."""
    positional, named = tree_map_only(FeatureForm, lambda form: form.empty(device), forms)
    modules = [entry.module]
    with lookup_mode(*modules), entry.lock, prefetches_suspended(modules), _caches_of_training(modules):
        wait_output(entry.forward(*positional, **named))


def _is_features(value: Any) -> bool:
    return isinstance(value, KeyedJaggedTensor)  # without this, tree_map descends into it
