"""Synthetic images, generated on demand: discs and squares on a noisy background, with the class of each pixel."""

from __future__ import annotations

from typing import Any

import lightning.pytorch as pl
import torch
from torch import Tensor
from torch.utils.data import DataLoader, Dataset

CLASSES = 3  # background, disc, square


class Shapes(Dataset[tuple[Tensor, Tensor]]):
    """Single-channel images of *size* x *size* pixels, with the class of each pixel.

    Args:
        count: number of images.
        size: side length in pixels.
        seed: seed that, together with its index, determines an image.
        noise: standard deviation of the noise added to every pixel (default 0.3).
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
        # Discs and squares are equally bright, so only the shape distinguishes them.
        image = (classes > 0).float() + self.noise * torch.randn(self.size, self.size, generator=generator)
        return image.unsqueeze(0), classes


class ShapesData(pl.LightningDataModule):
    """Training images and separate validation images.

    Args:
        batch_size: images per batch, over all micro-batches (default 16).
        size: side length in pixels, a multiple of 8 because the U-Net halves it three times (default 48).
        steps: number of training batches (default 150).
        validation: number of validation images (default 64).
    """

    def __init__(self, batch_size: int = 16, size: int = 48, steps: int = 150, validation: int = 64) -> None:
        super().__init__()
        self.batch_size, self.size, self.steps, self.validation = batch_size, size, steps, validation

    def train_dataloader(self) -> DataLoader[Any]:
        return DataLoader(Shapes(self.batch_size * self.steps, self.size, seed=1), self.batch_size)

    def val_dataloader(self) -> DataLoader[Any]:
        return DataLoader(Shapes(self.validation, self.size, seed=2), self.batch_size)
