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

from lightning_pipe._compat.torch import tree_leaves
from lightning_pipe._compat.torchrec import put_tensors
from lightning_pipe.engine.common.errors import SetupError
from lightning_pipe.recsys.batches.pieces import walk
from lightning_pipe.recsys.modules.call_arguments import (
    Arguments,
    CallArguments,
    Collection,
    ConstantArgument,
    Postprocessed,
    Source,
)
from lightning_pipe.recsys.rewrite.batch_state import Inputs
from lightning_pipe.recsys.rewrite.sharded_modules import Sharded


class EarlyRelease:
    """Decides which ids are not used again, and releases them.

    Three kinds of features are not released: those with a key that a module looks up inside the step (a module that is
    not pipelined); objects from the loader that the transfer did not copy, which the next epoch may return again; and
    objects that a batch creates at each access, which cannot be reached.
    """

    def __init__(self, sharded: Mapping[str, Sharded]) -> None:
        self._sharded = sharded
        self._of_loaders: WeakSet[KeyedJaggedTensor] = WeakSet()
        self._looked_up_in_step: frozenset[str] | None = None

    def transferred(self, before: Any, after: Any) -> None:
        """Record objects that a batch on the device shares with the loader's batch."""
        given = {id(piece) for _, piece in walk(before) if isinstance(piece, KeyedJaggedTensor)}
        for _, piece in walk(after):
            if isinstance(piece, KeyedJaggedTensor) and id(piece) in given:
                self._of_loaders.add(piece)

    def release(self, inputs: Inputs) -> None:
        """Release the ids and weights of all arguments of pipelined modules, all of which have been sent."""
        pipelined = {name: one.arguments for name, one in self._sharded.items() if one.arguments is not None}
        found: dict[int, tuple[KeyedJaggedTensor, str, list[str]]] = {}
        for name, arguments in pipelined.items():
            for source in _sources(arguments):
                features = source.get(inputs.batch, inputs.postprocessed)
                if not isinstance(features, KeyedJaggedTensor) or not self._is_free(features):
                    continue
                if source.get(inputs.batch, inputs.postprocessed) is features:
                    found.setdefault(id(features), (features, str(source), []))[2].append(name)
        for features, where, names in found.values():
            _release(features, where, list(dict.fromkeys(names)))

    def _is_free(self, features: KeyedJaggedTensor) -> bool:
        if self._looked_up_in_step is None:
            self._looked_up_in_step = frozenset(
                key for one in self._sharded.values() if one.arguments is None for key in one.features or ("",)
            )
        # A module whose features are unknown may look up any feature.
        in_step = self._looked_up_in_step
        return features not in self._of_loaders and "" not in in_step and in_step.isdisjoint(features.keys())


class ReleasedTensor(Tensor):
    """Placeholder for ids or weights: has their shape, dtype and device, and raises an error if values are used."""

    _says: str

    @staticmethod
    def of(tensor: Tensor, says: str, device: torch.device | None = None) -> ReleasedTensor:
        """Make the placeholder of *tensor*, on its device or another; *says* is the message of the error."""
        made: ReleasedTensor = Tensor._make_wrapper_subclass(
            ReleasedTensor, tensor.shape, dtype=tensor.dtype, device=device or tensor.device
        )
        made._says = says
        return made

    @classmethod
    def __torch_function__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func in _ABOUT_THE_FORM:
            with torch._C.DisableTorchFunctionSubclass():
                return func(*args, **(kwargs or {}))
        if func in (Tensor.record_stream, Tensor.__repr__):
            return None if func is Tensor.record_stream else "ReleasedTensor()"
        released = next(leaf for leaf in tree_leaves((args, kwargs)) if isinstance(leaf, ReleasedTensor))
        if func in (Tensor.__getitem__, Tensor.split, torch.split) and args[0] is released:
            # TorchRec splits jagged tensors into single features like this, and their lengths may still be used.
            parts = func(torch.empty(released.shape, dtype=released.dtype, device="meta"), *args[1:], **(kwargs or {}))
            return _like(parts, released)
        raise SetupError(released._says)

    @classmethod
    def __torch_dispatch__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:  # type: ignore[override]
        raise SetupError(next(leaf for leaf in tree_leaves((args, kwargs)) if isinstance(leaf, cls))._says)


_PROPERTIES = "device dtype is_cpu is_cuda is_meta is_nested is_sparse itemsize layout nbytes ndim requires_grad shape"
_ABOUT_THE_FORM = {
    *(getattr(Tensor, name).__get__ for name in _PROPERTIES.split()),
    *(Tensor.size, Tensor.dim, Tensor.numel, Tensor.nelement, Tensor.element_size, Tensor.__len__, Tensor.__hash__),
    *(Tensor.is_floating_point, Tensor.is_complex),
}


def _like(parts: Any, released: ReleasedTensor) -> Any:
    if isinstance(parts, (list, tuple)):
        return type(parts)(_like(part, released) for part in parts)
    return ReleasedTensor.of(parts, released._says, released.device)


def own_objects(call: Arguments) -> Arguments:
    """Return *call* with copies of its keyed jagged tensors over the same tensors, which a release does not affect."""

    def own(value: Any) -> Any:
        return copy.copy(value) if isinstance(value, KeyedJaggedTensor) else value

    positional, named = call
    return tuple(map(own, positional)), {name: own(value) for name, value in named.items()}


def _sources(arguments: CallArguments) -> Iterator[Source]:
    """Yield every place in the batch, and every result of a post-processing module, that *arguments* come from."""
    pending: list[Source] = [*arguments.positional, *arguments.named.values()]
    while pending:
        source = pending.pop()
        if isinstance(source, Collection):
            pending.extend(source.sources)
        elif not isinstance(source, ConstantArgument):
            yield source
            if isinstance(source, Postprocessed):
                pending.extend([*source.arguments.positional, *source.arguments.named.values()])


def _release(features: KeyedJaggedTensor, where: str, names: list[str]) -> None:
    says = (
        f"the ids and weights of {where} were released (free_features_early) after the input dist of sharded module(s)"
        f" {', '.join(map(repr, names))} had sent them, but they are used afterwards. Only keys, lengths, offsets and"
        " batch sizes remain: add a copy of the values to the batch under another name, in the collate function or"
        " on_after_batch_transfer, or turn free_features_early off."
    )
    weights = features.weights_or_none()
    put_tensors(
        features,
        values=ReleasedTensor.of(features.values(), says),
        weights=None if weights is None else ReleasedTensor.of(weights, says),
    )
