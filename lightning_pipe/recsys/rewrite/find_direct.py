"""Finds the input of each sharded module by its keys: the only keyed jagged tensor in the batch that has all of them.

Requires only a batch and does not run the step. Suitable if each feature is in exactly one keyed jagged tensor.
"""

from __future__ import annotations

from typing import Any

from torchrec.sparse.jagged_tensor import KeyedJaggedTensor

from lightning_pipe.recsys.batches.pieces import describe, walk
from lightning_pipe.recsys.modules.call_arguments import BatchArgument, CallArguments


def find_directly(batch: Any, features: list[str]) -> CallArguments | str:
    """Return the arguments of a module that looks ``features`` up, or the reason why they are unknown."""
    wanted = set(features)
    jagged = [(path, piece) for path, piece in walk(batch) if isinstance(piece, KeyedJaggedTensor)]
    fitting = [(path, piece) for path, piece in jagged if wanted <= set(piece.keys())]
    exact = [(path, piece) for path, piece in fitting if wanted == set(piece.keys())]
    if len({id(piece) for _, piece in exact}) == 1:
        fitting = exact
    if len({id(piece) for _, piece in fitting}) == 1:
        return CallArguments((BatchArgument(fitting[0][0]),))
    if fitting:
        places = ", ".join(describe(path) for path, _ in fitting)
        return f"several keyed jagged tensors of the batch have its features {sorted(wanted)}: {places}"
    places = ", ".join(f"{describe(path)} with {piece.keys()}" for path, piece in jagged)
    return f"no keyed jagged tensor of the batch has all of its features {sorted(wanted)}; found: {places or 'none'}"
