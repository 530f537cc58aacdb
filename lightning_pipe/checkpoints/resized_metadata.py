"""Metadata of a checkpoint as if some tensors had been saved with other numbers of rows.

``torch.distributed.checkpoint`` reads the overlap of stored chunks with the chunks to fill, but refuses tensors of
another size. With this metadata, a load fills the rows that both have and leaves further rows unchanged.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace

import torch
import torch.distributed.checkpoint as dcp
from torch.distributed.checkpoint.metadata import ChunkStorageMetadata, MetadataIndex

from lightning_pipe.engine import SetupError


def resized_metadata(saved: dcp.Metadata, tensors: Mapping[str, tuple[torch.Size, int, int]]) -> dcp.Metadata:
    """Return a copy of the metadata in which the named tensors have other numbers of rows.

    By key: the size of the tensor to fill, and the rows of a block in the checkpoint and in that tensor. A tensor is
    one block, or one per column shard of a table (states with a number per row), each extended or cut at its end.
    """
    entries = dict(saved.state_dict_metadata)
    places = {index: info for index, info in saved.storage_data.items() if index.fqn not in tensors}
    for key, (size, stored_rows, rows) in tensors.items():
        entry: dcp.metadata.TensorStorageMetadata = entries[key]  # type: ignore[assignment]
        chunks = []
        for chunk in entry.chunks:
            block, first = divmod(chunk.offsets[0], stored_rows)
            if first + chunk.sizes[0] > stored_rows:
                raise SetupError(f"expected {key} in chunks of at most {stored_rows} rows, got {chunk}")
            length = min(chunk.sizes[0], rows - first)
            if length > 0:
                offsets = torch.Size([block * rows + first, *chunk.offsets[1:]])
                chunks.append(ChunkStorageMetadata(offsets, torch.Size([length, *chunk.sizes[1:]])))
                places[MetadataIndex(key, offsets)] = saved.storage_data[MetadataIndex(key, chunk.offsets)]
        entries[key] = replace(entry, size=size, chunks=chunks)
    return replace(saved, state_dict_metadata=entries, storage_data=places)
