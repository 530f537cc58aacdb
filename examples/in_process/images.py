"""Images that are made as they are asked for: discs and squares on a noisy ground, and where each is."""

from __future__ import annotations

from typing import Any

import lightning.pytorch as pl
import torch
from torch import Tensor
from torch.utils.data import DataLoader, Dataset

CLASSES = 3  # ground, disc, square


class Shapes(Dataset[tuple[Tensor, Tensor]]):
    """Images of one channel, *size* x *size*, and the class of each of their pixels.

    Args:
        count: how many.
        size: of a side, in pixels.
        seed: an image follows from this and its index.
        noise: standard deviation of what is added to every pixel.
    """

    def __init__(self, count: int, size: int, seed: int, noise: float = 0.3) -> None:
        self.count, self.size, self.seed, self.noise = count, size, seed, noise

    def __len__(self) -> int:
        return self.count

    def __getitem__(self, index: int) -> tuple[Tensor, Tensor]:
        generator = torch.Generator().manual_seed(self.seed * 1_000_003 + index)
        rows = torch.arange(self.size).view(-1, 1)
        columns = torch.arange(self.size).view(1, -1)
        classes = torch.zeros(self.size, self.size, dtype=torch.long)
        for _ in range(int(torch.randint(1, 5, (), generator=generator))):
            row, column = torch.randint(0, self.size, (2,), generator=generator).tolist()
            radius = int(torch.randint(self.size // 10, self.size // 4, (), generator=generator))
            if torch.rand((), generator=generator) < 0.5:
                classes[(rows - row).square() + (columns - column).square() <= radius**2] = 1
            else:
                classes[torch.maximum((rows - row).abs(), (columns - column).abs()) <= radius] = 2
        # A disc is as bright as a square: only its form tells.
        image = (classes > 0).float() + self.noise * torch.randn(self.size, self.size, generator=generator)
        return image.unsqueeze(0), classes


class ShapesData(pl.LightningDataModule):
    """Images to train on, and others to validate.

    Args:
        batch_size: images of a batch, of all micro-batches together.
        size: of a side, in pixels; a multiple of 8, for three halvings.
        steps: batches to train on.
        validation: images to validate on.
    """

    def __init__(self, batch_size: int = 16, size: int = 48, steps: int = 150, validation: int = 64) -> None:
        super().__init__()
        self.batch_size, self.size, self.steps, self.validation = batch_size, size, steps, validation

    def train_dataloader(self) -> DataLoader[Any]:
        return DataLoader(Shapes(self.batch_size * self.steps, self.size, seed=1), self.batch_size)

    def val_dataloader(self) -> DataLoader[Any]:
        return DataLoader(Shapes(self.validation, self.size, seed=2), self.batch_size)
