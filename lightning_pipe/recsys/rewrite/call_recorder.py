"""Finds the input of each sharded module by observing the training of the first batch.

The first batch trains serially with a recorder. If an argument of a sharded module's call *is* an object of the
transferred batch, the recorder knows its path. No extra run is needed, and any Python code may be between the batch and
the call.
"""

from __future__ import annotations

from typing import Any

from torchrec.sparse.jagged_tensor import KeyedJaggedTensor

from lightning_pipe.recsys.batches.traversal import BatchPath, is_same_leaf, iterate_leaves
from lightning_pipe.recsys.modules.call_arguments import (
    Arguments,
    BatchArgument,
    CallArguments,
    ConstantArgument,
    Source,
)


class Recorder:
    """Observes the calls of sharded modules during one step."""

    def __init__(self, batch: Any) -> None:
        self._pieces: list[tuple[BatchPath, Any]] = list(
            iterate_leaves(batch)
        )  # keeps them alive, so that their id() stays unique
        self._path_by_id: dict[int, BatchPath] = {}
        for path, piece in self._pieces:
            self._path_by_id.setdefault(id(piece), path)
        self._calls: dict[str, list[tuple[CallArguments | str, Arguments]]] = {}

    def record_call(self, name: str, positional: tuple[Any, ...], named: dict[str, Any]) -> None:
        """Record one call of the sharded module ``name``."""
        sources = [self._find_source_in_batch(value) for value in positional]
        named_sources = {key: self._find_source_in_batch(value) for key, value in named.items()}
        reasons = [text for text in (*sources, *named_sources.values()) if isinstance(text, str)]
        arguments = reasons[0] if reasons else CallArguments(tuple(sources), named_sources)  # type: ignore[arg-type]
        self._calls.setdefault(name, []).append((arguments, (positional, named)))

    def arguments(self, name: str) -> CallArguments | str:
        """Return the arguments of the module's only call, or the reason why they are unknown."""
        calls = self._calls.get(name, [])
        if len(calls) == 1:
            return calls[0][0]
        return f"was called {len(calls)} times in the first step" if calls else "was not called in the first step"

    def get_recorded_arguments(self, name: str) -> Arguments | None:
        """Return the objects that the module's only call passed; None for no call or several calls."""
        calls = self._calls.get(name, [])
        return calls[0][1] if len(calls) == 1 else None

    def _find_source_in_batch(self, value: Any) -> Source | str:
        if value is None:
            return ConstantArgument(None)
        path = self._path_by_id.get(id(value))
        if path is None:
            path = next((path for path, piece in self._pieces if is_same_leaf(piece, value)), None)
        if path is not None:
            return BatchArgument(path)
        keys = f" with the keys {value.keys()}" if isinstance(value, KeyedJaggedTensor) else ""
        return f"its argument, a {type(value).__name__}{keys}, is not an object of the batch: the step made it"
