"""Work of one partition on one micro-batch: forward, recomputation and backward, with a separate autograd graph.

On a CPU the autograd engine runs a graph in the thread that calls backward: one graph over all partitions would leave
the other threads idle. Each cell therefore has its own graph. It starts at leaves that are detached from the previous
partition's outputs, and ends at outputs whose gradients come from the next partition::

    values in ──detach──► leaves ──layers──► outputs ──detach──► values out
    gradients in ◄── of leaves ◄──autograd.grad── of outputs ◄── gradients out
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor, nn

from lightning_pipe._compat.torch import pytree
from lightning_pipe.engine import InputError, SetupError
from lightning_pipe.engine.runtime.thread_state import TorchThreadState, get_thread_state, use_thread_state
from lightning_pipe.pipe.loss import MicroBatchLoss
from lightning_pipe.pipe.partition import Modes, NamedBuffer, Partition
from lightning_pipe.pipe.position import MicroBatchPosition
from lightning_pipe.pipe.randomness import MiniBatchSeed
from lightning_pipe.pipe.skip import SkipKey, Skips


@dataclass
class Activations:
    """Values that one partition passes to other partitions for one micro-batch."""

    value: Any
    skips: Mapping[SkipKey, Any]


# Gradients of passed tensors, or None, in the order of the flattened values.
Gradients = dict[SkipKey | None, list[Tensor | None]]


@dataclass(frozen=True)
class MiniBatch:
    """State that the cells of a mini-batch share."""

    micro_batches: int
    seed: MiniBatchSeed
    grad: bool  # True if a backward will run
    state: TorchThreadState  # the caller's
    training_modes: Sequence[Modes]  # of each partition
    parameters: Sequence[Sequence[Tensor]]  # of each partition, those that require gradients
    token: object = field(default_factory=object)


class Cell:
    """Work of one partition on one micro-batch; a cell that computes the loss has a loss function."""

    def __init__(
        self,
        partition: Partition,
        mini_batch: MiniBatch,
        micro_batch: int,
        *,
        checkpointed: bool = False,
        loss: MicroBatchLoss | None = None,
    ) -> None:
        self.partition = partition
        self._mini_batch = mini_batch
        self._micro_batch = micro_batch
        self.checkpointed = checkpointed and mini_batch.grad  # keeps only inputs, and recomputes before backward
        self._loss = loss
        self._inputs: _FlattenedPytree | None = None  # leaves of the graph
        self._outputs: _FlattenedPytree | None = None  # outputs with their graph
        self._versions: list[int] = []  # versions of the inputs
        self._parameters: list[int] = []  # versions of the parameters
        self._buffers: list[NamedBuffer] = []  # copies from before the first run

    def forward(self, passed: Activations) -> Activations:
        """Run the layers and return their outputs, detached from the graph."""
        leaves = _FlattenedPytree.flatten(passed).map(self._leaf)
        if not self.checkpointed:
            outputs = self._run_layers_and_loss(leaves, recomputing=False)
            if self._mini_batch.grad:
                self._inputs, self._outputs = leaves, outputs
            return outputs.map(_detach).unflatten()
        self._buffers = self.partition.snapshot_buffers(self._mini_batch.training_modes[self.partition.index])
        with torch.no_grad():
            outputs = self._run_layers_and_loss(leaves, recomputing=False)
        self._inputs = leaves
        self._versions = [_get_tensor_version(tensor) for tensor in leaves.tensors()]
        self._parameters = [
            _get_tensor_version(parameter) for parameter in self._mini_batch.parameters[self.partition.index]
        ]
        # Without a graph it is unknown which outputs will require gradients, so all that can require them do.
        trains = bool(self._mini_batch.parameters[self.partition.index]) or any(
            leaf.requires_grad for leaf in leaves.tensors()
        )
        return outputs.map(
            lambda tensor: tensor.detach().requires_grad_(trains and _is_differentiable(tensor))
        ).unflatten()

    def recompute(self) -> None:
        """Run the layers again, with a graph and with the autocast state and random numbers of the first run."""
        leaves = self._inputs
        assert leaves is not None
        changed = {
            "the input": _was_changed_in_place(leaves, self._versions),
            "the training mode": self.partition.module_training_modes
            != self._mini_batch.training_modes[self.partition.index],
            "a parameter": self._parameters
            != [_get_tensor_version(parameter) for parameter in self._mini_batch.parameters[self.partition.index]],
        }
        if any(changed.values()):
            raise SetupError(
                f"{' and '.join(name for name in changed if changed[name])} of {self.partition.name} changed after its"
                " forward, but the recomputation needs the original. Change it after backward, or use"
                " checkpoint='never' if a layer changes it in its forward, such as an embedding with max_norm"
            )
        current, original = get_thread_state(), self._mini_batch.state
        autocast = current._replace(
            grad=True,
            autocast_cpu=original.autocast_cpu,
            autocast_cuda=original.autocast_cuda,
            autocast_cache=original.autocast_cache,
        )
        with use_thread_state(autocast):
            self._outputs = self._run_layers_and_loss(leaves, recomputing=True)
        self._buffers = []

    def backward(self, gradients: Gradients, add: Callable[[Tensor, Tensor], None]) -> Gradients:
        """Compute gradients of the inputs from gradients of the outputs (none for a loss), and free the graph."""
        leaves, outputs = self._inputs, self._outputs
        assert leaves is not None and outputs is not None
        self._inputs = self._outputs = None
        ends, output_gradients = [], []
        # Autograd adds gradients of several uses with the latest use first. Within one partition the order is unknown
        # here, and the use of the skip is assumed to be later than the use of the value.
        for key, tensors in sorted(
            outputs.parts.items(), key=lambda part: (-self.partition.skip_destination(part[0]), not part[0])
        ):
            part_gradients = gradients.get(key)
            for place, tensor in enumerate(tensors):
                gradient = None if part_gradients is None else part_gradients[place]
                if isinstance(tensor, Tensor) and tensor.requires_grad and (gradient is not None or self._loss):
                    ends.append(tensor)
                    output_gradients.append(gradient)
        starts = list({id(tensor): tensor for tensor in leaves.tensors() if tensor.requires_grad}.values())
        parameters = self._mini_batch.parameters[self.partition.index]
        leaf_gradients: list[Tensor | None] = [None] * (len(starts) + len(parameters))
        if ends and leaf_gradients:
            leaf_gradients = list(
                torch.autograd.grad(ends, [*starts, *parameters], output_gradients, allow_unused=True)
            )
        for parameter, gradient in zip(parameters, leaf_gradients[len(starts) :], strict=True):
            if gradient is not None:
                add(parameter, gradient)
        of_leaf = dict(zip(map(id, starts), leaf_gradients, strict=False))
        # A tensor that was passed in several times has one gradient, which is returned once.
        return {key: [of_leaf.pop(id(leaf), None) for leaf in part] for key, part in leaves.parts.items()}

    def _run_layers_and_loss(self, leaves: _FlattenedPytree, *, recomputing: bool) -> _FlattenedPytree:
        partition, mini_batch = self.partition, self._mini_batch
        training = mini_batch.training_modes[partition.index]
        in_place = partition.changes_input.get(training)
        # The layers get a copy of the input if they change it in place, or if that is not known yet.
        inputs = leaves.map(Tensor.clone) if in_place is not False else leaves
        versions = [_get_tensor_version(tensor) for tensor in inputs.tensors()]
        passed = inputs.unflatten()
        skips = Skips(passed.skips)
        where = MicroBatchPosition(self._micro_batch, mini_batch.micro_batches, recomputing, mini_batch.token)
        value = partition.run(
            passed.value, skips, where, mini_batch.seed, training, self._buffers if recomputing else None
        )
        if in_place is None and not torch.is_inference_mode_enabled():
            partition.changes_input[training] = _was_changed_in_place(inputs, versions)
        elif in_place is False and _was_changed_in_place(inputs, versions):
            raise SetupError(
                f"{partition.name} changes its input in place, but did not do so for the first micro-batch. Use"
                " out-of-place operations in its first layer"
            )
        if self._loss is not None:
            value = partition.compute_loss(self._loss, (training, self._loss.kind), value, where, mini_batch.seed)
        outputs = _FlattenedPytree.flatten(Activations(value, {key: skips.values[key] for key in partition.targets}))
        if torch.is_grad_enabled():
            self._refuse_unknown_graph_leaves(
                leaves, outputs, (training, None if self._loss is None else self._loss.kind)
            )
        return outputs

    def _refuse_unknown_graph_leaves(self, leaves: _FlattenedPytree, outputs: _FlattenedPytree, key: Any) -> None:
        """Refuse tensors that require gradients and are neither inputs nor parameters: they would get no gradient."""
        partition = self.partition
        if key in partition.known_graphs:
            return
        allowed_ids = {id(tensor) for tensor in (*leaves.tensors(), *self._mini_batch.parameters[partition.index])}
        seen, todo = set(), [tensor.grad_fn for tensor in outputs.tensors() if tensor.grad_fn is not None]
        while todo:
            node = todo.pop()
            if node in seen:
                continue
            seen.add(node)
            variable = getattr(node, "variable", None)
            if isinstance(variable, Tensor) and variable.requires_grad and id(variable) not in allowed_ids:
                raise SetupError(
                    f"a tensor of shape {tuple(variable.shape)} in {partition.name}, or in the loss after it, requires"
                    " a gradient but is not a parameter of a layer, so it would get no gradient. Make it a parameter of"
                    " a layer. If it belongs to the loss, make it a parameter of the last layer, or compute the loss of"
                    " pipe(x) outside the pipe"
                )
            todo += [following for following, _ in node.next_functions if following is not None]
        partition.known_graphs.add(key)

    def _leaf(self, tensor: Tensor) -> Tensor:
        return tensor.detach().requires_grad_(self._mini_batch.grad and tensor.requires_grad)


class _FlattenedPytree:
    """Passed values, flattened to lists: the value with key None, each skip with its key."""

    def __init__(self, parts: dict[SkipKey | None, list[Any]], specs: dict[SkipKey | None, Any]) -> None:
        self.parts = parts
        self._specs = specs

    @classmethod
    def flatten(cls, passed: Activations) -> _FlattenedPytree:
        flat = {key: pytree.tree_flatten(value) for key, value in [(None, passed.value), *passed.skips.items()]}
        for leaves, _ in flat.values():
            for leaf in leaves:
                if not isinstance(leaf, Tensor | nn.Module) and any(
                    isinstance(attribute, Tensor) for attribute in getattr(leaf, "__dict__", {}).values()
                ):
                    raise InputError(
                        f"a {type(leaf).__name__} that contains tensors is passed between layers, or to a pipe, which"
                        " cannot split or move them; expected tuples, lists and dictionaries of tensors"
                    )
        return cls({key: leaves for key, (leaves, _) in flat.items()}, {key: spec for key, (_, spec) in flat.items()})

    def tensors(self) -> list[Tensor]:
        return [leaf for part in self.parts.values() for leaf in part if isinstance(leaf, Tensor)]

    def map(self, change: Callable[[Tensor], Tensor]) -> _FlattenedPytree:
        """Replace each tensor by ``change(tensor)``, called once for a tensor that a value contains several times."""

        def map_leaf_tensors(part: list[Any]) -> list[Any]:
            tensors = {id(leaf): leaf for leaf in part if isinstance(leaf, Tensor)}
            replacements = {number: change(tensor) for number, tensor in tensors.items()}
            return [replacements.get(id(leaf), leaf) for leaf in part]

        return _FlattenedPytree({key: map_leaf_tensors(part) for key, part in self.parts.items()}, self._specs)

    def unflatten(self) -> Activations:
        values = {key: pytree.tree_unflatten(part, self._specs[key]) for key, part in self.parts.items()}
        value = values.pop(None)
        return Activations(value, {key: value for key, value in values.items() if key is not None})


def _detach(tensor: Tensor) -> Tensor:
    """Detach a tensor, keeping ``requires_grad``."""
    return tensor.detach().requires_grad_(tensor.requires_grad and _is_differentiable(tensor))


def _was_changed_in_place(inputs: _FlattenedPytree, versions: Sequence[int]) -> bool:
    return any(
        _get_tensor_version(tensor) != version for tensor, version in zip(inputs.tensors(), versions, strict=True)
    )


def _is_differentiable(tensor: Tensor) -> bool:
    return tensor.is_floating_point() or tensor.is_complex()


def _get_tensor_version(tensor: Tensor) -> int:
    """Return the number of in-place changes of a tensor; 0 for inference tensors, which have no version counter."""
    return 0 if tensor.is_inference() else tensor._version
