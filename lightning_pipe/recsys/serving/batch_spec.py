"""A batch as a list of named tensors, the inputs of an exported program, and back."""

from __future__ import annotations

import copy
import dataclasses
from collections.abc import Callable, Collection, Iterator, Mapping
from typing import Any

from torch import Tensor, nn
from torch.export import Dim
from torchrec.sparse.jagged_tensor import KeyedJaggedTensor

from lightning_pipe.engine.common.errors import InputError
from lightning_pipe.recsys.batches.traversal import LEAF_TYPES, iterate_leaves


class BatchSpec:
    """Form of a model's batches: which tensors they hold, and where.

    A ``KeyedJaggedTensor`` is given as its values of shape [ids], its lengths of shape [keys, B] and, if it has them,
    its weights of shape [ids]. Tensors whose first dimension is B can have another batch size; others keep their shape.
    """

    def __init__(self, batch: Any, without: Collection[str] = ()) -> None:
        self._example, self._without = batch, frozenset(without)
        self.names: list[str] = []  # such as "dense" or "sparse.values"
        self._keys: dict[str, list[str]] = {}
        for name, piece in _iterate_named_leaves(batch):
            if isinstance(piece, KeyedJaggedTensor):
                self._keys[name] = piece.keys()
                weights = ["weights"] if piece.weights_or_none() is not None else []
                self.names += [f"{name}.{part}" for part in ("values", "lengths", *weights)]
            elif isinstance(piece, Tensor):
                self.names.append(name)
            else:
                raise InputError(f"{name} is a {type(piece).__name__}; expected tensors and KeyedJaggedTensors")
        self.names = [name for name in self.names if name not in self._without]
        if not self.names:
            raise InputError(f"expected a batch with tensors, got a {type(batch).__name__} without any")
        jagged = [piece.stride() for _, piece in _iterate_named_leaves(batch) if isinstance(piece, KeyedJaggedTensor)]
        tensors = [
            piece.shape[0] for _, piece in _iterate_named_leaves(batch) if isinstance(piece, Tensor) and piece.dim()
        ]
        self.rows = int((jagged + tensors)[0])

    def flatten(self, batch: Any) -> list[Tensor]:
        """Return the tensors of a batch of this form, in the order of :attr:`names`."""
        by_name = self._collect_named_tensors(batch)
        return [by_name[name] for name in self.names]

    @staticmethod
    def _collect_named_tensors(batch: Any) -> dict[str, Tensor]:
        tensors: dict[str, Tensor] = {}
        for name, piece in _iterate_named_leaves(batch):
            if isinstance(piece, KeyedJaggedTensor):
                tensors[f"{name}.values"] = piece.values()
                tensors[f"{name}.lengths"] = piece.lengths().view(len(piece.keys()), -1)
                if (weights := piece.weights_or_none()) is not None:
                    tensors[f"{name}.weights"] = weights
            else:
                tensors[name] = piece
        return tensors

    def collect_left_out_tensors(self) -> dict[str, Tensor]:
        """Return the example's tensors that are not inputs, without weights, whose size is that of the ids."""
        weights = {f"{name}.weights" for name in self._keys}
        tensors = self._collect_named_tensors(self._example).items()
        return {name: tensor for name, tensor in tensors if name in self._without - weights}

    def unflatten(self, tensors: tuple[Tensor, ...], left_out: Mapping[str, Tensor]) -> Any:
        """Return a batch with other tensors, in the order of :attr:`names`, and *left_out* in place of the others."""
        by_name = {**left_out, **dict(zip(self.names, tensors, strict=True))}

        def rebuild_batch_leaf(name: str, piece: Any) -> Any:
            if name not in self._keys:
                return by_name[name]
            lengths = by_name[f"{name}.lengths"].reshape(-1)
            weights = by_name.get(f"{name}.weights")
            return KeyedJaggedTensor(self._keys[name], by_name[f"{name}.values"], weights, lengths=lengths)

        pieces = (rebuild_batch_leaf(name, piece) for name, piece in _iterate_named_leaves(self._example))
        return _replace_leaves(self._example, lambda: next(pieces))

    def description(self, batch: Any, model: nn.Module) -> dict[str, Any]:
        """Return what a server must know: each tensor's name, type and shape, and the keys of lengths, as plain data.

        Dimensions that can differ are ``"batch"`` (B) or ``"ids"``. ``rows`` has the number of rows of the smallest
        table that reads a key: ids must be smaller.
        """
        shapes = zip(self.names, self.flatten(batch), self.dynamic_shapes(), strict=True)
        inputs = []
        for name, tensor, dynamic in shapes:
            shape: list[int | str] = list(tensor.shape)
            for place, dimension in dynamic.items():
                shape[place] = "ids" if dimension is Dim.DYNAMIC else "batch"
            inputs.append({"name": name, "type": str(tensor.dtype).removeprefix("torch."), "shape": shape})
        rows: dict[str, int] = {}
        for config in unsharded_table_configs(model):
            for key in config.feature_names:
                rows[key] = min(config.num_embeddings, rows.get(key, config.num_embeddings))
        return {"inputs": inputs, "keys": self._keys, "rows": rows}

    def dynamic_shapes(self) -> tuple[dict[int, Any], ...]:
        """Dimensions of each tensor that can differ from the example's, for ``torch.export``."""
        rows = Dim("batch", min=1)
        shapes: list[dict[int, Any]] = []
        for name, tensor in zip(self.names, self.flatten(self._example), strict=True):
            owner, _, part = name.rpartition(".")
            if owner in self._keys:
                shapes.append({1: rows} if part == "lengths" else {0: Dim.DYNAMIC})
            else:
                shapes.append({0: rows} if tensor.dim() and tensor.shape[0] == self.rows else {})
        return tuple(shapes)


class Scorer(nn.Module):
    """A model whose inputs are the tensors of a batch."""

    def __init__(self, model: nn.Module, form: BatchSpec) -> None:
        super().__init__()
        self.model = model
        self._form = form
        self._left_out: list[str] = []
        for index, (name, tensor) in enumerate(form.collect_left_out_tensors().items()):
            self._left_out.append(name)
            self.register_buffer(f"left_out_{index}", tensor)

    def forward(self, *tensors: Tensor) -> Any:
        left_out = {name: self.get_buffer(f"left_out_{index}") for index, name in enumerate(self._left_out)}
        batch = self._form.unflatten(tensors, left_out)
        step = getattr(self.model, "predict_step", None)
        return self.model(batch) if step is None else step(batch, 0)


def unsharded_table_configs(model: nn.Module) -> Iterator[Any]:
    """Yield TorchRec's description of each table of an unsharded model."""
    for module in model.modules():
        yield from getattr(module, "embedding_bag_configs", getattr(module, "embedding_configs", tuple))()


def _iterate_named_leaves(batch: Any) -> Iterator[tuple[str, Any]]:
    for path, piece in iterate_leaves(batch):
        name = "".join(map(str, path)).lstrip(".").replace("['", ".").replace("']", "").lstrip(".")
        yield name or "batch", piece


def _replace_leaves(value: Any, next_piece: Callable[[], Any]) -> Any:
    """Return *value* with its pieces replaced in the order of :func:`iterate_leaves`."""
    if isinstance(value, LEAF_TYPES):
        return next_piece()
    if isinstance(value, Mapping):
        return {key: _replace_leaves(entry, next_piece) for key, entry in value.items()}
    if isinstance(value, tuple) and hasattr(value, "_fields"):
        return type(value)(*(_replace_leaves(entry, next_piece) for entry in value))
    if isinstance(value, list | tuple):
        return type(value)(_replace_leaves(entry, next_piece) for entry in value)
    if dataclasses.is_dataclass(value) and not isinstance(value, type):
        copied = copy.copy(value)
        for field in dataclasses.fields(value):
            object.__setattr__(copied, field.name, _replace_leaves(getattr(value, field.name), next_piece))
        return copied
    return value
