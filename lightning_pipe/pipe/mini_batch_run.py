"""Run of a mini-batch through a pipe: splitting, forward, backward, and collection of gradients."""

from __future__ import annotations

import warnings
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor

from lightning_pipe._compat.torch import get_tensor_backward_hooks, pytree
from lightning_pipe.engine import SetupError
from lightning_pipe.engine.runtime.thread_state import get_thread_state
from lightning_pipe.pipe.cell import Cell, MiniBatch
from lightning_pipe.pipe.gradients import GradientSums
from lightning_pipe.pipe.loss import MicroBatchLoss
from lightning_pipe.pipe.partition import Partition
from lightning_pipe.pipe.partitioning import CheckpointMode
from lightning_pipe.pipe.plans import get_input_gradient_field_name
from lightning_pipe.pipe.randomness import MiniBatchSeed, SharedGenerators
from lightning_pipe.pipe.scatter import count_batch_rows, scatter, to_device
from lightning_pipe.pipe.scheduler import MicroBatch, Scheduler


class MiniBatchRun:
    """One mini-batch in a pipe; *stacklevel* is that of warnings."""

    def __init__(
        self,
        partitions: Sequence[Partition],
        scheduler: Scheduler,
        chunks: int,
        checkpoint: CheckpointMode,
        inputs: tuple[Any, ...],
        stacklevel: int,
    ) -> None:
        self._partitions = list(partitions)
        self._scheduler = scheduler
        self._checkpoint = checkpoint
        self._devices = [partition.device for partition in partitions]
        self.rows = count_batch_rows(inputs)
        inputs = to_device(inputs, self._partitions[0].device)
        if 0 < self.rows < chunks:
            warnings.warn(
                f"a mini-batch has {self.rows} rows, fewer than chunks={chunks}, and runs as {self.rows} micro-batches."
                " Lower chunks, or use larger mini-batches",
                stacklevel=stacklevel,
            )
        self._pieces = scatter(inputs, chunks)
        self.rows_of_micro_batches = [count_batch_rows(piece) for piece in self._pieces]
        self.count = len(self._pieces)
        self.grad = torch.is_grad_enabled()
        self._parameters = [partition.parameters() for partition in self._partitions]
        self._inputs = list(pytree.tree_leaves(inputs))
        self.tensors_requiring_grad: list[Tensor] = [
            tensor
            for tensor in (*self._inputs, *(parameter for part in self._parameters for parameter in part))
            if isinstance(tensor, Tensor) and tensor.requires_grad
        ]
        self._sums = [GradientSums() for _ in self._partitions]
        self._seed = MiniBatchSeed()
        self._generators = SharedGenerators(self._devices)
        self._mini_batch = MiniBatch(
            self.count,
            self._seed,
            self.grad,
            get_thread_state(),
            [partition.module_training_modes for partition in self._partitions],
            self._parameters,
        )
        self._streams = [
            torch.cuda.current_stream(device) for device in dict.fromkeys(self._devices) if device.type == "cuda"
        ]
        self._cells: list[list[Cell]] = []

    def build_micro_batches(self, losses: Sequence[MicroBatchLoss] = ()) -> list[MicroBatch]:
        """Build the micro-batches for forward."""
        last = self._partitions[-1]
        mode = self._checkpoint
        for index in range(self.count):
            # Recomputation saves no memory if backward follows forward immediately.
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
        return [self._build_micro_batch(index, piece) for index, piece in enumerate(pieces)]

    def backward(
        self, leaves: int, gradients: dict[int, Tensor | None], sizes: dict[int, list[int]]
    ) -> list[Tensor | None]:
        """Run all backwards, the last micro-batch first."""
        self._generators = SharedGenerators(self._devices)
        parts = {
            place: [None] * self.count if gradient is None else list(torch.split(gradient, sizes[place]))
            for place, gradient in gradients.items()
        }
        micro_batches = [
            self._build_micro_batch(
                index, None, [parts[place][index] if place in parts else None for place in range(leaves)]
            )
            for index in reversed(range(self.count))
        ]
        with self.suspend_parameter_hooks():
            input_gradients = self._scheduler.run(
                "gpipe_backward", micro_batches, lambda ctx: getattr(ctx, get_input_gradient_field_name(0)).value
            )
        self.check_generators()
        return self.merge_micro_batch_gradients(input_gradients[::-1])

    @contextmanager
    def suspend_parameter_hooks(self) -> Iterator[None]:
        """Context without hooks of parameters, which must see only the sum of gradients over micro-batches."""
        hooked = [
            hooks for part in self._parameters for parameter in part if (hooks := get_tensor_backward_hooks(parameter))
        ]
        saved_hooks = [dict(hooks) for hooks in hooked]
        for hooks in hooked:
            hooks.clear()
        try:
            yield
        finally:
            for hooks, saved in zip(hooked, saved_hooks, strict=True):
                hooks.update(saved)

    def merge_micro_batch_gradients(self, input_gradients: Sequence[list[Tensor | None]]) -> list[Tensor | None]:
        """Collect the gradients of :attr:`tensors_requiring_grad`."""
        gradients: list[Tensor | None] = []
        for place, leaf in enumerate(self._inputs):
            if isinstance(leaf, Tensor) and leaf.requires_grad:
                rows = torch.tensor_split(leaf.detach(), self.count)
                parts = [leaf_gradients[place] for leaf_gradients in input_gradients]
                if all(part is None for part in parts):
                    gradients.append(None)
                else:
                    gradients.append(
                        torch.cat(
                            [
                                torch.zeros_like(row) if part is None else part
                                for part, row in zip(parts, rows, strict=True)
                            ]
                        )
                    )
        for sums, parameters in zip(self._sums, self._parameters, strict=True):
            gradients += [sums.get(parameter) for parameter in parameters]
        return gradients

    def check_generators(self) -> None:
        """Check the shared generators, and advance the user's generator by the mini-batch's draw."""
        if not all(partition.checks_every_draw for partition in self._partitions):
            try:
                self._generators.check_unchanged()
            except SetupError:
                for partition in self._partitions:
                    partition.checks_every_draw = True
                raise
        self._seed.advance_generator()

    def _build_micro_batch(
        self, index: int, piece: Any, output_gradients: list[Tensor | None] | None = None
    ) -> MicroBatch:
        return MicroBatch(
            index,
            self.count,
            self._cells[index],
            piece,
            self._sums,
            output_gradients,
            self._streams,
            self.rows_of_micro_batches[index],
        )
