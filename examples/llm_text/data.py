"""Text that every Python installation has: the documentation in ``pydoc_data`` and the standard library's sources."""

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
    """Documentation topics and top-level modules of the standard library, in a fixed order."""
    topics = [pydoc_data.topics.topics[name].encode() for name in sorted(pydoc_data.topics.topics)]
    sources = [path.read_bytes() for path in sorted(Path(sysconfig.get_paths()["stdlib"]).glob("*.py"))]
    texts = topics + sources
    random.Random(0).shuffle(texts)
    return texts


class Windows(Dataset[dict[str, Tensor]]):
    """Windows of a text: ``input_ids`` are bytes, and ``labels`` are the bytes that follow them.

    Args:
        text: one-dimensional tensor with one byte per element.
        length: length of a window in bytes.
        count: number of windows. Their start positions are random.
        seed: seed of the start positions.
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
    """Nine of ten documents for training, the tenth for validation.

    Args:
        batch_size: rows per batch, over all micro-batches (default 16).
        length: length of a row in bytes (default 256).
        steps: number of training batches (default 250).
        validation_rows: number of validation rows (default 64).
    """

    def __init__(self, batch_size: int = 16, length: int = 256, steps: int = 250, validation_rows: int = 64) -> None:
        super().__init__()
        self.batch_size = batch_size
        self.length = length
        self.steps = steps
        self.validation_rows = validation_rows

    def setup(self, stage: str) -> None:
        texts = documents()
        self.validation_text = _joined(texts[::10])
        self.training_text = _joined([text for index, text in enumerate(texts) if index % 10])

    def train_dataloader(self) -> DataLoader[Any]:
        return self._loader(self.training_text, self.batch_size * self.steps, seed=1)

    def val_dataloader(self) -> DataLoader[Any]:
        return self._loader(self.validation_text, self.validation_rows, seed=2)

    def _loader(self, text: Tensor, rows: int, seed: int) -> DataLoader[Any]:
        # The start positions are random, so the loader does not shuffle.
        return DataLoader(Windows(text, self.length, rows, seed), self.batch_size)


def _joined(texts: list[bytes]) -> Tensor:
    return torch.frombuffer(bytearray(b"\n\n".join(texts)), dtype=torch.uint8)
