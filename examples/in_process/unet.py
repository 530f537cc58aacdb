"""A small U-Net as an ``nn.Sequential``. The down path stashes its features, and the up path pops them."""

from __future__ import annotations

from typing import Any

import lightning.pytorch as pl
import torch
from torch import Tensor, nn
from torch.nn import functional

from examples.in_process.images import CLASSES
from lightning_pipe.pipe import Namespace, compute_pipe_or_module_loss, isolate, pop, skippable, stash


def block(inputs: int, outputs: int) -> nn.Sequential:
    """Two convolutions with group normalization, which works per image and so does not depend on micro-batches."""
    layers: list[nn.Module] = []
    for channels in (inputs, outputs):
        layers += [
            nn.Conv2d(channels, outputs, 3, padding=1, bias=False),
            nn.GroupNorm(4, outputs),
            nn.ReLU(inplace=True),
        ]
    return nn.Sequential(*layers)


@skippable(stash=["features"])
class Down(nn.Module):
    """A block of the down path: stashes its features for the up path, and returns them at half the size."""

    def __init__(self, inputs: int, outputs: int) -> None:
        super().__init__()
        self.block = block(inputs, outputs)

    def forward(self, image: Tensor) -> Any:
        features = self.block(image)
        yield stash("features", features)
        return functional.max_pool2d(features, 2)


@skippable(pop=["features"])
class Up(nn.Module):
    """A block of the up path: doubles the size, and concatenates the features that the down path stashed."""

    def __init__(self, inputs: int, stashed: int, outputs: int) -> None:
        super().__init__()
        self.block = block(inputs + stashed, outputs)

    def forward(self, image: Tensor) -> Any:
        features = yield pop("features")
        larger = functional.interpolate(image, scale_factor=2, mode="nearest")
        return self.block(torch.cat([larger, features], dim=1))


def unet(width: int, depth: int, classes: int) -> nn.Sequential:
    """A U-Net.

    Args:
        width: number of channels at full size; doubled each time the size is halved.
        depth: number of times the size is halved.
        classes: number of pixel classes.
    """
    widths = [width * 2**level for level in range(depth + 1)]
    levels = [Namespace() for _ in range(depth)]
    down = [
        isolate(Down(1 if level == 0 else widths[level - 1], widths[level]), levels[level]) for level in range(depth)
    ]
    up = [
        isolate(Up(widths[level + 1], widths[level], widths[level]), levels[level]) for level in reversed(range(depth))
    ]
    return nn.Sequential(*down, block(widths[-2], widths[-1]), *up, nn.Conv2d(width, classes, 1))


class UNet(pl.LightningModule):
    """Predicts the class of each pixel.

    Args:
        width: as in :func:`unet` (default 16).
        depth: as in :func:`unet` (default 3).
        learning_rate: learning rate of AdamW (default 3e-3).
    """

    def __init__(self, width: int = 16, depth: int = 3, learning_rate: float = 3e-3) -> None:
        super().__init__()
        self.model = unet(width, depth, CLASSES)
        self.learning_rate = learning_rate

    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        images, classes = batch
        loss = compute_pipe_or_module_loss(self.model, images, classes, nn.CrossEntropyLoss())
        self.log("train_loss", loss, prog_bar=True)
        return loss

    def validation_step(self, batch: Any, batch_idx: int) -> None:
        images, classes = batch
        predicted = self.model(images).argmax(dim=1)
        self.log("val_accuracy", (predicted == classes).float().mean(), prog_bar=True, batch_size=len(images))
        shapes = classes > 0
        self.log("val_accuracy_of_shapes", (predicted == classes)[shapes].float().mean(), batch_size=int(shapes.sum()))

    def configure_optimizers(self) -> torch.optim.Optimizer:
        return torch.optim.AdamW(self.parameters(), lr=self.learning_rate)
