"""The work of one partition for one micro-batch, cut from its neighbours: forward, recomputation, backward.

On a CPU the autograd engine runs a graph in the thread that calls backward: one graph over all partitions would leave
the other threads idle. So each cell has a graph of its own, between leaves that are detached from what the neighbour
made and outputs whose gradients the next neighbour hands back::

    values in ──detach──► leaves ──layers──► outputs ──detach──► values out
    gradients in ◄── of leaves ◄──autograd.grad── of outputs ◄── gradients out

Tested in ``tests/pipe/test_scheduler.py``.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor, nn

from lightning_pipe._compat.torch import pytree
from lightning_pipe.engine import InputError, SetupError
from lightning_pipe.engine.runtime.thread_state import ThreadState, capture, entered
from lightning_pipe.pipe.loss import MicroLoss
from lightning_pipe.pipe.partition import Modes, NamedBuffer, Partition
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
        training: of each partition, which modules train.
        parameters: of each partition, those that are trained.
    """

    micro_batches: int
    seed: MiniBatchSeed
    grad: bool
    state: ThreadState
    training: Sequence[Modes]
    parameters: Sequence[Sequence[Tensor]]
    token: object = field(default_factory=object)  # see :class:`~lightning_pipe.pipe.position.Position`


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
        loss: MicroLoss | None = None,
    ) -> None:
        self.partition = partition
        self._of = of
        self._micro_batch = micro_batch
        self._checkpointed = checkpointed and of.grad
        self._loss = loss
        self._inputs: _Flat | None = None  # leaves
        self._outputs: _Flat | None = None  # with their graph
        self._versions: list[int] = []
        self._parameters: list[int] = []  # their versions
        self._buffers: list[NamedBuffer] = []  # as they were before the first run

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
        self._buffers = self.partition.snapshot(self._of.training[self.partition.index])
        with torch.no_grad():
            outputs = self._run(leaves, recomputing=False)
        self._inputs = leaves
        self._versions = [_version(tensor) for tensor in leaves.tensors()]
        self._parameters = [_version(one) for one in self._of.parameters[self.partition.index]]
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
        if self.partition.training != self._of.training[self.partition.index]:
            raise SetupError(
                f"modules of {self.partition.name} were switched between training and evaluation after it ran, and it"
                " is to run again; switch them behind backward, or use checkpoint='never'"
            )
        if self._parameters != [_version(one) for one in self._of.parameters[self.partition.index]]:
            raise SetupError(
                f"parameters of {self.partition.name} were changed after it ran, and are needed to run it again; change"
                " them behind backward"
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
        self._buffers = []

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
        # As autograd adds up what comes from several places: the latest use first. In one partition that of a skip,
        # for all that can be known here.
        for key, tensors in sorted(
            outputs.parts.items(), key=lambda part: (-self.partition.target(part[0]), not part[0])
        ):
            known = gradients.get(key)
            for place, tensor in enumerate(tensors):
                gradient = None if known is None else known[place]
                if isinstance(tensor, Tensor) and tensor.requires_grad and (gradient is not None or self._loss):
                    ends.append(tensor)
                    given.append(gradient)
        starts = list({id(tensor): tensor for tensor in leaves.tensors() if tensor.requires_grad}.values())
        parameters = self._of.parameters[self.partition.index]
        found: list[Tensor | None] = [None] * (len(starts) + len(parameters))
        if ends and found:
            found = list(torch.autograd.grad(ends, [*starts, *parameters], given, allow_unused=True))
        for parameter, gradient in zip(parameters, found[len(starts) :], strict=True):
            if gradient is not None:
                add(parameter, gradient)
        of_leaf = dict(zip(map(id, starts), found, strict=False))
        # What was handed in several times has one gradient, which goes back once.
        return {key: [of_leaf.pop(id(one), None) for one in part] for key, part in leaves.parts.items()}

    def _run(self, leaves: _Flat, *, recomputing: bool) -> _Flat:
        partition, of = self.partition, self._of
        training = of.training[partition.index]
        in_place = partition.changes_input.get(training)
        # Until it is known whether the layers change their input, and where they do, they get a copy.
        given = leaves.map(Tensor.clone) if in_place is not False else leaves
        versions = [_version(tensor) for tensor in given.tensors()]
        passed = given.passed()
        skips = Skips(passed.skips)
        where = Position(self._micro_batch, of.micro_batches, recomputing, of.token)
        value = partition.run(passed.value, skips, where, of.seed, training, self._buffers if recomputing else None)
        if in_place is None and not torch.is_inference_mode_enabled():
            partition.changes_input[training] = _changed(given, versions)
        elif in_place is False and _changed(given, versions):
            raise SetupError(
                f"{partition.name} changes its input in place, which it did not do for the first micro-batch; use"
                " operations that are not in place in its first layer"
            )
        if self._loss is not None:
            value = partition.run_loss(self._loss, (training, self._loss.kind), value, where, of.seed)
        if missing := [key for key in partition.targets if key not in skips.values]:
            raise SetupError(
                f"{partition.name} has not stashed {', '.join(map(repr, missing))}, which its layers declare; a"
                " subclass with a forward of its own needs @skippable, too"
            )
        outputs = _Flat.of(Passed(value, {key: skips.values[key] for key in partition.targets}))
        if torch.is_grad_enabled():
            self._check_graph(leaves, outputs, (training, None if self._loss is None else self._loss.kind))
        return outputs

    def _check_graph(self, leaves: _Flat, outputs: _Flat, known: Any) -> None:
        """Refuse what requires a gradient and is neither handed in nor a parameter: it would never get one."""
        partition = self.partition
        if known in partition.known_graphs:
            return
        mine = {id(one) for one in (*leaves.tensors(), *self._of.parameters[partition.index])}
        seen, todo = set(), [one.grad_fn for one in outputs.tensors() if one.grad_fn is not None]
        while todo:
            node = todo.pop()
            if node in seen:
                continue
            seen.add(node)
            variable = getattr(node, "variable", None)
            if isinstance(variable, Tensor) and variable.requires_grad and id(variable) not in mine:
                raise SetupError(
                    f"in {partition.name}, or in the loss behind it, a tensor of shape {tuple(variable.shape)} requires"
                    " a gradient and is none of the layers' parameters: it would get none. Make it a parameter of a"
                    " layer; what belongs to the loss, of the last one, or take the loss outside, of pipe(x)"
                )
            todo += [following for following, _ in node.next_functions if following is not None]
        partition.known_graphs.add(known)

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
        for leaves, _ in flat.values():
            for leaf in leaves:
                if not isinstance(leaf, Tensor | nn.Module) and any(
                    isinstance(one, Tensor) for one in getattr(leaf, "__dict__", {}).values()
                ):
                    raise InputError(
                        f"a {type(leaf).__name__} with tensors in it is handed from layer to layer, or to a pipe, which"
                        " cannot cut or move what it does not see; needed are tuples, lists and dictionaries of tensors"
                    )
        return cls({key: leaves for key, (leaves, _) in flat.items()}, {key: spec for key, (_, spec) in flat.items()})

    def tensors(self) -> list[Tensor]:
        return [leaf for part in self.parts.values() for leaf in part if isinstance(leaf, Tensor)]

    def map(self, change: Callable[[Tensor], Tensor]) -> _Flat:
        """Another tensor in the place of each; one for what is there several times in a value."""

        def changed(part: list[Any]) -> list[Any]:
            known = {id(leaf): leaf for leaf in part if isinstance(leaf, Tensor)}
            new = {number: change(tensor) for number, tensor in known.items()}
            return [new.get(id(leaf), leaf) for leaf in part]

        return _Flat({key: changed(part) for key, part in self.parts.items()}, self._specs)

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
