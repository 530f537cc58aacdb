"""Ids that travel as int32: half the bytes of the input dist, where every row of the tables has a number that small.

    int64 ids ──► int32 ──► all-to-all ──► int64 ──► lookup

They are int64 again where they arrive, so that a lookup does exactly what it did. An id outside of int32 stays outside
of every table: it becomes the nearest int32, which is no row either, and never wraps to one. The lookup (or
``validate_ids``, which sees the ids before) does with it what it does with any id that has no row.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any, Literal, get_args

import torch
from torchrec.modules.embedding_configs import BaseEmbeddingConfig
from torchrec.sparse.jagged_tensor import KeyedJaggedTensor

from lightning_pipe._compat.torchrec import put_tensors, with_tensors
from lightning_pipe.engine.common.errors import SetupError

__all__ = ["IdsOnWire", "SentAsInt32", "check_ids_on_wire", "sends_int32"]

IdsOnWire = Literal["auto", "int32", "int64"]
_INT32 = torch.iinfo(torch.int32)
# Ids that are narrowed at once: as many, as int64, are there once more meanwhile.
_PIECE = 2**16


def check_ids_on_wire(asked: str) -> None:
    """Raises SetupError for a name that is none of ``IdsOnWire``."""
    if asked not in get_args(IdsOnWire):
        raise SetupError(f"ids on the wire are {asked!r}; needed is one of {', '.join(get_args(IdsOnWire))}")


def sends_int32(name: str, tables: Iterable[BaseEmbeddingConfig], maps_ids: bool, asked: IdsOnWire) -> bool:
    """Whether a sharded module's ids travel as int32: those of all its tables, since they travel in one tensor.

    Args:
        name: the module's.
        tables: its tables.
        maps_ids: whether its ids are no rows yet when they travel, and may be any number.
        asked: ``int64``; ``auto``, for int32 where that can be; ``int32``, to be told where it cannot.

    Raises:
        SetupError: ``int32`` was asked for, and cannot be.
    """
    check_ids_on_wire(asked)
    # One less than there are numbers, so that the largest int32 is a row of no table.
    too_large = [table for table in tables if table.num_embeddings > _INT32.max]
    if asked == "int32" and maps_ids:
        raise SetupError(
            f"ids on the wire are to be int32, but sharded module {name!r} maps ids to rows where its tables lie, and"
            " gets ids of any size; give 'auto', which sends those of this module as int64, or 'int64'"
        )
    if asked == "int32" and too_large:
        found = ", ".join(f"{table.name} has {table.num_embeddings} rows" for table in too_large)
        raise SetupError(
            f"ids on the wire are to be int32, but of the tables of sharded module {name!r} {found}, and int32 numbers"
            f" {_INT32.max} at most; give 'auto', which sends the ids of this module as int64, or put these"
            " tables into a module of their own"
        )
    return asked != "int64" and not maps_ids and not too_large


class SentAsInt32(KeyedJaggedTensor):
    """Features whose ids and lengths travel as int32; TorchRec asks them what was received."""

    @staticmethod
    def of(features: KeyedJaggedTensor) -> KeyedJaggedTensor:
        """The same features with int32 in place of int64; the same object where ids are int32 already."""
        if features.values().dtype != torch.int64:
            return features
        features.length_per_key()  # which the copy takes over, and need not find out
        lengths = features.lengths().int()
        sent = with_tensors(features, values=_narrowed(features.values()), lengths=lengths, offsets=None)
        sent.__class__ = SentAsInt32
        return sent

    @staticmethod
    def dist_init(keys: list[str], tensors: list[torch.Tensor], *arguments: Any, **named: Any) -> KeyedJaggedTensor:
        """What arrived, as if it had been sent as int64; *tensors* is emptied."""
        received: KeyedJaggedTensor = KeyedJaggedTensor.dist_init(keys, tensors, *arguments, **named)
        tensors.clear()  # before they are there once more, and twice as large
        put_tensors(received, values=received.values().long(), lengths=received.lengths().long(), offsets=None)
        return received


def _narrowed(ids: torch.Tensor) -> torch.Tensor:
    narrow = torch.empty_like(ids, dtype=torch.int32)
    for wide, piece in zip(ids.split(_PIECE), narrow.split(_PIECE), strict=True):
        piece.copy_(wide.clamp(_INT32.min, _INT32.max))
    return narrow
