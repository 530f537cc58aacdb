"""The run of a mini-batch through a pipe: cutting it, forward, backward, and collecting its gradients.

Tested in ``tests/pipe/test_pipe.py``.
"""

from __future__ import annotations

import warnings
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor

from lightning_pipe._compat.torch import pytree
from lightning_pipe.engine import SetupError
from lightning_pipe.engine.runtime.thread_state import capture
from lightning_pipe.pipe.cell import Cell, MiniBatch
from lightning_pipe.pipe.gradients import GradientSums
from lightning_pipe.pipe.loss import MicroLoss
from lightning_pipe.pipe.partition import Partition
from lightning_pipe.pipe.partitioning import Checkpoint
from lightning_pipe.pipe.plans import gradient_field
from lightning_pipe.pipe.randomness import MiniBatchSeed, SharedGenerators
from lightning_pipe.pipe.scatter import rows_of, scatter, to_device
from lightning_pipe.pipe.scheduler import MicroBatch, Scheduler

__all__ = ["Run"]


class Run:
    """One mini-batch on its way through a pipe.

    Args:
        partitions: of the pipe.
        scheduler: runs its micro-batches.
        chunks: how many to cut.
        checkpoint: see :class:`~lightning_pipe.pipe.Pipe`.
        inputs: as they were given.
        depth: of calls, from the user's to this one: where warnings point.

    Attributes:
        rows: of the mini-batch.
        count: of micro-batches.
        rows_of_micro_batches: of each.
        grad: whether there will be a backward.
        upstream: tensors that it has gradients for.
    """

    def __init__(
        self,
        partitions: Sequence[Partition],
        scheduler: Scheduler,
        chunks: int,
        checkpoint: Checkpoint,
        inputs: tuple[Any, ...],
        depth: int,
    ) -> None:
        self._partitions = list(partitions)
        self._scheduler = scheduler
        self._checkpoint = checkpoint
        self._devices = [partition.device for partition in partitions]
        for partition in self._partitions:
            partition.check_device()
        self.rows = rows_of(inputs)
        inputs = to_device(inputs, self._partitions[0].device)
        if 0 < self.rows < chunks:
            warnings.warn(
                f"a mini-batch has {self.rows} rows, and {chunks} micro-batches are to be cut from it; it runs as"
                f" {self.rows}: lower chunks, or give larger mini-batches",
                stacklevel=depth,
            )
        self._pieces = scatter(inputs, chunks)
        self.rows_of_micro_batches = [rows_of(piece) for piece in self._pieces]
        self.count = len(self._pieces)
        self.grad = torch.is_grad_enabled()
        self._parameters = [partition.parameters() for partition in self._partitions]
        self._inputs = list(pytree.tree_leaves(inputs))
        self.upstream: list[Tensor] = [
            tensor
            for tensor in (*self._inputs, *(one for part in self._parameters for one in part))
            if isinstance(tensor, Tensor) and tensor.requires_grad
        ]
        self._sums = [GradientSums() for _ in self._partitions]
        self._seed = MiniBatchSeed()
        self._generators = SharedGenerators(self._devices)
        self._mini_batch = MiniBatch(
            self.count, self._seed, self.grad, capture(), [one.training for one in self._partitions], self._parameters
        )
        self._streams = [torch.cuda.current_stream(one) for one in dict.fromkeys(self._devices) if one.type == "cuda"]
        self._cells: list[list[Cell]] = []

    def micro_batches(self, losses: Sequence[MicroLoss] = ()) -> list[MicroBatch]:
        """All micro-batches, for their forward."""
        last = self._partitions[-1]
        mode = self._checkpoint
        for index in range(self.count):
            # What is followed by its backward at once gains nothing from running again.
            at_once = index == self.count - 1 and not losses
            self._cells.append(
                [
                    Cell(
                        partition,
                        self._mini_batch,
                        index,
                        checkpointed=mode == "always"
                        or (mode == "except_last" and not at_once and not (losses and partition is last)),
                        loss=losses[index] if losses and partition is last else None,
                    )
                    for partition in self._partitions
                ]
            )
        pieces, self._pieces = self._pieces, []
        return [self._micro_batch(index, piece) for index, piece in enumerate(pieces)]

    def backward(
        self, leaves: int, gradients: dict[int, Tensor | None], sizes: dict[int, list[int]]
    ) -> list[Tensor | None]:
        """Run all backwards, the last micro-batch first; returns gradients of :attr:`upstream`.

        Args:
            leaves: of the outputs, flattened.
            gradients: of those, by place.
            sizes: rows of each micro-batch's, by place.
        """
        self._generators = SharedGenerators(self._devices)
        parts = {
            place: [None] * self.count if gradient is None else list(torch.split(gradient, sizes[place]))
            for place, gradient in gradients.items()
        }
        micro_batches = [
            self._micro_batch(index, None, [parts[place][index] if place in parts else None for place in range(leaves)])
            for index in reversed(range(self.count))
        ]
        with self.parameters_alone():
            found = self._scheduler.run(
                "gpipe_backward", micro_batches, lambda ctx: getattr(ctx, gradient_field(0)).value
            )
        self.check_generators()
        return self.collect(found[::-1])

    @contextmanager
    def parameters_alone(self) -> Iterator[None]:
        """In the body, hooks of parameters do not run: they are for the sum of gradients, which comes afterwards."""
        hooked = [one._backward_hooks for part in self._parameters for one in part if one._backward_hooks]
        kept = [dict(hooks) for hooks in hooked]
        for hooks in hooked:
            hooks.clear()
        try:
            yield
        finally:
            for hooks, known in zip(hooked, kept, strict=True):
                hooks.update(known)

    def collect(self, of_inputs: Sequence[list[Tensor | None]]) -> list[Tensor | None]:
        """Gradients of :attr:`upstream`.

        Args:
            of_inputs: gradients of the inputs, flattened, of each micro-batch.
        """
        found: list[Tensor | None] = []
        for place, leaf in enumerate(self._inputs):
            if isinstance(leaf, Tensor) and leaf.requires_grad:
                rows = torch.tensor_split(leaf.detach(), self.count)
                parts = [one[place] for one in of_inputs]
                if all(part is None for part in parts):
                    found.append(None)
                else:
                    found.append(
                        torch.cat(
                            [
                                torch.zeros_like(row) if part is None else part
                                for part, row in zip(parts, rows, strict=True)
                            ]
                        )
                    )
        for sums, parameters in zip(self._sums, self._parameters, strict=True):
            found += [sums.of(parameter) for parameter in parameters]
        return found

    def check_generators(self) -> None:
        """See :class:`SharedGenerators`; then the mini-batch's number is taken from the user's generator."""
        if not all(partition.watched for partition in self._partitions):
            try:
                self._generators.check()
            except SetupError:
                for partition in self._partitions:
                    partition.watched = True
                raise
        self._seed.take()

    def _micro_batch(self, index: int, piece: Any, given: list[Tensor | None] | None = None) -> MicroBatch:
        return MicroBatch(
            index,
            self.count,
            self._cells[index],
            piece,
            self._sums,
            given,
            self._streams,
            self.rows_of_micro_batches[index],
        )
