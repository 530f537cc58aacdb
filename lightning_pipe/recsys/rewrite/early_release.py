"""Releases a batch's ids after the input dist has sent them: the step gets looked-up rows, and does not read ids.

    batch.sparse   keys   lengths   offsets   ids    weights         before the input dist
                   keys   lengths   offsets   meta   meta            after: the step passes the same object

The batch's keyed jagged tensors drop their references. Unlike in TorchRec's ``free_features_storage_early``, memory is
not resized, so other references stay valid: another field of the batch over the same memory, a message in flight, or
TorchRec's context of the batch, which gets separate objects. Tensors on the meta device take their place: they have the
shape and type, and no values, so PyTorch refuses to compute with them and with others.
"""

from __future__ import annotations

import copy
from collections.abc import Iterator, Mapping
from typing import Any
from weakref import WeakSet

from torchrec.sparse.jagged_tensor import KeyedJaggedTensor

from lightning_pipe._compat.torchrec import put_tensors
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
        pipelined = [one.arguments for one in self._sharded.values() if one.arguments is not None]
        for source in (source for arguments in pipelined for source in _sources(arguments)):
            features = source.get(inputs.batch, inputs.postprocessed)
            if not isinstance(features, KeyedJaggedTensor) or not self._is_free(features):
                continue
            if source.get(inputs.batch, inputs.postprocessed) is features:
                weights = features.weights_or_none()
                put_tensors(
                    features,
                    values=features.values().to("meta"),
                    weights=None if weights is None else weights.to("meta"),
                )

    def _is_free(self, features: KeyedJaggedTensor) -> bool:
        if self._looked_up_in_step is None:
            self._looked_up_in_step = frozenset(
                key for one in self._sharded.values() if one.arguments is None for key in one.features or ("",)
            )
        # A module whose features are unknown may look up any feature.
        in_step = self._looked_up_in_step
        return features not in self._of_loaders and "" not in in_step and in_step.isdisjoint(features.keys())


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
