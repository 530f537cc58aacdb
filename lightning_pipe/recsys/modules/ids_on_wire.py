"""Ids sent as int32, which halves the bytes of the input dist, if the row numbers of all tables fit.

    int64 ids ──► int32 ──► all-to-all ──► int64 ──► lookup

They are converted back to int64 on arrival, so lookups are unchanged. An id outside of the range of int32 stays outside
of every table: it is clamped to the nearest int32, which is no row either, and never wraps to a row. The lookup (or
``validate_ids``, which checks ids before they are sent) treats it as any id without a row.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import Literal

import torch
from torchrec.modules.embedding_configs import BaseEmbeddingConfig

from lightning_pipe.engine.common.errors import SetupError

IdsOnWire = Literal["auto", "int32", "int64"]
_INT32 = torch.iinfo(torch.int32)
# Number of ids that are narrowed at a time, which bounds the temporary int64 copy.
_PIECE = 2**16


def sends_int32(name: str, tables: Iterable[BaseEmbeddingConfig], maps_ids: bool, ids_on_wire: IdsOnWire) -> bool:
    """Return True if a sharded module's ids are sent as int32. All its tables share the type, in one tensor."""
    # One less than there are int32 numbers, so that the largest int32 is a row of no table.
    too_large = [table for table in tables if table.num_embeddings > _INT32.max]
    if ids_on_wire == "int32" and maps_ids:
        raise SetupError(
            f"wire.ids is int32, but sharded module {name!r} maps ids to rows after they are sent, so they may be of"
            " any size. Use 'auto', which sends the ids of this module as int64, or 'int64'."
        )
    if ids_on_wire == "int32" and too_large:
        row_counts = ", ".join(f"{table.name} has {table.num_embeddings} rows" for table in too_large)
        raise SetupError(
            f"wire.ids is int32, which can number {_INT32.max} rows at most, but in sharded module {name!r}"
            f" {row_counts}. Use 'auto', which sends the ids of this module as int64, or put these tables"
            " into a separate module."
        )
    return ids_on_wire != "int64" and not maps_ids and not too_large


def narrow_ids(ids: torch.Tensor) -> torch.Tensor:
    """Return int64 *ids* as int32, each one clamped to the nearest."""
    narrow = torch.empty_like(ids, dtype=torch.int32)
    for wide, piece in zip(ids.split(_PIECE), narrow.split(_PIECE), strict=True):
        piece.copy_(wide.clamp(_INT32.min, _INT32.max))
    return narrow
