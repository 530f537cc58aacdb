"""The values of sharded tables: where they come from, and how to read a whole one.

TorchRec gives every sharded table new random values. Here a table keeps the values it held, rank 0's on every rank,
and a table on the meta device gets the values of its ``init_fn``, which depend on the seed, the table's name and the
row, and neither on the number of ranks nor on how it is sharded. No rank ever holds a second whole table for that.
"""

from __future__ import annotations

import hashlib
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist
from torch import nn

from lightning_pipe._compat.torch import ShardedTensor
from lightning_pipe.engine.ranks.together import gather
from lightning_pipe.recsys.modules.tables import Table

__all__ = ["LocalShard", "copy_values", "fill_with_init_fn", "full_tensor", "pieces_of", "release"]

BLOCK_BYTES = 64 * 2**20  # rows filled or sent at a time


@dataclass(frozen=True)
class LocalShard:
    """A part of a tensor that this rank holds.

    Attributes:
        offsets: where the part begins in the whole tensor, one number a dimension.
        values: the part, a view of the storage that the kernel trains.
    """

    offsets: tuple[int, ...]
    values: torch.Tensor


def pieces_of(tensor: torch.Tensor | ShardedTensor) -> list[LocalShard]:
    """This rank's parts of a tensor as TorchRec's state dicts hold it: sharded, or whole on every rank."""
    if isinstance(tensor, ShardedTensor):
        return [
            LocalShard(tuple(shard.metadata.shard_offsets), shard.tensor.detach()) for shard in tensor.local_shards()
        ]
    return [LocalShard((0,) * tensor.dim(), tensor.detach())]


def _copy_rows(block: torch.Tensor, first_row: int, pieces: Iterable[LocalShard]) -> None:
    """Copies the part of ``block`` (rows ``first_row`` on, all columns) that each piece covers."""
    for piece in pieces:
        rows, columns = piece.values.shape
        row, column = piece.offsets
        begin, end = max(row, first_row), min(row + rows, first_row + block.size(0))
        if begin < end:
            piece.values[begin - row : end - row].copy_(
                block[begin - first_row : end - first_row, column : column + columns]
            )


def _blocks(rows: int, columns: int, dtype: torch.dtype) -> Iterator[tuple[int, int]]:
    step = max(1, BLOCK_BYTES // max(1, columns * dtype.itemsize))
    for begin in range(0, rows, step):
        yield begin, min(rows, begin + step)


@torch.no_grad()
def copy_values(
    source: torch.Tensor | None,
    shape: tuple[int, int],
    dtype: torch.dtype,
    pieces: list[LocalShard],
    device: torch.device,
    group: dist.ProcessGroup,
) -> None:
    """Sends rank 0's table to the ranks that hold its pieces, at most 64 MiB at a time.

    Args:
        source: the whole table, read on rank 0 only, of ``shape`` and ``dtype``.
        pieces: this rank's pieces; overwritten.
        device: where a block is held while it is sent.
        group: called by every rank of it, in the same order.
    """
    for begin, end in _blocks(*shape, dtype):
        if group.size() == 1:
            assert source is not None
            _copy_rows(source[begin:end], begin, pieces)
            continue
        if group.rank() == 0:
            assert source is not None
            block = source[begin:end].detach().to(device).contiguous()
        else:
            block = torch.empty(end - begin, shape[1], dtype=dtype, device=device)
        dist.broadcast(block, group_src=0, group=group)
        _copy_rows(block, begin, pieces)


def release(original: nn.Parameter) -> None:
    """Frees what an unsharded table held: TorchRec, and torch's in-backward optimisers, keep the parameter alive."""
    original.data = original.data.new_empty(0)
    original._in_backward_optimizers = []  # type: ignore[attr-defined]


@torch.no_grad()
def fill_with_init_fn(table: Table, dtype: torch.dtype, pieces: list[LocalShard], seed: int) -> None:
    """Fills this rank's pieces with what the table's ``init_fn`` gives for ``seed``.

    ``init_fn`` is called for whole rows, on CPU, a block of at most 64 MiB at a time, each with a seed of its own, so
    a rank draws only the blocks that it holds a part of. Changes the global random state; the caller keeps it.
    """
    config = table.config
    for index, (begin, end) in enumerate(_blocks(config.num_embeddings, config.embedding_dim, dtype)):
        if not any(p.offsets[0] < end and begin < p.offsets[0] + p.values.size(0) for p in pieces):
            continue
        digest = hashlib.sha256(f"{seed}/{table.name}/{index}".encode()).digest()
        torch.manual_seed(int.from_bytes(digest[:8], "little") >> 1)
        block = torch.empty(end - begin, config.embedding_dim, dtype=dtype)
        if config.init_fn is None:
            block.uniform_(config.get_weight_init_min(), config.get_weight_init_max())
        else:
            config.init_fn(block)
        _copy_rows(block, begin, pieces)


@torch.no_grad()
def full_tensor(
    tensor: torch.Tensor | ShardedTensor | None, group: dist.ProcessGroup, device: torch.device
) -> torch.Tensor:
    """Gathers a whole tensor on every rank of ``group``; every rank calls it.

    Args:
        tensor: what this rank's state dict holds: sharded, whole, or None on a rank that holds no part of it.
        device: where the result lives, and what ``group`` communicates.
    """
    kinds: list[Any] = gather(None if tensor is None else _description(tensor), group)
    shape, dtype, is_whole = next(kind for kind in kinds if kind is not None)
    if is_whole:
        assert isinstance(tensor, torch.Tensor)
        return tensor.detach().clone()
    result = torch.zeros(shape, dtype=dtype, device=device)
    for piece in [] if tensor is None else pieces_of(tensor):
        index = tuple(
            slice(offset, offset + size) for offset, size in zip(piece.offsets, piece.values.shape, strict=True)
        )
        result[index] = piece.values
    dist.all_reduce(result, group=group)
    return result


def _description(tensor: torch.Tensor | ShardedTensor) -> tuple[tuple[int, ...], torch.dtype, bool]:
    """Shape, type and whether every rank holds the whole tensor."""
    if isinstance(tensor, ShardedTensor):
        metadata = tensor.metadata()
        return tuple(metadata.size), metadata.tensor_properties.dtype, False
    return tuple(tensor.shape), tensor.dtype, True
