"""Text that is on every machine with Python: the documentation in ``pydoc_data``, the standard library's sources."""

from __future__ import annotations

import pydoc_data.topics
import random
import sysconfig
from pathlib import Path
from typing import Any

import lightning.pytorch as pl
import torch
from torch import Tensor
from torch.utils.data import DataLoader, Dataset


def documents() -> list[bytes]:
    """The topics of the documentation, and the top-level modules of the standard library, in a fixed order."""
    topics = [pydoc_data.topics.topics[name].encode() for name in sorted(pydoc_data.topics.topics)]
    sources = [path.read_bytes() for path in sorted(Path(sysconfig.get_paths()["stdlib"]).glob("*.py"))]
    found = topics + sources
    random.Random(0).shuffle(found)
    return found


class Windows(Dataset[dict[str, Tensor]]):
    """Stretches of a text: ``input_ids`` are bytes, ``labels`` the byte that follows each.

    Args:
        text: one-dimensional, a byte an element.
        length: of a stretch, in bytes.
        count: how many; they start at places drawn from ``seed``.
        seed: of the places.
    """

    def __init__(self, text: Tensor, length: int, count: int, seed: int) -> None:
        self.text = text
        self.length = length
        generator = torch.Generator().manual_seed(seed)
        self.starts = torch.randint(len(text) - length - 1, (count,), generator=generator).tolist()

    def __len__(self) -> int:
        return len(self.starts)

    def __getitem__(self, index: int) -> dict[str, Tensor]:
        stretch = self.text[self.starts[index] : self.starts[index] + self.length + 1].long()
        return {"input_ids": stretch[:-1], "labels": stretch[1:]}


class PythonText(pl.LightningDataModule):
    """Nine documents of ten to train on, the tenth to validate.

    Args:
        batch_size: rows of a batch, of all micro-batches together.
        length: bytes of a row.
        steps: batches to train on.
        validation_rows: rows to validate on.
    """

    def __init__(self, batch_size: int = 16, length: int = 256, steps: int = 250, validation_rows: int = 64) -> None:
        super().__init__()
        self.batch_size = batch_size
        self.length = length
        self.steps = steps
        self.validation_rows = validation_rows

    def setup(self, stage: str) -> None:
        found = documents()
        self.validation_text = _joined(found[::10])
        self.training_text = _joined([text for index, text in enumerate(found) if index % 10])

    def train_dataloader(self) -> DataLoader[Any]:
        return self._loader(self.training_text, self.batch_size * self.steps, seed=1)

    def val_dataloader(self) -> DataLoader[Any]:
        return self._loader(self.validation_text, self.validation_rows, seed=2)

    def _loader(self, text: Tensor, rows: int, seed: int) -> DataLoader[Any]:
        # The places are drawn already: the order need not be.
        return DataLoader(Windows(text, self.length, rows, seed), self.batch_size)


def _joined(texts: list[bytes]) -> Tensor:
    return torch.frombuffer(bytearray(b"\n\n".join(texts)), dtype=torch.uint8)
