"""Lookups in two parts: rows that the batch before does not train, ahead of a batch's turn, and the others at its turn.

    rows of a batch, on the rank that owns them
      ├─ not in the batch before ─► sent while that batch trains ───────────────────┐
      └─ in it ─► looked up again and sent after its tables' backward ──────────────┴─► output, in the usual order

The rows ahead come from a lookup of the whole batch with autograd, and backward goes through that lookup as usual: one
message with all gradients, and one call of each kernel with all ids. So each optimizer steps once per batch, with the
same sums as without the division.

TorchRec's ``ShardedPECEmbeddingCollection`` does this for sequences from tables sharded by rows. It divides gradients
as well, and then calls each kernel twice per batch.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from itertools import accumulate, islice
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torchrec.distributed.comm_ops import get_gradient_division
from torchrec.distributed.dist_data import (
    PooledEmbeddingsAllToAll,
    PooledEmbeddingsAwaitable,
    SequenceEmbeddingsAwaitable,
)
from torchrec.distributed.types import Awaitable, QuantizedCommCodec
from torchrec.sparse.jagged_tensor import KeyedJaggedTensor

from lightning_pipe._compat.torchrec import (
    get_output_all_to_all,
    get_output_group_and_codecs,
    permute_segments,
    pooled_columns_by_rank,
    tables_of_lookup,
)
from lightning_pipe.engine.runtime.record_stream import record_stream
from lightning_pipe.recsys.batches.transfer import move_tensor_to_device

# ---------------------------------------------------------------------- which rows wait


class NewestBatchRows:
    """Finds the ids of a batch that the batch before it has, too. Takes one byte per row of this rank.

    Args:
        tables: name, number of rows on this rank, and number of features of each table, in the order of the features.
        device: device of the ids.
    """

    def __init__(self, tables: Sequence[tuple[str, int, int]], device: torch.device) -> None:
        rows = {name: count for name, count, _ in tables}  # shards of columns have the rows of their table in common
        starts = dict(zip(rows, accumulate(rows.values(), initial=0), strict=False))
        names = [name for name, _, features in tables for _ in range(features)]
        self._starts = torch.tensor([starts[name] for name in names], dtype=torch.int64, device=device)
        self._rows = torch.tensor([rows[name] for name in names], dtype=torch.int64, device=device)
        self._marked = torch.zeros(sum(rows.values()), dtype=torch.bool, device=device)
        self._places: Tensor | None = None

    def replace(self, features: KeyedJaggedTensor) -> Tensor:
        """Make *features* the newest batch. Return True for each of its ids that the batch before may have, too."""
        lengths = features.lengths().view(len(self._rows), features.stride()).sum(1)
        ids = features.values().long()
        starts, rows = (
            values.repeat_interleave(lengths, output_size=len(ids)) for values in (self._starts, self._rows)
        )
        # FBGEMM looks up row 0 for an id outside of its table.
        places = torch.where((ids < 0) | (ids >= rows), 0, ids) + starts
        if self._places is None:  # the batch before is unknown
            shared = torch.ones_like(ids, dtype=torch.bool)
        else:
            shared = self._marked[places]
            self._marked[self._places] = False
        self._marked[places] = True
        self._places = places
        return shared


class RowDivision:
    """Division of the rows that an output dist sends for one batch.

    Args:
        features: features of the batch.
        shared: True for each id that is looked up again at the batch's turn.
        order: places of the sent rows in the lookup's output; None if rows are sent in that order.
        late: True for each sent row that waits, in the order in which rows are sent.
        sent: number of rows sent to each rank.
        received: number of rows received from each rank.

    Attributes:
        late_features: features with the shared ids only, known after :meth:`complete`, as all that follows.
        ahead_places: places of the rows sent ahead in the output of the lookup, in the order in which they are sent.
        late_places: places of the late rows in the output of the late lookup, in the same order.
        ahead_received: places of the rows that come ahead among all that are received.
        late_received: places of the late rows among all that are received.
        late_sent_counts: number of late rows sent to each rank.
        late_received_counts: number of late rows received from each rank.
    """

    late_features: KeyedJaggedTensor
    ahead_places: Tensor
    late_places: Tensor
    ahead_received: Tensor
    late_received: Tensor
    late_sent_counts: list[int]
    late_received_counts: list[int]

    def __init__(
        self,
        features: KeyedJaggedTensor,
        shared: Tensor,
        order: Tensor | None,
        late: Tensor,
        sent: list[int],
        received: list[int],
    ) -> None:
        self._features, self._shared = features, shared
        self.order = order
        self.late = late
        self.sent = sent
        self.received = received
        self._lengths = _count_before(shared)[features.offsets().long()].diff()  # of the bags of late_features

    def numbers(self, received: Sequence[Tensor]) -> list[Tensor]:
        """Numbers that :meth:`complete` needs on the host, with the flags of the rows received from each rank."""
        flags = [*self.late.split(self.sent), *received]
        per_key = self._lengths.view(len(self._features.keys()), self._features.stride()).sum(1)
        return [torch.stack([of_rank.sum() for of_rank in flags]), per_key]

    def complete(self, received: Sequence[Tensor], numbers: Sequence[int]) -> None:
        """Set all attributes. The host waits for nothing."""
        ranks = len(self.sent)
        self.late_sent_counts, self.late_received_counts = list(numbers[:ranks]), list(numbers[ranks : 2 * ranks])
        self.ahead_places, late = _split_places(self.late, sum(self.late_sent_counts))
        self.ahead_received, self.late_received = _split_places(
            torch.cat(list(received)), sum(self.late_received_counts)
        )
        self.late_places = late
        if self.order is not None:
            self.ahead_places = self.order[self.ahead_places]
            # The late lookup returns the rows of the shared ids only, in their order.
            self.late_places = _count_before(self._shared)[self.order[late]]
        per_key = list(numbers[2 * ranks :])
        _, ids = _split_places(self._shared, sum(per_key))
        features, weights = self._features, self._features.weights_or_none()
        self.late_features = KeyedJaggedTensor(
            keys=features.keys(),
            values=features.values()[ids],
            weights=None if weights is None else weights[ids],
            lengths=self._lengths.to(features.lengths().dtype),
            stride=features.stride(),
            length_per_key=per_key,
            offset_per_key=[0, *accumulate(per_key)],
        )


def _count_before(flags: Tensor) -> Tensor:
    """Number of flags that are set before each one, and before the end."""
    return torch.cat([flags.new_zeros(1, dtype=torch.int64), flags.cumsum(0)])


def _split_places(flags: Tensor, count: int) -> tuple[Tensor, Tensor]:
    """Places of the flags that are not set, and of the *count* that are."""
    unset = torch.nonzero_static(~flags, size=len(flags) - count).squeeze(1)
    return unset, torch.nonzero_static(flags, size=count).squeeze(1)


class DividedOutputDist:
    """One sharding of a module: its lookup and its output dist.

    Args:
        lookup: TorchRec's lookup.
        output_dist: TorchRec's output dist, for which :func:`get_output_all_to_all` returns an all-to-all.
        device: device of the rows.
    """

    def __init__(self, lookup: nn.Module, output_dist: nn.Module, device: torch.device) -> None:
        self.lookup = lookup
        self._all_to_all: Any = get_output_all_to_all(output_dist)
        self.group, codecs = get_output_group_and_codecs(self._all_to_all)
        self.forward_codec = None if codecs is None else codecs.forward
        self.backward_codec = None if codecs is None else codecs.backward
        self._newest = NewestBatchRows(tables_of_lookup(lookup), device)
        self.columns_by_rank: list[int] | None = None  # of pooled embeddings
        self.row_width = 0  # 0 for sequences, whose rows are those of the lookup
        if isinstance(self._all_to_all, PooledEmbeddingsAllToAll):
            columns = pooled_columns_by_rank(output_dist)
            self.columns_by_rank = [sum(of_rank) for of_rank in columns]
            # Pooled embeddings are sent as rows of one width, so that each bag is a whole number of rows.
            self.row_width = math.gcd(*(dimension for of_rank in columns for dimension in of_rank))
            rows = [dimension // self.row_width for dimension in columns[self.group.rank()]]
            self._rows_per_bag = torch.tensor(rows, dtype=torch.int64, device=device)

    def divide(self, features: KeyedJaggedTensor, context: Any) -> RowDivision:
        """Divide the rows of a batch by whether the batch before it has them, too.

        Args:
            features: features after the input dist.
            context: TorchRec's context of this sharding after the input dist.
        """
        ranks = self.group.size()
        sizes: list[int] = context.batch_size_per_rank or [features.stride() // ranks] * ranks
        shared = self._newest.replace(features)
        if self.columns_by_rank is not None:
            return self._divide_bags(features, shared, sizes)
        lengths = features.lengths().view(len(features.keys()), features.stride())
        counts = torch.stack([of_rank.sum(1) for of_rank in lengths.split(sizes, dim=1)], dim=1)  # features x ranks
        by_rank = torch.arange(counts.numel(), dtype=torch.int32, device=counts.device).view_as(counts).T.flatten()
        places = torch.arange(len(shared), device=shared.device)
        order, _ = permute_segments(places, counts.flatten(), by_rank)
        # TorchRec's names are those of the input dist.
        sent, received = list(context.output_splits), list(context.input_splits)
        return RowDivision(features, shared, order, shared[order], sent, received)

    def _divide_bags(self, features: KeyedJaggedTensor, shared: Tensor, sizes: list[int]) -> RowDivision:
        assert self.columns_by_rank is not None
        offsets, rank = features.offsets().long(), self.group.rank()
        waits = _count_before(shared)[offsets].diff() > 0  # a bag with one such id
        rows = [columns // self.row_width for columns in self.columns_by_rank]
        by_sample = waits.view(len(features.keys()), features.stride()).T
        late = by_sample.repeat_interleave(self._rows_per_bag, dim=1, output_size=rows[rank]).flatten()
        # The late lookup returns all bags; those without ids are not sent.
        in_late_bag = waits.repeat_interleave(offsets.diff(), output_size=len(shared))
        sent = [rows[rank] * size for size in sizes]
        received = [sizes[rank] * rows_of_rank for rows_of_rank in rows]
        return RowDivision(features, in_late_bag, None, late, sent, received)

    # ------------------------------------------------------------------ the rows

    @contextmanager
    def sending_ahead(self, division: RowDivision) -> Iterator[list[DividedRows]]:
        """Context in which the output dist sends the rows that do not wait, and adds them to the list yielded."""
        divided: list[DividedRows] = []

        def send(rows: Tensor, *_: Any, unbucketize_permute_tensor: Tensor | None = None, **__: Any) -> Awaitable[Any]:
            divided.append(DividedRows(self, division, rows))
            if self.columns_by_rank is None:
                return SequenceEmbeddingsAwaitable(divided[0], unbucketize_permute_tensor, rows.shape[1])
            awaitable = PooledEmbeddingsAwaitable(divided[0])
            awaitable.callbacks.extend(self._all_to_all.callbacks)
            return awaitable

        self._all_to_all.forward = send
        try:
            yield divided
        finally:
            del self._all_to_all.forward


class DividedRows(Awaitable[Tensor]):
    """The output of one lookup on its way in two messages. The first one is sent when this object is made.

    Args:
        output_dist: where it is sent.
        division: its division, after the exchange.
        rows: output of the lookup of the whole batch, with its graph.
    """

    def __init__(self, output_dist: DividedOutputDist, division: RowDivision, rows: Tensor) -> None:
        super().__init__()
        self._dist, self._division = output_dist, division
        self._shape, self._width = rows.shape, output_dist.row_width or rows.shape[1]
        counts = _subtract(division.sent, division.late_sent_counts)
        # What other ranks get ahead, and in all.
        rank, row_bytes = output_dist.group.rank(), self._width * rows.element_size()
        self.sent_bytes = tuple((sum(rows_sent) - rows_sent[rank]) * row_bytes for rows_sent in (counts, division.sent))
        self._ahead: _Message | None = self._send(
            rows.detach().reshape(-1, self._width)[division.ahead_places],
            counts,
            _subtract(division.received, division.late_received_counts),
        )
        self._late: _Message | None = None
        self._gradients: _Message | None = None
        self._source = _RowsToSend.apply(rows, self)

    def drop(self) -> None:
        """Give up the rows that are on their way to this rank."""
        if self._ahead is not None and self._source.device.type != "cpu":
            self._ahead.wait()  # on the device only, which then may use the memory again

    def send_late_rows(self) -> None:
        """Look up the rows that have waited, and send them. Without gradients: those take the way of all rows."""
        division = self._division
        with torch.no_grad():
            rows = self._dist.lookup(division.late_features).reshape(-1, self._width)[division.late_places]
        self._late = self._send(rows, division.late_sent_counts, division.late_received_counts)

    def _wait_impl(self) -> Tensor:
        received: Tensor = _ReceivedRows.apply(self._source, self)
        return received

    def merge(self) -> Tensor:
        """Wait for both messages and return the rows in the order of the output dist's own result."""
        assert self._ahead is not None and self._late is not None
        division = self._division
        rows = self._ahead.wait().view(-1, self._width)
        merged = rows.new_empty(sum(division.received), self._width)
        merged.index_copy_(0, division.ahead_received, rows)
        merged.index_copy_(0, division.late_received, self._late.wait().view(-1, self._width))
        self._ahead = self._late = None
        columns = self._dist.columns_by_rank
        if columns is None:
            return merged
        blocks = merged.split(division.received)
        return torch.cat([block.view(-1, dim) for block, dim in zip(blocks, columns, strict=True) if dim], dim=1)

    # ------------------------------------------------------------------ gradients, all in one message

    def send_gradients(self, gradient: Tensor) -> None:
        """Submit the exchange of the gradients of what :meth:`merge` has returned."""
        columns = self._dist.columns_by_rank
        if columns is not None:
            gradient = torch.cat([block.reshape(-1) for block in gradient.split(columns, dim=1)])
        self._gradients = self._send(
            gradient.reshape(-1, self._width), self._division.received, self._division.sent, backward=True
        )

    def wait_for_gradients(self) -> Tensor:
        """Return the gradients of the lookup's output."""
        assert self._gradients is not None
        rows = self._gradients.wait().view(-1, self._width)
        self._gradients = None
        if self._division.order is not None:
            rows = torch.empty_like(rows).index_copy_(0, self._division.order, rows)
        if get_gradient_division():
            rows.div_(self._dist.group.size())
        return rows.view(self._shape)

    def _send(self, rows: Tensor, sent: Sequence[int], received: Sequence[int], *, backward: bool = False) -> _Message:
        codec = self._dist.backward_codec if backward else self._dist.forward_codec
        return _Message(
            self._dist.group, rows, [n * self._width for n in sent], [n * self._width for n in received], codec
        )


def _subtract(counts: Sequence[int], late: Sequence[int]) -> list[int]:
    return [count - late_count for count, late_count in zip(counts, late, strict=True)]


class _Message:
    """One all-to-all of rows, in the format of *codec*. *sent* and *received* are numbers of values by rank."""

    def __init__(
        self,
        group: dist.ProcessGroup,
        rows: Tensor,
        sent: list[int],
        received: list[int],
        codec: QuantizedCommCodec[Any] | None,
    ) -> None:
        self._codec = codec
        values = rows.contiguous().view(-1)
        if codec is not None:
            self._context = codec.create_context()
            values = codec.encode(values, self._context)
            sent, received = (
                [codec.calc_quantized_size(n, self._context) for n in sizes] for sizes in (sent, received)
            )
        self._received = values.new_empty(sum(received))
        self._work: Any = dist.all_to_all_single(
            output=self._received,
            input=values,
            output_split_sizes=received,
            input_split_sizes=sent,
            group=group,
            async_op=True,
        )

    def wait(self) -> Tensor:
        self._work.wait()
        return self._received if self._codec is None else self._codec.decode(self._received, self._context)


class _RowsToSend(torch.autograd.Function):
    """Start of the way of the rows. Its backward, the last of an output dist, waits for the gradients."""

    @staticmethod
    def forward(ctx: Any, rows: Tensor, divided: DividedRows) -> Tensor:
        ctx.divided = divided
        return rows.new_empty(0)

    @staticmethod
    @torch.autograd.function.once_differentiable
    def backward(ctx: Any, _: Tensor) -> tuple[Tensor, None]:
        return ctx.divided.wait_for_gradients(), None


class _ReceivedRows(torch.autograd.Function):
    """End of the way of the rows. Its backward sends the gradients, for all modules before the first waits."""

    @staticmethod
    def forward(ctx: Any, source: Tensor, divided: DividedRows) -> Tensor:
        ctx.divided = divided
        return divided.merge()

    @staticmethod
    @torch.autograd.function.once_differentiable
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor, None]:
        ctx.divided.send_gradients(gradient)
        return gradient.new_zeros(0), None


# ---------------------------------------------------------------------- which received rows come late


class DivisionExchange:
    """One all-to-all that tells every rank which of the rows that it will receive come late.

    Args:
        divisions: divisions of a batch, in the same order on every rank.
        group: process group of the output dists.
        flags: further flags, which every rank sends to every other; equal in number on every rank.

    Attributes:
        set_anywhere: for each of the further flags, True if it is set on any rank; known after the wait.
    """

    set_anywhere: list[bool]

    def __init__(self, divisions: Sequence[RowDivision], group: dist.ProcessGroup, flags: Sequence[bool]) -> None:
        self._divisions = divisions
        by_division = [division.late.split(division.sent) for division in divisions]
        further = move_tensor_to_device(torch.tensor(flags, dtype=torch.bool), divisions[0].late.device)
        # For each rank, the rows of all divisions.
        sent = torch.cat([part for parts in zip(*by_division, strict=True) for part in (*parts, further)])
        sent_sizes = [sum(sizes) for sizes in zip(*(division.sent for division in divisions), strict=True)]
        self._sizes = [
            (*sizes, len(flags)) for sizes in zip(*(division.received for division in divisions), strict=True)
        ]
        self._received = sent.new_empty(sum(map(sum, self._sizes)), dtype=torch.uint8)
        self._work: Any = dist.all_to_all_single(
            output=self._received,
            input=sent.to(torch.uint8),
            output_split_sizes=[sum(sizes) for sizes in self._sizes],
            input_split_sizes=[size + len(flags) for size in sent_sizes],
            group=group,
            async_op=True,
        )

    def wait(self) -> None:
        """Complete the divisions. The host waits once, for the numbers of all late rows."""
        self._work.wait()
        record_stream([self._received, *(list(vars(division).values()) for division in self._divisions)])
        parts = self._received.bool().split([size for sizes in self._sizes for size in sizes])
        *received, further = (parts[index :: len(self._divisions) + 1] for index in range(len(self._divisions) + 1))
        numbers = [
            division.numbers(of_division) for division, of_division in zip(self._divisions, received, strict=True)
        ]
        set_anywhere = torch.stack(list(further)).any(dim=0).long()
        known = iter(torch.cat([*(tensor for tensors in numbers for tensor in tensors), set_anywhere]).tolist())
        for division, of_division, tensors in zip(self._divisions, received, numbers, strict=True):
            division.complete(of_division, list(islice(known, sum(map(len, tensors)))))
        self.set_anywhere = list(map(bool, known))
