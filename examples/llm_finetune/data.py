"""Sections of Python's language reference, which every installation has, as packed documents of bytes."""

from __future__ import annotations

import pydoc_data.topics
import random
import re
from typing import Any

import lightning.pytorch as pl
from torchdata.stateful_dataloader import StatefulDataLoader

from lightning_pipe.llm.batches.packing import PackedDocuments


def documents() -> list[list[int]]:
    """Paragraphs that begin at the margin, each with the indented ones after it, as bytes, in a fixed order."""
    topics = [pydoc_data.topics.topics[name] for name in sorted(pydoc_data.topics.topics)]
    sections = [list(section.encode()) for topic in topics for section in re.split(r"\n\n(?=\S)", topic)]
    random.Random(0).shuffle(sections)
    return sections


class PackedTopics(pl.LightningDataModule):
    """Nine of ten sections for training, the tenth for validation.

    Args:
        length: tokens of a row (default 256).
        batch_size: rows of a batch, over all micro-batches (default 16).
    """

    def __init__(self, length: int = 256, batch_size: int = 16) -> None:
        super().__init__()
        self.length = length
        self.batch_size = batch_size

    def train_dataloader(self) -> StatefulDataLoader[Any]:
        return self._loader([section for index, section in enumerate(documents()) if index % 10], seed=0)

    def val_dataloader(self) -> StatefulDataLoader[Any]:
        return self._loader(documents()[::10])

    def _loader(self, sections: list[list[int]], seed: int | None = None) -> StatefulDataLoader[Any]:
        assert self.trainer is not None
        # Under Lightning's own strategy for one device, there are no ranks.
        share = getattr(self.trainer.strategy, "distributed_sampler_kwargs", {})
        batches = PackedDocuments(sections, self.length, self.batch_size, seed=seed, **share)
        return StatefulDataLoader(batches, batch_size=None)
