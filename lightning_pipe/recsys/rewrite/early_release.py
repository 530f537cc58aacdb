"""Releases a batch's ids after the input dist has sent them: the step gets looked-up rows, and does not read ids.

    batch.sparse   keys   lengths   offsets   ids        weights         before the input dist
                   keys   lengths   offsets   Released   Released        after: the step passes the same object

The batch's keyed jagged tensors drop their references. Unlike in TorchRec's ``free_features_storage_early``, memory is
not resized, so other references stay valid: another field of the batch over the same memory, a message in flight, or
TorchRec's context of the batch, which gets separate objects.
"""

from __future__ import annotations

import copy
from collections.abc import Iterator, Mapping
from typing import Any
from weakref import WeakSet

import torch
from torch import Tensor
from torchrec.sparse.jagged_tensor import KeyedJaggedTensor

from lightning_pipe._compat.torch import make_tensor_subclass, tree_leaves
from lightning_pipe._compat.torchrec import set_kjt_tensors
from lightning_pipe.engine.common.errors import SetupError
from lightning_pipe.recsys.batches.traversal import iterate_leaves
from lightning_pipe.recsys.modules.call_arguments import (
    Arguments,
    CallArguments,
    ConstantArgument,
    ContainerArgument,
    Postprocessed,
    Source,
)
from lightning_pipe.recsys.rewrite.batch_state import ModuleInputs
from lightning_pipe.recsys.rewrite.sharded_modules import ShardedModuleEntry


class EarlyRelease:
    """Decides which ids are not used again, and releases them.

    Three kinds of features are not released: those with a key that a module looks up inside the step (a module that is
    not pipelined); objects from the loader that the transfer did not copy, which the next epoch may return again; and
    objects that a batch creates at each access, which cannot be reached.
    """

    def __init__(self, sharded: Mapping[str, ShardedModuleEntry]) -> None:
        self._sharded = sharded
        self._of_loaders: WeakSet[KeyedJaggedTensor] = WeakSet()
        self._looked_up_in_step: frozenset[str] | None = None

    def exclude_loader_features(self, loader_batch: Any, device_batch: Any) -> None:
        """Record objects that a batch on the device shares with the loader's batch."""
        loader_ids = {id(piece) for _, piece in iterate_leaves(loader_batch) if isinstance(piece, KeyedJaggedTensor)}
        for _, piece in iterate_leaves(device_batch):
            if isinstance(piece, KeyedJaggedTensor) and id(piece) in loader_ids:
                self._of_loaders.add(piece)

    def release(self, inputs: ModuleInputs) -> None:
        """Release the ids and weights of all arguments of pipelined modules, all of which have been sent."""
        released: dict[int, KeyedJaggedTensor] = {}
        for entry in self._sharded.values():
            for source in () if entry.arguments is None else _iterate_argument_sources(entry.arguments):
                features = source.resolve(inputs.batch, inputs.postprocessed)
                if not isinstance(features, KeyedJaggedTensor) or not self._can_release_features(features):
                    continue
                if source.resolve(inputs.batch, inputs.postprocessed) is features:
                    released[id(features)] = features
        for features in released.values():
            _release_ids_and_weights(features)

    def _can_release_features(self, features: KeyedJaggedTensor) -> bool:
        if self._looked_up_in_step is None:
            self._looked_up_in_step = frozenset(
                key
                for module in self._sharded.values()
                if module.arguments is None
                for key in module.feature_names or ("",)
            )
        # A module whose features are unknown may look up any feature.
        in_step = self._looked_up_in_step
        return features not in self._of_loaders and "" not in in_step and in_step.isdisjoint(features.keys())


# TorchRec splits jagged tensors into single features by these functions, and their lengths may still be used.
_PARTS = (Tensor.__getitem__, Tensor.split, torch.split)


class ReleasedTensor(Tensor):
    """Tensor on the meta device in place of ids or weights: everything but its form and its parts is an error.

    PyTorch itself gives uninitialized memory, without an error, for a tensor on the CPU that a meta tensor indexes.
    """

    @classmethod
    def __torch_function__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func is Tensor.record_stream:
            return None
        error: Exception | None = None
        if all(isinstance(leaf, cls) for leaf in tree_leaves((args, kwargs)) if isinstance(leaf, Tensor)):
            try:
                result = super().__torch_function__(func, types, args, kwargs or {})
                if func in _PARTS or not any(isinstance(leaf, Tensor) for leaf in tree_leaves(result)):
                    return result
            except (NotImplementedError, RuntimeError, TypeError) as without_values:
                error = without_values
        raise SetupError(
            "the ids and weights of a batch were released (free_features_early) after the input dist had sent them, but"
            " they are used afterwards. Only keys, lengths, offsets and batch sizes remain: add a copy of the values to"
            " the batch under another name, in the collate function or on_after_batch_transfer, or turn"
            " free_features_early off."
        ) from error


def _make_released_tensor(tensor: Tensor) -> Tensor:
    # Not as_subclass(), whose result is a view: torch.compile would read its base.
    return make_tensor_subclass(ReleasedTensor, torch.empty_like(tensor, device="meta"))


def shallow_copy_arguments(call: Arguments) -> Arguments:
    """Return *call* with copies of its keyed jagged tensors over the same tensors, which a release does not affect."""

    def copy_features(value: Any) -> Any:
        return copy.copy(value) if isinstance(value, KeyedJaggedTensor) else value

    positional, named = call
    return tuple(map(copy_features, positional)), {name: copy_features(value) for name, value in named.items()}


def _iterate_argument_sources(arguments: CallArguments) -> Iterator[Source]:
    """Yield every place in the batch, and every result of a post-processing module, that *arguments* come from."""
    pending: list[Source] = [*arguments.positional, *arguments.named.values()]
    while pending:
        source = pending.pop()
        if isinstance(source, ContainerArgument):
            pending.extend(source.sources)
        elif not isinstance(source, ConstantArgument):
            yield source
            if isinstance(source, Postprocessed):
                pending.extend([*source.arguments.positional, *source.arguments.named.values()])


def _release_ids_and_weights(features: KeyedJaggedTensor) -> None:
    weights = features.weights_or_none()
    set_kjt_tensors(
        features,
        values=_make_released_tensor(features.values()),
        weights=None if weights is None else _make_released_tensor(weights),
    )
