"""Click logs in Criteo's schema as batches for TorchRec's DLRM."""

from __future__ import annotations

from functools import partial
from pathlib import Path
from typing import Any

import lightning.pytorch as pl
import torch
from torch import Tensor
from torchdata.stateful_dataloader import StatefulDataLoader
from torchrec.datasets.criteo import DEFAULT_CAT_NAMES, DEFAULT_COLUMN_NAMES, DEFAULT_INT_NAMES, DEFAULT_LABEL_NAME
from torchrec.datasets.utils import Batch
from torchrec.sparse.jagged_tensor import KeyedJaggedTensor

from examples.recsys_criteo.generate import TRAINING, VALIDATION, generate
from examples.recsys_criteo.parquet import ParquetBatches, loader
from lightning_pipe.data import JaggedCollator
from lightning_pipe.engine.common.errors import SetupError


def collator(table_rows: int) -> JaggedCollator:
    """Collator of tables with Criteo's 40 columns.

    Args:
        table_rows: number of rows of each embedding table. Ids are taken modulo this number.

    Returns:
        Function from B rows to a ``Batch``: ``dense_features`` float32 [B, 13], the logarithm of 1 + the count;
        ``sparse_features`` with 26 keys and one id for each key and row; ``labels`` float32 [B]. Missing values are 0.
    """
    return JaggedCollator(
        DEFAULT_CAT_NAMES,
        DEFAULT_INT_NAMES,
        DEFAULT_LABEL_NAME,
        defaults=dict.fromkeys([*DEFAULT_CAT_NAMES, *DEFAULT_INT_NAMES], 0),
        make_batch=partial(_batch, table_rows),
    )


def _batch(table_rows: int, dense: Tensor, ids: KeyedJaggedTensor, labels: Tensor) -> Batch:
    folded = KeyedJaggedTensor(ids.keys(), ids.values() % table_rows, lengths=ids.lengths())
    return Batch(torch.log1p(dense.clamp(min=0)), folded, labels)


class CriteoData(pl.LightningDataModule):
    """Reads ``train*.parquet`` and ``val*.parquet``. The model's ``table_rows`` sets the range of ids.

    Args:
        folder: folder of the files (default None: generated files in ``logs/recsys_criteo``).
        batch_size: number of rows per process and step (default 512).
        workers: number of worker processes of each rank's training loader (default 0).
        rows: number of generated training rows (default 393,216). It is not used if *folder* is given.
        validation_rows: number of generated validation rows (default 49,152). It is not used if *folder* is given.
        rows_per_group: number of rows of a generated row group (default 4,096). It is not used if *folder* is given.
        seed: seed of the generated rows, and of the order in which row groups are read (default 1).
    """

    def __init__(
        self,
        folder: str | None = None,
        batch_size: int = 512,
        workers: int = 0,
        rows: int = 393_216,
        validation_rows: int = 49_152,
        rows_per_group: int = 4_096,
        seed: int = 1,
    ) -> None:
        super().__init__()
        self.batch_size, self.workers, self.seed = batch_size, workers, seed
        self._sizes = (rows, validation_rows, rows_per_group, seed)
        self._generated = folder is None
        name = "_".join(map(str, self._sizes))
        self.folder = Path("logs/recsys_criteo") / f"rows_{name}" if folder is None else Path(folder)

    def prepare_data(self) -> None:
        """Generate the files if there is no folder of real data. Runs in one process per node."""
        if self._generated and not (self.folder / f"{VALIDATION}.parquet").exists():
            generate(self.folder, *self._sizes)

    def files(self, part: str) -> list[Path]:
        """Files of the training or validation part, in order of their names.

        Raises:
            SetupError: the folder has no file of this part.
        """
        files = sorted(self.folder.glob(f"{part}*.parquet"))
        if not files:
            raise SetupError(
                f"{self.folder.resolve()} has no file {part}*.parquet; examples.recsys_criteo.convert writes it"
            )
        return files

    def train_dataloader(self) -> StatefulDataLoader:
        return self._loader(TRAINING, self.workers)

    def val_dataloader(self) -> StatefulDataLoader:
        return self._loader(VALIDATION, 0)

    def _loader(self, part: str, workers: int) -> StatefulDataLoader:
        trainer: Any = self.trainer
        collate = collator(trainer.lightning_module.table_rows)
        rows = ParquetBatches(
            self.files(part),
            DEFAULT_COLUMN_NAMES,
            collate,
            self.batch_size,
            trainer.global_rank,
            trainer.world_size,
            self.seed,
        )
        return loader(rows, workers)
