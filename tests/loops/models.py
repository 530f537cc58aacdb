"""Small modules and recorders shared by the tests of the loops."""

from __future__ import annotations

from typing import Any

import lightning.pytorch as pl
import torch
from torch import Tensor, nn
from torch.utils.data import DataLoader, Dataset, IterableDataset

FEATURES = 6


class Rows(Dataset[Tensor]):
    """Fixed rows, the first value of each being its index."""

    def __init__(self, length: int = 24) -> None:
        generator = torch.Generator().manual_seed(7)
        self.rows = torch.randn(length, FEATURES, generator=generator)
        self.rows[:, 0] = torch.arange(length)

    def __len__(self) -> int:
        return len(self.rows)

    def __getitem__(self, index: int) -> Tensor:
        return self.rows[index]


class Stream(IterableDataset[Tensor]):
    """The same rows without a length."""

    def __init__(self, length: int = 24) -> None:
        self.rows = Rows(length).rows

    def __iter__(self) -> Any:
        return iter(self.rows)


class Net(pl.LightningModule):
    """Dropout (so random numbers matter), an LR schedule, logging; remembers the batches it trained and its losses."""

    def __init__(self, dataset: Any = None, batch_size: int = 4, shuffle: bool = True) -> None:
        super().__init__()
        self.layers = nn.Sequential(nn.Linear(FEATURES, 8), nn.Dropout(0.3), nn.ReLU(), nn.Linear(8, 1))
        self.dataset = dataset if dataset is not None else Rows()
        self.batch_size = batch_size
        self.shuffle = shuffle
        self.trained: list[list[float]] = []
        self.losses: list[float] = []

    def training_step(self, batch: Tensor, batch_idx: int) -> Tensor:
        self.trained.append(batch[:, 0].tolist())
        loss = self.layers(batch).square().mean()
        self.losses.append(loss.item())
        self.log("train_loss", loss, on_step=True, on_epoch=True, prog_bar=True)
        return loss

    def validation_step(self, batch: Tensor, batch_idx: int) -> None:
        self.log("val_loss", self.layers(batch).square().mean())

    def configure_optimizers(self) -> Any:
        optimizer = torch.optim.Adam(self.parameters(), lr=0.05)
        scheduler = torch.optim.lr_scheduler.StepLR(optimizer, step_size=2, gamma=0.9)
        return {"optimizer": optimizer, "lr_scheduler": {"scheduler": scheduler, "interval": "step"}}

    def _loader(self, shuffle: bool) -> DataLoader[Tensor]:
        iterable = isinstance(self.dataset, IterableDataset)
        return DataLoader(self.dataset, self.batch_size, shuffle=shuffle and not iterable)

    def train_dataloader(self) -> DataLoader[Tensor]:
        return self._loader(self.shuffle)

    def val_dataloader(self) -> DataLoader[Tensor]:
        return self._loader(False)


def trainer(**options: Any) -> pl.Trainer:
    """A quiet CPU trainer."""
    defaults: dict[str, Any] = {
        "accelerator": "cpu",
        "devices": 1,
        "logger": False,
        "enable_checkpointing": False,
        "enable_progress_bar": False,
        "enable_model_summary": False,
        "max_epochs": 2,
    }
    return pl.Trainer(**{**defaults, **options})
