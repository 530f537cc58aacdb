"""How many bytes of activations live at once: what checkpointing, 1F1B and a loss inside save."""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterable
from typing import Any

import torch
from torch import Tensor, nn
from torch.multiprocessing.reductions import StorageWeakRef
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from lightning_pipe.pipe import Pipe

WIDTH, ROWS, CHUNKS, PARTITIONS, LAYERS = 64, 64, 16, 2, 12  # layers of each partition
# Of one layer for one micro-batch: what tanh returns, which it keeps, as does the Linear that comes next.
ONE = (ROWS // CHUNKS) * WIDTH * 4
CLASSES = 2048
LOGITS = (ROWS // CHUNKS) * CLASSES * 4


class LiveBytes(TorchDispatchMode):
    """Counts the bytes of tensors that operations made under it, in any thread, and that are alive."""

    def __init__(self, before: Iterable[Tensor]) -> None:
        super().__init__()
        self._before = {tensor.untyped_storage()._cdata for tensor in before}
        self.peak = 0
        self._alive: dict[int, tuple[StorageWeakRef, int]] = {}
        self._lock = threading.Lock()

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        outputs = func(*args, **(kwargs or {}))
        with self._lock:
            for leaf in tree_leaves(outputs):
                if isinstance(leaf, Tensor) and (storage := leaf.untyped_storage())._cdata not in self._before:
                    self._alive[storage._cdata] = StorageWeakRef(storage), storage.nbytes()
            self._alive = {key: entry for key, entry in self._alive.items() if not entry[0].expired()}
            self.peak = max(self.peak, sum(size for _, size in self._alive.values()))
        return outputs


def deep(classes: int = WIDTH) -> nn.Sequential:
    layers = [nn.Sequential(nn.Linear(WIDTH, WIDTH, bias=False), nn.Tanh()) for _ in range(PARTITIONS * LAYERS)]
    if classes != WIDTH:
        layers[-1] = nn.Sequential(nn.Linear(WIDTH, classes, bias=False))
    for parameter in (p for layer in layers for p in layer.parameters()):
        parameter.requires_grad_(parameter.shape[0] == WIDTH)
    return nn.Sequential(*layers)


def peak(step: Callable[[Pipe, Tensor], Any], checkpoint: Any, classes: int = WIDTH) -> int:
    """Bytes at the worst moment of a step, without gradients of parameters."""
    pipe = Pipe(deep(classes), CHUNKS, checkpoint, ["cpu"] * PARTITIONS, [LAYERS, LAYERS])
    inputs = torch.randn(ROWS, WIDTH, requires_grad=True)
    step(pipe, inputs)  # the first one finds out about the layers
    pipe.requires_grad_(False)
    with LiveBytes([*pipe.parameters(), inputs]) as live:
        step(pipe, inputs)
    pipe.close()
    return live.peak


def forward_and_backward(pipe: Pipe, inputs: Tensor) -> None:
    pipe(inputs).sum().backward()


def in_turns(pipe: Pipe, inputs: Tensor) -> None:
    pipe.loss(inputs, torch.zeros(ROWS), lambda output, target: output.sum(), reduction="sum").backward()


def test_checkpointing_keeps_what_lies_between_partitions() -> None:
    everything = CHUNKS * PARTITIONS * LAYERS * ONE
    never, always, except_last = (peak(forward_and_backward, mode) for mode in ("never", "always", "except_last"))
    assert never >= everything
    # What goes from partition to partition, for every micro-batch, and what comes out; one recomputation in each
    # partition, with a gradient and what an operation makes beside it.
    assert always <= (CHUNKS * PARTITIONS + PARTITIONS * (LAYERS + 2)) * ONE < everything / 2
    assert except_last <= always + PARTITIONS * LAYERS * ONE


def test_forwards_and_backwards_in_turns_keep_as_many_micro_batches_as_partitions() -> None:
    never, turns = peak(forward_and_backward, "never"), peak(in_turns, "never")
    # The first partition keeps two micro-batches and the second one; gradients of the input for all of them.
    assert turns <= (2 + 1 + 2) * LAYERS * ONE + 3 * CHUNKS * ONE < never / 2


def test_a_loss_inside_has_outputs_of_one_micro_batch_at_a_time() -> None:
    def outside(pipe: Pipe, inputs: Tensor) -> None:
        targets = torch.zeros(ROWS, dtype=torch.long)
        nn.functional.cross_entropy(pipe(inputs), targets).backward()

    def inside(pipe: Pipe, inputs: Tensor) -> None:
        pipe.loss(inputs, torch.zeros(ROWS, dtype=torch.long), nn.CrossEntropyLoss()).backward()

    # Outputs, their logarithms and gradients, of everything or of one micro-batch.
    assert peak(outside, "never", CLASSES) >= 2 * CHUNKS * LOGITS
    assert peak(inside, "never", CLASSES) <= 5 * LOGITS + 5 * LAYERS * ONE + 3 * CHUNKS * ONE
