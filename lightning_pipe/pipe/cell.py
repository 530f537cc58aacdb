"""The work of one partition for one micro-batch, cut from its neighbours: forward, recomputation, backward.

On a CPU the autograd engine runs a graph in the thread that calls backward: one graph over all partitions would leave
the other threads idle. So each cell has a graph of its own, between leaves that are detached from what the neighbour
made and outputs whose gradients the next neighbour hands back::

    values in ──detach──► leaves ──layers──► outputs ──detach──► values out
    gradients in ◄── of leaves ◄──autograd.grad── of outputs ◄── gradients out
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from torch.utils import _pytree as pytree

from lightning_pipe.engine import SetupError
from lightning_pipe.engine.thread_state import ThreadState, capture, entered
from lightning_pipe.pipe.partition import Partition
from lightning_pipe.pipe.position import Position
from lightning_pipe.pipe.randomness import MiniBatchSeed
from lightning_pipe.pipe.skip import SkipKey, Skips

__all__ = ["Cell", "Gradients", "MiniBatch", "Passed"]


@dataclass
class Passed:
    """What one partition hands to the next, for one micro-batch.

    Args:
        value: inputs of the first layer, or what the last layer returned; any nesting.
        skips: those that lead out, or in.
    """

    value: Any
    skips: Mapping[SkipKey, Any]


# What goes back: for each tensor that was passed its gradient, or None, in the order of the flattened values.
Gradients = dict[SkipKey | None, list[Tensor | None]]


@dataclass(frozen=True)
class MiniBatch:
    """What the cells of a mini-batch have in common.

    Args:
        micro_batches: how many.
        seed: of random numbers.
        grad: whether there will be a backward.
        state: the caller's thread state.
        training: of each partition, whether it trains.
        parameters: of each partition, those that are trained.
    """

    micro_batches: int
    seed: MiniBatchSeed
    grad: bool
    state: ThreadState
    training: Sequence[bool]
    parameters: Sequence[Sequence[Tensor]]


class Cell:
    """A partition at a micro-batch.

    Args:
        partition: what is run.
        of: the mini-batch.
        micro_batch: the index.
        checkpointed: keep the inputs only, and run the layers again before backward.
        loss: made of the last layer's output; in its place the cell then hands the loss on.
    """

    def __init__(
        self,
        partition: Partition,
        of: MiniBatch,
        micro_batch: int,
        *,
        checkpointed: bool = False,
        loss: Callable[[Any], Tensor] | None = None,
    ) -> None:
        self.partition = partition
        self._of = of
        self._micro_batch = micro_batch
        self._checkpointed = checkpointed and of.grad
        self._loss = loss
        self._inputs: _Flat | None = None  # leaves
        self._outputs: _Flat | None = None  # with their graph
        self._versions: list[int] = []

    @property
    def checkpointed(self) -> bool:
        """Whether :meth:`recompute` has something to do."""
        return self._checkpointed

    def forward(self, passed: Passed) -> Passed:
        """Run the layers; what is returned has no graph."""
        leaves = _Flat.of(passed).map(self._leaf)
        if not self._checkpointed:
            outputs = self._run(leaves, recomputing=False)
            if self._of.grad:
                self._inputs, self._outputs = leaves, outputs
            return outputs.map(_cut).passed()
        with torch.no_grad():
            outputs = self._run(leaves, recomputing=False)
        self._inputs = leaves
        self._versions = [_version(tensor) for tensor in leaves.tensors()]
        # What will require grad is known when the layers run with a graph: until then, all that can.
        trains = bool(self._of.parameters[self.partition.index]) or any(leaf.requires_grad for leaf in leaves.tensors())
        return outputs.map(lambda tensor: tensor.detach().requires_grad_(trains and _differentiable(tensor))).passed()

    def recompute(self) -> None:
        """Run the layers again, with a graph, under the autocast of the first time and with its random numbers."""
        leaves = self._inputs
        assert leaves is not None
        for tensor, version in zip(leaves.tensors(), self._versions, strict=True):
            if _version(tensor) != version:
                raise SetupError(
                    f"the input of {self.partition.name} was changed in place after it ran, and is needed to run it"
                    " again; leave it alone, or use checkpoint='never'"
                )
        now, then = capture(), self._of.state
        autocast = now._replace(
            grad=True,
            autocast_cpu=then.autocast_cpu,
            autocast_cuda=then.autocast_cuda,
            autocast_cache=then.autocast_cache,
        )
        with entered(autocast):
            self._outputs = self._run(leaves, recomputing=True)

    def backward(self, gradients: Gradients, add: Callable[[Tensor, Tensor], None]) -> Gradients:
        """Gradients of what was passed in, of those of what was passed out; frees the graph.

        Args:
            gradients: of what :meth:`forward` returned; empty for a loss, whose gradient is one.
            add: called with each parameter and its gradient.
        """
        leaves, outputs = self._inputs, self._outputs
        assert leaves is not None and outputs is not None
        self._inputs = self._outputs = None
        ends, given = [], []
        for key, tensors in outputs.parts.items():
            known = gradients.get(key)
            for place, tensor in enumerate(tensors):
                gradient = None if known is None else known[place]
                if isinstance(tensor, Tensor) and tensor.requires_grad and (gradient is not None or self._loss):
                    ends.append(tensor)
                    given.append(gradient)
        starts = [tensor for tensor in leaves.tensors() if tensor.requires_grad]
        parameters = self._of.parameters[self.partition.index]
        found: list[Tensor | None] = [None] * (len(starts) + len(parameters))
        if ends and found:
            found = list(torch.autograd.grad(ends, [*starts, *parameters], given, allow_unused=True))
        for parameter, gradient in zip(parameters, found[len(starts) :], strict=True):
            if gradient is not None:
                add(parameter, gradient)
        of_leaf = dict(zip(map(id, starts), found, strict=False))
        return {key: [of_leaf.get(id(one)) for one in part] for key, part in leaves.parts.items()}

    def _run(self, leaves: _Flat, *, recomputing: bool) -> _Flat:
        partition, of = self.partition, self._of
        training = of.training[partition.index]
        in_place = partition.changes_input.get(training)
        # Until it is known whether the layers change their input, and where they do, they get a copy.
        given = leaves.map(Tensor.clone) if in_place is not False else leaves
        versions = [_version(tensor) for tensor in given.tensors()]
        passed = given.passed()
        skips = Skips(passed.skips)
        where = Position(self._micro_batch, of.micro_batches, recomputing)
        value = partition.run(passed.value, skips, where, of.seed, training)
        if in_place is None and not torch.is_inference_mode_enabled():
            partition.changes_input[training] = _changed(given, versions)
        elif in_place is False and _changed(given, versions):
            raise SetupError(
                f"{partition.name} changes its input in place, which it did not do for the first micro-batch; use"
                " operations that are not in place in its first layer"
            )
        if self._loss is not None:
            value = self._loss(value)
        return _Flat.of(Passed(value, {key: skips.values[key] for key in partition.leaves}))

    def _leaf(self, tensor: Tensor) -> Tensor:
        return tensor.detach().requires_grad_(self._of.grad and tensor.requires_grad)


class _Flat:
    """What is passed, as lists: of the value under None, of skips under their keys."""

    def __init__(self, parts: dict[SkipKey | None, list[Any]], specs: dict[SkipKey | None, Any]) -> None:
        self.parts = parts
        self._specs = specs

    @classmethod
    def of(cls, passed: Passed) -> _Flat:
        flat = {key: pytree.tree_flatten(value) for key, value in [(None, passed.value), *passed.skips.items()]}
        return cls({key: leaves for key, (leaves, _) in flat.items()}, {key: spec for key, (_, spec) in flat.items()})

    def tensors(self) -> list[Tensor]:
        return [leaf for part in self.parts.values() for leaf in part if isinstance(leaf, Tensor)]

    def map(self, change: Callable[[Tensor], Tensor]) -> _Flat:
        parts = {
            key: [change(leaf) if isinstance(leaf, Tensor) else leaf for leaf in part]
            for key, part in self.parts.items()
        }
        return _Flat(parts, self._specs)

    def passed(self) -> Passed:
        values = {key: pytree.tree_unflatten(part, self._specs[key]) for key, part in self.parts.items()}
        value = values.pop(None)
        return Passed(value, {key: value for key, value in values.items() if key is not None})


def _cut(tensor: Tensor) -> Tensor:
    """Without its graph, and saying whether it had one."""
    return tensor.detach().requires_grad_(tensor.requires_grad and _differentiable(tensor))


def _changed(given: _Flat, versions: Sequence[int]) -> bool:
    return any(_version(tensor) != version for tensor, version in zip(given.tensors(), versions, strict=True))


def _differentiable(tensor: Tensor) -> bool:
    return tensor.is_floating_point() or tensor.is_complex()


def _version(tensor: Tensor) -> int:
    """How often a tensor was changed in place; 0 of those that inference mode made, which do not say."""
    return 0 if tensor.is_inference() else tensor._version
