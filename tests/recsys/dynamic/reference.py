"""A table without a cache: every row in a dictionary. What a cache must be equal to, and optimizers for both."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor

from lightning_pipe.recsys.dynamic.cache.initial_values import InitialValues

WIDTH = 3

# Of a batch's distinct rows: columns, row by row, and gradients; returned are the new columns.
Optimizer = Callable[[Sequence[Tensor], Tensor], list[Tensor]]


def sgd(columns: Sequence[Tensor], gradients: Tensor) -> list[Tensor]:
    (weights,) = columns
    return [weights - 0.1 * gradients]


def row_wise_adagrad(columns: Sequence[Tensor], gradients: Tensor) -> list[Tensor]:
    weights, sums = columns
    # Column by column: the sum of a row must not depend on the other rows.
    for column in gradients.unbind(1):
        sums = sums + column * column / WIDTH
    return [weights - 0.1 * gradients / (sums.sqrt() + 1e-8).unsqueeze(1), sums]


def adam(columns: Sequence[Tensor], gradients: Tensor) -> list[Tensor]:
    weights, first, second, steps = columns
    steps = steps + 1
    first = first * 0.9 + gradients * 0.1
    second = second * 0.99 + gradients * gradients * 0.01
    return [weights - (0.1 * first / (second.sqrt() + 1e-6)).float(), first, second, steps]


# With what each optimizer's states begin, and their types; whether a state has a number for each weight.
OPTIMIZERS: dict[str, tuple[Optimizer, list[tuple[float, torch.dtype, bool]]]] = {
    "sgd": (sgd, []),
    "row_wise_adagrad": (row_wise_adagrad, [(0.25, torch.float32, False)]),
    "adam": (adam, [(0.0, torch.float32, True), (0.5, torch.float64, True), (1, torch.int64, False)]),
}


def columns_of(optimizer: str, capacity: int) -> list[Tensor]:
    """Columns with rubbish in them."""
    columns = [torch.full((capacity, WIDTH), float("nan"))]
    for _, kind, wide in OPTIMIZERS[optimizer][1]:
        columns.append(torch.full((capacity, WIDTH) if wide else (capacity,), 77, dtype=kind))
    return columns


@dataclass
class Row:
    count: int
    last_seen: int
    values: list[Tensor]


@dataclass
class Begun:
    ids: list[int]
    step: int
    before: dict[int, int]
    young: set[int]


class Reference:
    """Rows by id. Its calls are those of a cache."""

    def __init__(self, initial: InitialValues, optimizer: str, ttl: int | None, threshold: int) -> None:
        self._initial, self._optimizer, self._ttl, self._threshold = initial, optimizer, ttl, threshold
        self.rows: dict[int, Row] = {}

    def new(self, key: int) -> list[Tensor]:
        values = [self._initial(np.array([key], np.int64))[0].clone()]
        for fill, kind, wide in OPTIMIZERS[self._optimizer][1]:
            values.append(torch.full((WIDTH,) if wide else (), fill, dtype=kind))
        return values

    def weights(self, ids: Sequence[int]) -> Tensor:
        return torch.stack([self.rows[key].values[0] if key in self.rows else self.new(key)[0] for key in ids])

    def expire(self, ids: Sequence[int], step: int) -> None:
        for key in set(ids):
            if self._ttl is not None and key in self.rows and step - self.rows[key].last_seen > self._ttl:
                del self.rows[key]

    def begin(self, ids: Sequence[int], step: int) -> Begun:
        self.expire(ids, step)
        begun = Begun(sorted(set(ids)), step, {}, set())
        for key in begun.ids:
            row = self.rows.setdefault(key, Row(0, 0, self.new(key)))
            begun.before[key] = row.last_seen
            row.count, row.last_seen = row.count + 1, step
            if row.count < self._threshold:
                begun.young.add(key)
        return begun

    def train(self, begun: Begun, gradients: Tensor) -> None:
        """Gradients are those of ``begun.ids``."""
        for key in begun.young:
            self.rows[key].values = self.new(key)
        trained = [at for at, key in enumerate(begun.ids) if key not in begun.young]
        if trained:
            rows = [self.rows[begun.ids[at]] for at in trained]
            columns = [torch.stack(parts) for parts in zip(*(row.values for row in rows), strict=True)]
            after = OPTIMIZERS[self._optimizer][0](columns, gradients[trained])
            for at, row in enumerate(rows):
                row.values = [column[at].clone() for column in after]

    def undo(self, begun: Begun) -> None:
        for key in begun.ids:
            row = self.rows[key]
            row.count -= 1
            if row.last_seen == begun.step:
                row.last_seen = begun.before[key]
            if row.count == 0:
                del self.rows[key]
            elif row.count < self._threshold:
                row.values = self.new(key)

    def records(self) -> dict[int, bytes]:
        """What a store must have of it."""
        return {
            key: np.array([row.count, row.last_seen], np.int64).tobytes()
            + b"".join(value.numpy().tobytes() for value in row.values)
            for key, row in self.rows.items()
        }
