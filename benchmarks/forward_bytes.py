"""Counts the bytes of tensors that a rank holds during a step, by the forward that created them."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from torch import Tensor, nn
from torch.utils.hooks import RemovableHandle

from lightning_pipe.llm.measure.live_bytes import LiveBytes

Forward = tuple[int, int]


class ForwardBytes(LiveBytes):
    """Live bytes, of which each storage belongs to the forward that created it.

    Those that remain after a forward are its activations, kept for backward, and its output.

    Args:
        stages: this rank's modules, by stage, as the pipeline calls them. Each call is the forward of one micro-batch,
            and calls are in the order of micro-batches.

    Attributes:
        of_forwards: current bytes created in each forward, by stage and micro-batch; forwards without remaining bytes
            are omitted.
        after_forwards: value of ``of_forwards`` at the end of each forward, in order.
    """

    def __init__(self, stages: Mapping[int, nn.Module]) -> None:
        super().__init__()
        self._stages = dict(stages)
        self._counts = dict.fromkeys(self._stages, 0)
        self._running: Forward | None = None
        self._forwards: dict[int, Forward] = {}
        self._hooks: list[RemovableHandle] = []
        self.of_forwards: dict[Forward, int] = {}
        self.after_forwards: list[dict[Forward, int]] = []

    def __enter__(self) -> ForwardBytes:
        for index, stage in self._stages.items():
            self._hooks.append(stage.register_forward_pre_hook(lambda *_, index=index: self._begin(index)))
            self._hooks.append(stage.register_forward_hook(lambda *_: self._end()))
        super().__enter__()
        return self

    def __exit__(self, *error: Any) -> None:
        super().__exit__(*error)
        while self._hooks:
            self._hooks.pop().remove()

    def _begin(self, stage: int) -> None:
        self._running = stage, self._counts[stage]
        self._counts[stage] += 1

    def _end(self) -> None:
        self._running = None
        self.after_forwards.append(dict(self.of_forwards))

    def _add_storage_bytes(self, tensor: Tensor, key: int) -> None:
        super()._add_storage_bytes(tensor, key)
        if self._running is not None:
            self._forwards[key] = self._running
            self._add(self._sizes[key], self._running)

    def _forget(self, key: int) -> None:
        if (forward := self._forwards.pop(key, None)) is not None:
            self._add(-self._sizes[key], forward)
        super()._forget(key)

    def _add(self, size: int, forward: Forward) -> None:
        left = self.of_forwards.pop(forward, 0) + size
        if left:
            self.of_forwards[forward] = left
