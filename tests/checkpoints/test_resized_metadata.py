"""Metadata with other numbers of rows: a load fills what both have, and leaves the rest as it is."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
import torch.distributed.checkpoint as dcp
from torch.distributed.checkpoint.metadata import ChunkStorageMetadata, MetadataIndex, TensorStorageMetadata

from lightning_pipe.checkpoints.folder_reading import load_state_no_dist
from lightning_pipe.checkpoints.resized_metadata import resized_metadata
from lightning_pipe.checkpoints.safe_reading import SafeFileSystemReader
from lightning_pipe.engine import SetupError


def saved_in(folder: Path, values: torch.Tensor, pieces: int) -> dcp.Metadata:
    """The metadata of a checkpoint of one tensor, cut into so many pieces of equally many rows."""
    rows = len(values) // pieces
    parts = {str(place): part.clone() for place, part in enumerate(values.split(rows))}
    dcp.save({"part": parts}, checkpoint_id=folder, no_dist=True)
    metadata = SafeFileSystemReader(folder).read_metadata()
    places, chunks = {}, []
    for index, info in metadata.storage_data.items():
        offsets = torch.Size([int(index.fqn.rpartition(".")[2]) * rows, *[0] * (values.dim() - 1)])
        places[MetadataIndex("values", offsets)] = info
        chunks.append(ChunkStorageMetadata(offsets, torch.Size([rows, *values.shape[1:]])))
    properties = metadata.state_dict_metadata["part.0"].properties  # type: ignore[union-attr]
    entry = TensorStorageMetadata(properties, values.size(), chunks)
    return dcp.Metadata({"values": entry}, {"values": ("values",)}, places)


def filled(folder: Path, saved: dcp.Metadata, size: list[int], stored_rows: int, rows: int) -> torch.Tensor:
    target = torch.full(size, -1.0)
    resized = resized_metadata(saved, {"values": (target.size(), stored_rows, rows)})
    load_state_no_dist(folder, resized, {"values": target}, None)
    return target


@pytest.mark.parametrize(("rows", "pieces"), [(1, 6), (3, 1), (3, 2), (6, 2), (20, 2)])
def test_the_rows_that_both_have_are_read(rows: int, pieces: int, tmp_path: Path) -> None:
    values = torch.arange(24.0).view(6, 4)
    found = filled(tmp_path, saved_in(tmp_path, values, pieces), [rows, 4], 6, rows)
    both = min(rows, 6)
    assert torch.equal(found[:both], values[:both])
    assert (found[both:] == -1).all()


@pytest.mark.parametrize(("rows", "pieces"), [(1, 3), (1, 6), (5, 3)])
def test_each_block_is_extended_or_cut_at_its_end(rows: int, pieces: int, tmp_path: Path) -> None:
    values = torch.arange(6.0)  # three blocks of two rows
    found = filled(tmp_path, saved_in(tmp_path, values, pieces), [3 * rows], 2, rows).view(3, rows)
    both = min(rows, 2)
    assert torch.equal(found[:, :both], values.view(3, 2)[:, :both])
    assert (found[:, both:] == -1).all()


def test_a_chunk_in_two_blocks_is_refused(tmp_path: Path) -> None:
    saved = saved_in(tmp_path, torch.arange(6.0), 2)
    with pytest.raises(SetupError, match="expected values in chunks of at most 2 rows"):
        resized_metadata(saved, {"values": (torch.Size([9]), 2, 3)})
