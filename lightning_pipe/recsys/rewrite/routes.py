"""One ``KJTAllToAll`` of an input dist: its keys of each rank, the features to send, and those that arrive.

    to rank 0    keys a, b of this rank  │                     from rank 0   keys a, b
    to rank 1    key c of this rank      │  ── all-to-all ──►  from rank 1   keys a, b   ──►  a of both, b of both

Results are equal to the bit to those of TorchRec's ``KJTAllToAllTensorsAwaitable``. That one reads on the device what
the ranks have told each other already: see :mod:`~lightning_pipe.recsys.rewrite.input_dist`.
"""

from __future__ import annotations

from itertools import accumulate, pairwise
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torchrec.distributed.dist_data import KJTAllToAll
from torchrec.distributed.types import Awaitable
from torchrec.sparse.jagged_tensor import KeyedJaggedTensor

from lightning_pipe._compat.torchrec import get_all_to_all_splits_and_stagger, permute_segments
from lightning_pipe.engine.runtime.record_stream import record_stream
from lightning_pipe.recsys.batches.transfer import move_tensor_to_device
from lightning_pipe.recsys.modules.ids_on_wire import narrow_ids


class KJTAllToAllRoute:
    """Keys that one all-to-all sends to each rank, and the order in which this rank needs those that arrive.

    Attributes:
        variable: True if features have a batch size per key, which is known from the first batch on.
    """

    def __init__(self, all_to_all: KJTAllToAll, group: dist.ProcessGroup, int32: bool = False) -> None:
        keys, stagger = get_all_to_all_splits_and_stagger(all_to_all)
        self.group, self.int32 = group, int32
        self.bounds = [0, *accumulate(keys)]  # first key of each rank
        self.number = keys[group.rank()]  # of keys that arrive from each rank
        step = group.size() // stagger
        self.senders = [first + step * node for first in range(step) for node in range(stagger)]
        self.variable = False
        self._order: Tensor | None = None

    def select_local_keys(self, keys: list[str]) -> list[str]:
        """Keys of this rank, of all keys that are sent."""
        rank = self.group.rank()
        return keys[self.bounds[rank] : self.bounds[rank + 1]]

    def compute_recat(self, strides: list[list[int]], device: torch.device) -> Tensor | None:
        """Permutation from senders first to keys first, of whole keys, or of bags if batch sizes of ranks differ."""
        if not self.number:
            return None
        if self._order is None:
            # A copy that the host waits for, once: every later stream may use it.
            self._order = torch.tensor(self._compute_key_recat(), dtype=torch.int32, device=device)
        if self.variable or self.has_equal_batch_sizes(strides):
            return self._order
        sizes = [stride for (stride,) in strides for _ in range(self.number)]
        ends = [*accumulate(sizes)]
        ordered = [*accumulate(sizes[key] for key in self._compute_key_recat())]
        offsets = move_tensor_to_device(torch.tensor([[0, *ends], [0, *ordered]], dtype=torch.int32), device)
        bags: Tensor = torch.ops.fbgemm.expand_into_jagged_permute(self._order, *offsets.unbind(), ends[-1])
        return bags

    @staticmethod
    def has_equal_batch_sizes(strides: list[list[int]]) -> bool:
        """True if all ranks have the same batch size."""
        return strides.count(strides[0]) == len(strides)

    def _compute_key_recat(self) -> list[int]:
        return [sender * self.number + key for key in range(self.number) for sender in self.senders]


class OutgoingFeatures:
    """Features that one all-to-all sends, ordered by rank.

    Attributes:
        lengths: number of ids of each key; None if only the device knows them (tables sharded by rows).
        strides: batch size, or that of each key if they vary.
        tensors: lengths, ids and, if there are any, weights.
    """

    def __init__(self, route: KJTAllToAllRoute, features: KeyedJaggedTensor) -> None:
        self.route = route
        self.keys = features.keys()
        self.variable = features.variable_stride_per_key()
        self.strides = features.stride_per_key() if self.variable else [features.stride()]
        self.lengths = features.length_per_key_or_none()
        lengths, ids, weights = features.lengths(), features.values(), features.weights_or_none()
        self.dtypes = lengths.dtype, ids.dtype  # on arrival
        if route.int32 and ids.dtype == torch.int64:
            lengths, ids = lengths.int(), narrow_ids(ids)
        self.tensors = [lengths, ids] if weights is None else [lengths, ids, weights]

    def sum_lengths_per_key(self) -> Tensor:
        """Number of ids of each key, on the device."""
        lengths = self.tensors[0]
        if not self.variable:
            return lengths.view(len(self.keys), self.strides[0]).sum(dim=1)
        bounds = move_tensor_to_device(torch.tensor([0, *accumulate(self.strides)]), lengths.device)
        totals: Tensor = torch.ops.fbgemm.asynchronous_complete_cumsum(lengths.long())
        return totals[bounds].diff()


class TensorsRequest(Awaitable[KeyedJaggedTensor]):
    """The tensors of a part in flight.

    Args:
        part: what this rank sends.
        sent: number of ids of each key that it sends.
        lengths: number of ids of each key that arrives, by sender.
        strides: batch size, or that of each key if they vary, by sender.
    """

    def __init__(
        self, part: OutgoingFeatures, sent: list[int], lengths: list[list[int]], strides: list[list[int]]
    ) -> None:
        super().__init__()
        route, variable = part.route, part.variable
        self._route, self._variable, self._dtypes = route, variable, part.dtypes
        self._keys = route.select_local_keys(part.keys)
        self._lengths, self._strides = lengths, strides
        self.input_splits = [sum(sent[start:end]) for start, end in pairwise(route.bounds)]
        self.output_splits = [sum(row) for row in lengths]
        if variable:
            bags_sent = [sum(part.strides[start:end]) for start, end in pairwise(route.bounds)]
            bags_received = [sum(row) for row in strides]
        else:
            bags_sent = [part.strides[0] * (end - start) for start, end in pairwise(route.bounds)]
            bags_received = [row[0] * route.number for row in strides]
        self._order = route.compute_recat(strides, part.tensors[0].device)
        self._works: list[Any] = []
        self._received: list[Tensor] = []
        # Held until they are sent, and not longer.
        self._sent = list(part.tensors)
        for index, tensor in enumerate(part.tensors):
            inputs, outputs = (self.input_splits, self.output_splits) if index else (bags_sent, bags_received)
            received = tensor.new_empty((sum(outputs), *tensor.shape[1:]))
            self._received.append(received)
            self._works.append(
                dist.all_to_all_single(
                    output=received,
                    input=tensor,
                    output_split_sizes=outputs,
                    input_split_sizes=inputs,
                    group=route.group,
                    async_op=True,
                )
            )

    def fill_sharding_context(self, context: Any) -> None:
        """Set what the output dist reads in TorchRec's context of one sharding."""
        values = {
            "input_splits": self.input_splits,
            "output_splits": self.output_splits,
            "sparse_features_recat": self._order,
        }
        if not self._variable:
            values["batch_size_per_rank"] = [stride for (stride,) in self._strides]
        for name, value in values.items():
            if hasattr(context, name):
                setattr(context, name, value)

    def _wait_impl(self) -> KeyedJaggedTensor:
        for work in self._works:
            work.wait()
        self._works.clear()
        self._sent.clear()
        record_stream([self._received, self._order])  # made on the stream of the task before
        lengths, ids, weights = self._apply_recat(*self._received)
        self._received.clear()  # before the wider copies are made, to limit the memory
        per_key = [sum(of_key) for of_key in zip(*self._lengths, strict=True)]
        return KeyedJaggedTensor(
            keys=self._keys,
            values=ids.to(self._dtypes[1]),
            weights=weights,
            lengths=lengths.to(self._dtypes[0]),
            stride=None if self._variable else sum(stride for (stride,) in self._strides),
            stride_per_key_per_rank=self._strides_per_key() if self._variable else None,
            length_per_key=per_key,
            offset_per_key=[0, *accumulate(per_key)],
        )

    def _apply_recat(
        self, lengths: Tensor, ids: Tensor, weights: Tensor | None = None
    ) -> tuple[Tensor, Tensor, Tensor | None]:
        order = self._order
        if order is None:
            return lengths, ids, weights
        if self._variable:
            sizes = move_tensor_to_device(torch.tensor([self._strides, self._lengths]).flatten(1), ids.device)
            lengths, _ = permute_segments(lengths, sizes[0], order)
            ids, weights = permute_segments(ids, sizes[1], order, weights)
            return lengths, ids, weights
        if not self._route.has_equal_batch_sizes(self._strides):
            permuted = torch.ops.fbgemm.permute_1D_sparse_data(order, lengths, ids, weights, ids.numel())
        elif stride := self._strides[0][0]:
            permuted = torch.ops.fbgemm.permute_2D_sparse_data(
                order, lengths.view(-1, stride), ids, weights, ids.numel()
            )
        else:
            return lengths, ids, weights
        return permuted[0].view(-1), permuted[1], permuted[2]

    def _strides_per_key(self) -> Tensor:
        """Batch size of each key by sender: int64 on the CPU, [keys, ranks]."""
        if not self._keys:
            return torch.zeros(0, 1, dtype=torch.int64)
        return torch.tensor(self._strides).T[:, self._route.senders]
