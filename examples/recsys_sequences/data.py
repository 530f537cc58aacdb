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

# The items of the history, their stars, and the items to tell the next one from.
SPARSE_KEYS = ("item", "stars", "candidate")


class HistoryBatch(TypedDict, total=False):
    """A batch of B users.

    Keys:
        sparse: ids of the keys ``SPARSE_KEYS``. ``item`` and ``stars`` are as long as the history. A user's candidates
            are negatives in training; in an evaluation those of all users, one after the other, are the catalogue.
        seconds: the time of each rating, under the key ``seconds``.
        target: the number of the item that comes next, int64 [B]; in an evaluation only, as the rest.
        seen: which items the history holds, however long it is, bool [B, items].
        weight: 1, and 0 for a user who only fills up the last batch, float32 [B].
    """

    sparse: KeyedJaggedTensor
    seconds: KeyedJaggedTensor
    target: torch.Tensor
    seen: torch.Tensor
    weight: torch.Tensor


class _Users(Dataset[HistoryBatch]):
    """A row is a user's history. A whole batch is gathered at once."""

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
        """The batch of the rows *indices*: ``DataLoader`` asks for all at once."""

    def _gather(self, users: Sequence[int], candidates: torch.Tensor, counts: torch.Tensor) -> HistoryBatch:
        """The *users*' histories, and each user's *counts* of *candidates*, which are item numbers."""
        histories = self._histories
        slices = [histories.rows(user, self._part, self._max_length) for user in users]
        rows = torch.from_numpy(np.concatenate([np.arange(one.start, one.stop) for one in slices]))
        lengths = torch.tensor([one.stop - one.start for one in slices])
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
    """Histories to train on, each with negatives of its own, drawn from all items alike.

    A user's loss does not depend on who else is in the batch, nor on which rank trains them.

    Args:
        histories: of all users.
        max_length: of a history; the latest ratings are kept.
        negatives: items drawn for each user, from torch's random stream.
    """

    def __init__(self, histories: Histories, max_length: int, negatives: int) -> None:
        super().__init__(histories, "train", max_length, histories.users)
        self._negatives = negatives

    def __getitems__(self, indices: Sequence[int]) -> HistoryBatch:
        drawn = torch.randint(self._histories.items, (len(indices) * self._negatives,))
        return self._gather(indices, drawn, torch.full((len(indices),), self._negatives))


class EvaluationUsers(_Users):
    """Histories with the item that comes next, and the whole catalogue to find it in.

    Args:
        histories: of all users.
        part: which item is to be found.
        max_length: of a history; the latest ratings are kept.
        multiple_of: the number of rows is filled up to a multiple of this, so that ranks have equal shares: Lightning's
            sampler would count users twice.
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
    """Which items each user has rated before the one of *part*, bool [users, items]; never that one itself."""
    result = np.zeros((len(users), histories.items), dtype=bool)
    for row, user in enumerate(users):
        result[row, histories.item[histories.rows(user, part)]] = True
        result[row, histories.target(user, part)] = False
    return result


class HistoryData(RatingFiles):
    """MovieLens-100K as one history a user, each user's last two ratings kept back.

    Args:
        batch_size: users that a process trains on in a step.
        max_length: of a history; the latest ratings are kept.
        negatives: items that each user's next ones are told from in training.
        data_dir: as of :class:`~examples.recsys_movielens.data.MovieLensData`.
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
        """Runs in every process.

        Raises:
            SetupError: the files could not be downloaded, one is missing, or one is not what it should be.
        """
        if self._histories is None:
            self._histories = by_user(self.read_ratings())

    @property
    def histories(self) -> Histories:
        """All of them; there after :meth:`setup`."""
        assert self._histories is not None, "Trainer calls setup() before it asks for a data loader"
        return self._histories

    def train_dataloader(self) -> DataLoader[HistoryBatch]:
        return self._loader(TrainingUsers(self.histories, self.max_length, self.negatives), shuffle=True)

    def val_dataloader(self) -> list[DataLoader[HistoryBatch]]:
        """Of the validation part and of the test part, whose scores nothing in training goes by."""
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
