"""Whole histories as batches: jagged features of very different lengths."""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Sequence
from typing import Any, Literal, TypedDict

import numpy as np
import torch
from numpy.typing import NDArray
from torch.utils.data import DataLoader, Dataset
from torchrec.sparse.jagged_tensor import KeyedJaggedTensor

from examples.recsys_movielens.data import RatingFiles
from examples.recsys_sequences.histories import Histories, Part, by_user

# Items of the history, their stars, and the candidates that the next item is compared with.
SPARSE_KEYS = ("item", "stars", "candidate")


class HistoryBatch(TypedDict, total=False):
    """A batch of B users.

    Keys:
        sparse: ids with the keys ``SPARSE_KEYS``. ``item`` and ``stars`` are as long as the history. In training, a
            user's candidates are negatives. In evaluation, the concatenated candidates of all users are the catalog.
        seconds: time of each rating, under the key ``seconds``.
        target: number of the next item, int64 [B]. Only in evaluation, like the keys that follow.
        seen: True for the items of the whole history, regardless of its length, bool [B, items].
        weight: 1, or 0 for a user who only pads the last batch, float32 [B].
    """

    sparse: KeyedJaggedTensor
    seconds: KeyedJaggedTensor
    target: torch.Tensor
    seen: torch.Tensor
    weight: torch.Tensor


class _Users(Dataset[HistoryBatch]):
    """Dataset with one user's history per row. A whole batch is gathered in one operation."""

    def __init__(self, histories: Histories, part: Part | Literal["train"], max_length: int, length: int) -> None:
        self._histories = histories
        self._part = part
        self._max_length = max_length
        self._length = length

    def __len__(self) -> int:
        return self._length

    def __getitem__(self, index: int) -> HistoryBatch:
        return self.__getitems__([index])

    @abstractmethod
    def __getitems__(self, indices: Sequence[int]) -> HistoryBatch:
        """Batch of the rows *indices*. ``DataLoader`` calls this with all indices of a batch."""

    def _gather(self, users: Sequence[int], candidates: torch.Tensor, counts: torch.Tensor) -> HistoryBatch:
        """Batch of the histories of *users*, with *counts* of the *candidates*, which are item numbers, per user."""
        histories = self._histories
        slices = [histories.rows(user, self._part, self._max_length) for user in users]
        rows = torch.from_numpy(np.concatenate([np.arange(span.start, span.stop) for span in slices]))
        lengths = torch.tensor([span.stop - span.start for span in slices])
        item, stars, seconds, ids = map(
            torch.from_numpy, (histories.item, histories.stars, histories.seconds, histories.ids)
        )
        return {
            "sparse": KeyedJaggedTensor(
                list(SPARSE_KEYS),
                torch.cat([ids[item[rows]], stars[rows], ids[candidates]]),
                lengths=torch.cat([lengths, lengths, counts]),
            ),
            "seconds": KeyedJaggedTensor(["seconds"], seconds[rows], lengths=lengths),
        }


class TrainingUsers(_Users):
    """Training histories, each with separate negatives, drawn uniformly from all items.

    A user's loss does not depend on the other users in the batch or on the rank.

    Args:
        histories: histories of all users.
        max_length: maximum length of a history; the latest ratings are used.
        negatives: number of items drawn per user, from torch's random stream.
    """

    def __init__(self, histories: Histories, max_length: int, negatives: int) -> None:
        super().__init__(histories, "train", max_length, histories.users)
        self._negatives = negatives

    def __getitems__(self, indices: Sequence[int]) -> HistoryBatch:
        drawn = torch.randint(self._histories.items, (len(indices) * self._negatives,))
        return self._gather(indices, drawn, torch.full((len(indices),), self._negatives))


class EvaluationUsers(_Users):
    """Histories with the next item as the target, and the whole catalog as candidates.

    Args:
        histories: histories of all users.
        part: part whose item is the target.
        max_length: maximum length of a history; the latest ratings are used.
        multiple_of: the number of rows is padded to a multiple of this (default 1), so that ranks have equal shares.
            Lightning's sampler would repeat users and count them twice.
    """

    def __init__(self, histories: Histories, part: Part, max_length: int, multiple_of: int = 1) -> None:
        super().__init__(histories, part, max_length, -(-histories.users // multiple_of) * multiple_of)
        self._held_out: Part = part

    def __getitems__(self, indices: Sequence[int]) -> HistoryBatch:
        histories, part = self._histories, self._held_out
        users = [index % histories.users for index in indices]
        share, more = divmod(histories.items, len(users))
        counts = torch.tensor([share + (row < more) for row in range(len(users))])
        batch = self._gather(users, torch.arange(histories.items), counts)
        batch["target"] = torch.tensor([histories.target(user, part) for user in users])
        batch["seen"] = torch.from_numpy(seen(histories, users, part))
        batch["weight"] = torch.tensor([float(index < histories.users) for index in indices])
        return batch


def seen(histories: Histories, users: Sequence[int], part: Part) -> NDArray[np.bool_]:
    """Mask of the items that each user rated before the target of *part*, without the target, bool [users, items]."""
    result = np.zeros((len(users), histories.items), dtype=bool)
    for row, user in enumerate(users):
        result[row, histories.item[histories.rows(user, part)]] = True
        result[row, histories.target(user, part)] = False
    return result


class HistoryData(RatingFiles):
    """MovieLens-100K as one history per user. Each user's last two ratings are held out.

    Args:
        batch_size: users per process and step (default 32).
        max_length: maximum length of a history (default 100); the latest ratings are used.
        negatives: number of negative items per user in training (default 128).
        data_dir: as in :class:`~examples.recsys_movielens.data.MovieLensData`.
    """

    def __init__(
        self, batch_size: int = 32, max_length: int = 100, negatives: int = 128, data_dir: str | None = None
    ) -> None:
        super().__init__(data_dir)
        self.batch_size = batch_size
        self.max_length = max_length
        self.negatives = negatives
        self._histories: Histories | None = None

    def setup(self, stage: str | None = None) -> None:
        """Read the ratings and build the histories, in every process.

        Raises:
            SetupError: the download failed, or a file is missing or has an unexpected hash.
        """
        if self._histories is None:
            self._histories = by_user(self.read_ratings())

    @property
    def histories(self) -> Histories:
        """Histories of all users, available after :meth:`setup`."""
        assert self._histories is not None, "Trainer calls setup() before it asks for a data loader"
        return self._histories

    def train_dataloader(self) -> DataLoader[HistoryBatch]:
        return self._loader(TrainingUsers(self.histories, self.max_length, self.negatives), shuffle=True)

    def val_dataloader(self) -> list[DataLoader[HistoryBatch]]:
        """Loaders of the validation part and the test part. Training does not depend on the test scores."""
        return [self._evaluation("val"), self._evaluation("test")]

    def test_dataloader(self) -> DataLoader[HistoryBatch]:
        return self._evaluation("test")

    def _evaluation(self, part: Part) -> DataLoader[HistoryBatch]:
        processes = 1 if self.trainer is None else self.trainer.world_size
        return self._loader(EvaluationUsers(self.histories, part, self.max_length, processes), shuffle=False)

    def _loader(self, users: _Users, shuffle: bool) -> DataLoader[HistoryBatch]:
        return DataLoader(
            users,
            batch_size=self.batch_size,
            shuffle=shuffle,
            collate_fn=_as_it_is,
            pin_memory=torch.cuda.is_available(),
        )


def _as_it_is(batch: Any) -> Any:
    return batch
