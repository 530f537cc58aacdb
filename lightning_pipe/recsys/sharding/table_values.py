"""Initial values of sharded tables, and gathering of whole tables.

TorchRec gives every sharded table new random values. Here a table keeps the values that it holds on rank 0. A table on
the meta device is filled by its ``init_fn``, with values that depend on the seed, the table's name and the row, but not
on the number of ranks or the sharding. In neither case does a rank hold a second copy of the whole table.
"""

from __future__ import annotations

import hashlib
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist
from torch import nn

from lightning_pipe._compat.torch import ShardedTensor, forget_optimizers_in_backward
from lightning_pipe.engine.common.errors import SetupError
from lightning_pipe.engine.ranks.object_collectives import all_gather_objects
from lightning_pipe.recsys.modules.tables import Table

BLOCK_BYTES = 64 * 2**20  # rows filled or sent at a time


@dataclass(frozen=True)
class LocalShard:
    """A part of a tensor that this rank holds."""

    offsets: tuple[int, ...]  # position in the whole tensor, one number per dimension
    values: torch.Tensor  # a view of the storage that the kernel trains


def local_shards(tensor: torch.Tensor | ShardedTensor) -> list[LocalShard]:
    """This rank's parts of a tensor from one of TorchRec's state dicts: sharded, or whole on every rank."""
    if isinstance(tensor, ShardedTensor):
        return [
            LocalShard(tuple(shard.metadata.shard_offsets), shard.tensor.detach()) for shard in tensor.local_shards()
        ]
    return [LocalShard((0,) * tensor.dim(), tensor.detach())]


def _copy_rows(block: torch.Tensor, first_row: int, pieces: Iterable[LocalShard]) -> None:
    """Copy the overlap of each piece with ``block`` (from row ``first_row`` on, all columns) into the piece."""
    for piece in pieces:
        rows, columns = piece.values.shape
        row, column = piece.offsets
        begin, end = max(row, first_row), min(row + rows, first_row + block.size(0))
        if begin < end:
            piece.values[begin - row : end - row].copy_(
                block[begin - first_row : end - first_row, column : column + columns]
            )


def _iterate_row_blocks(rows: int, columns: int, dtype: torch.dtype) -> Iterator[tuple[int, int]]:
    step = max(1, BLOCK_BYTES // max(1, columns * dtype.itemsize))
    for begin in range(0, rows, step):
        yield begin, min(rows, begin + step)


@torch.no_grad()
def copy_table_to_shards(
    source: torch.Tensor | None,
    shape: tuple[int, int],
    dtype: torch.dtype,
    pieces: list[LocalShard],
    device: torch.device,
    group: dist.ProcessGroup,
) -> None:
    """Send rank 0's table to the ranks that hold its pieces, at most 64 MiB at a time."""
    for begin, end in _iterate_row_blocks(*shape, dtype):
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


def free_table(original: nn.Parameter) -> None:
    """Free the memory of an unsharded table, whose parameter TorchRec and torch's in-backward optimizers keep alive."""
    original.data = original.data.new_empty(0)
    forget_optimizers_in_backward(original)


@torch.no_grad()
def fill_with_init_fn(table: Table, dtype: torch.dtype, pieces: list[LocalShard], seed: int) -> None:
    """Fill this rank's pieces by the table's ``init_fn`` with ``seed``.

    ``init_fn`` is called on CPU, for blocks of whole rows of at most 64 MiB, each with a different seed, so a rank only
    draws the blocks that overlap with its pieces. Changes the global random state, which the caller must restore.
    """
    config = table.config
    for index, (begin, end) in enumerate(_iterate_row_blocks(config.num_embeddings, config.embedding_dim, dtype)):
        if not any(p.offsets[0] < end and begin < p.offsets[0] + p.values.size(0) for p in pieces):
            continue
        digest = hashlib.sha256(f"{seed}/{table.name}/{index}".encode()).digest()
        torch.manual_seed(int.from_bytes(digest[:8], "little") >> 1)
        block = torch.empty(end - begin, config.embedding_dim, dtype=dtype)
        if config.init_fn is None:
            block.uniform_(config.get_weight_init_min(), config.get_weight_init_max())
        else:
            try:
                config.init_fn(block)
            except Exception as error:  # any exception of the user's function
                raise SetupError(
                    f"the init_fn of table {table.name}, which is on the meta device, must fill any block of whole"
                    f" rows in place, but raised {type(error).__name__}: {error} for a block of the shape"
                    f" {list(block.shape)}. Correct it, or create the table with its values on a real device."
                ) from error
        _copy_rows(block, begin, pieces)


@torch.no_grad()
def full_tensor(
    tensor: torch.Tensor | ShardedTensor | None, group: dist.ProcessGroup, device: torch.device
) -> torch.Tensor:
    """Gather a whole tensor on every rank of ``group``. Every rank calls this function."""
    kinds: list[Any] = all_gather_objects(None if tensor is None else _get_tensor_metadata(tensor), group)
    shape, dtype, is_whole = next(kind for kind in kinds if kind is not None)
    if is_whole:
        assert isinstance(tensor, torch.Tensor)
        return tensor.detach().clone()
    result = torch.zeros(shape, dtype=dtype, device=device)
    for piece in [] if tensor is None else local_shards(tensor):
        index = tuple(
            slice(offset, offset + size) for offset, size in zip(piece.offsets, piece.values.shape, strict=True)
        )
        result[index] = piece.values
    dist.all_reduce(result, group=group)
    return result


def _get_tensor_metadata(tensor: torch.Tensor | ShardedTensor) -> tuple[tuple[int, ...], torch.dtype, bool]:
    """Return the shape, the type, and True if every rank holds the whole tensor."""
    if isinstance(tensor, ShardedTensor):
        metadata = tensor.metadata()
        return tuple(metadata.size), metadata.tensor_properties.dtype, False
    return tuple(tensor.shape), tensor.dtype, True
