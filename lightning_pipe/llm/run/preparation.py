"""From a loader's batch to the micro-batches of one step, ahead of it.

Ranks tell each other a few numbers of each batch, while an earlier one trains::

    begin    cut into micro-batches, count its tokens, measure its length ──► gather (rows, length, tokens) of all ranks
    finish   wait; compare; the longest of the pipeline's ranks is the length to pad to; the tokens of all are summed
"""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from lightning_pipe._compat.torch import tree_leaves
from lightning_pipe.engine.common.errors import InputError
from lightning_pipe.llm.batches.microbatches import MicroBatches, split_batch
from lightning_pipe.llm.batches.padding import SequenceKeys, pad_microbatch, target_length
from lightning_pipe.llm.parallel.context_ranks import ContextRanks
from lightning_pipe.llm.parallel.hf_documents import HFDocuments
from lightning_pipe.llm.run.runner import StageInputs

__all__ = ["BatchPreparation", "Lengths", "PreparedBatch", "StepInputs"]

MicroBatch = Mapping[str, Any]


@dataclass(frozen=True)
class Lengths:
    """What sequences are padded to.

    Args:
        variable: to the longest of the step; else always to ``maximum``.
        multiple_of: rounded up to a multiple of this.
        maximum: the most that the model takes; None for no limit.
        buckets: rounded up to the next of these.
    """

    variable: bool = True
    multiple_of: int = 1
    maximum: int | None = None
    buckets: tuple[int, ...] | None = None

    def up_to(self, maximum: int | None) -> Lengths:
        """The same, with this maximum where there was none."""
        return self if self.maximum is not None else replace(self, maximum=maximum)

    def of(self, longest: int) -> int:
        """The length to pad to, where *longest* is the longest of all."""
        target = target_length(longest, self.multiple_of, self.maximum, self.buckets)
        return target if self.variable or self.maximum is None else self.maximum


@dataclass
class PreparedBatch:
    """A batch on its way: its numbers are being gathered."""

    batch: Any
    cut: MicroBatches | None
    error: Exception | None
    gathered: Tensor
    work: dist.Work
    seen: Sequence[tuple[Any, int]] = ()

    def is_of(self, batch: Any) -> bool:
        """Whether it was prepared from this batch, as it is now."""
        if self.batch is not batch:
            return False
        now = _contents(batch)
        return len(now) == len(self.seen) and all(
            one is other and version == before for (one, version), (other, before) in zip(now, self.seen, strict=True)
        )


@dataclass(frozen=True)
class StepInputs:
    """What one schedule step takes.

    Attributes:
        micro_batches: of the stages.
        tokens: loss tokens of all data-parallel ranks together.
        cut: how the batch was cut, for joining outputs.
        length: that all sequences were padded to, those of other context ranks included.
        lengths: of each micro-batch before that.
    """

    micro_batches: list[StageInputs]
    tokens: int
    cut: MicroBatches
    length: int
    lengths: tuple[int, ...]


class BatchPreparation:
    """Cuts batches and agrees on their lengths; every rank calls the same methods for its batches in the same order.

    Args:
        model_inputs: gives arguments and keywords of the model for a micro-batch.
        loss_tokens: counts a micro-batch's loss tokens.
        group: of all ranks, on the CPU; used by nothing else that runs beside it.
        pipelines: the ranks of each pipeline in that group; all of one pipeline have the same batch.
        num_microbatches: of a batch that is not a list of micro-batches already.
        lengths: what sequences are padded to.
        keys: which values are padded.
        strict: whether rows that do not fill the micro-batches are an error.
        ignore_index: of labels that do not count.
        context: the ranks that share this one's sequences; None for this one alone.
        compare: whether ranks of one pipeline compare their batches, tensor by tensor.
        documents: keeps the documents of packed rows apart, where no other ranks share the sequences; None where that
            is the model's own.
    """

    def __init__(
        self,
        model_inputs: Callable[[MicroBatch], tuple[tuple[Any, ...], dict[str, Any]]],
        loss_tokens: Callable[[MicroBatch], int],
        group: dist.ProcessGroup,
        pipelines: Sequence[Sequence[int]],
        num_microbatches: int,
        *,
        lengths: Lengths,
        keys: SequenceKeys,
        strict: bool = False,
        ignore_index: int = -100,
        context: ContextRanks | None = None,
        compare: bool = False,
        documents: HFDocuments | None = None,
    ) -> None:
        self._model_inputs = model_inputs
        self._loss_tokens = loss_tokens
        self._group = group
        self._pipelines = [list(ranks) for ranks in pipelines]
        self._mine = next(ranks for ranks in self._pipelines if group.rank() in ranks)
        self._num_microbatches = num_microbatches
        self._lengths = lengths
        self._keys = keys
        self._strict = strict
        self._ignore_index = ignore_index
        self._context = context
        self._compare = compare
        self._documents = documents

    def begin(self, batch: Any, *, counts: bool = True) -> PreparedBatch:
        """Cut a batch and send its numbers on their way.

        Args:
            batch: a loader's batch.
            counts: False to leave its tokens out of the total, for a batch of another pipeline.
        """
        cut, error = None, None
        numbers = [0, 0, 0, 0, 0]
        try:
            cut = split_batch(batch, self._num_microbatches, ignore_index=self._ignore_index, strict=self._strict)
            tokens = sum(map(self._count, cut.items))
            self._check_added_rows(cut)
            sizes = [self._size(item) for item in cut.items]
            for item, (_, length) in zip(cut.items, sizes, strict=True):
                # Changes nothing yet, but refuses what cannot be padded, or cut.
                padded = pad_microbatch(item, length, self._keys)
                if self._context is not None:
                    self._context.check(padded, self._keys)
                elif self._documents is not None:
                    self._documents.check(padded)
            digest = _digest(cut.items) if self._compare else 0
            longest = max(length for _, length in sizes)
            numbers = [1, max(rows for rows, _ in sizes), longest, tokens if counts else 0, digest]
        except Exception as caught:  # of whatever kind: the other ranks wait for this one's numbers
            error = caught
        gathered = torch.zeros(self._group.size(), len(numbers), dtype=torch.int64)
        work = dist.all_gather_single(gathered, torch.tensor([numbers]), group=self._group, async_op=True)
        return PreparedBatch(batch, cut, error, gathered, work, _contents(batch))

    def _count(self, micro_batch: MicroBatch) -> int:
        tokens = self._loss_tokens(micro_batch)
        if not isinstance(tokens, int):
            raise InputError(f"loss_tokens gave {tokens!r}; needed is an int, how many tokens the loss sums over")
        return tokens

    def _check_added_rows(self, cut: MicroBatches) -> None:
        """No loss may see the copies that fill up micro-batches."""
        left = cut.padded_rows
        for item in reversed(cut.items):
            if not left:
                return
            rows = self._size(item)[0]
            added = min(rows, left)
            part = {
                key: value[rows - added :] if isinstance(value, Tensor) and value.ndim and len(value) == rows else value
                for key, value in item.items()
            }
            if (added < rows and self._count(part)) or (added == rows and self._count(item)):
                raise InputError(
                    f"the batch's {cut.rows} rows do not fill {len(cut.items)} micro-batches, and in the copies that"
                    f" fill them loss_tokens counts tokens: only 'labels' are set to {self._ignore_index} there. Name"
                    " the labels so, or make all batches fill their micro-batches (drop_last=True)"
                )
            left -= added

    def _size(self, micro_batch: MicroBatch) -> tuple[int, int]:
        """Rows and length."""
        sequences = (micro_batch.get(key) for key in self._keys.values())
        shape = next((tuple(value.shape) for value in sequences if isinstance(value, Tensor)), ())
        return (shape[0], shape[1]) if len(shape) > 1 else (0, 0)

    def finish(self, prepared: PreparedBatch) -> StepInputs:
        """Wait for all ranks' numbers, and pad.

        Raises:
            InputError: on every rank: a batch that cannot be cut or is too long, or ranks of one pipeline with
                different batches.
        """
        prepared.work.wait()
        table: list[list[int]] = prepared.gathered.tolist()
        if prepared.error is not None:
            raise prepared.error
        failed = [rank for rank, (is_cut, *_) in enumerate(table) if not is_cut]
        if failed:
            raise InputError(f"rank(s) {', '.join(map(str, failed))} could not use their batch; their errors say why")
        for ranks in self._pipelines:
            found = {rank: table[rank][1:] for rank in ranks}
            if len({(rows, *rest) for rows, _, *rest in found.values()}) > 1:
                raise InputError(
                    "ranks of one pipeline have different batches: (rows, length, loss tokens, digest) are"
                    f" {', '.join(f'{tuple(numbers)} on rank {rank}' for rank, numbers in found.items())}. All stages"
                    " need the same batches in the same order: let Lightning put in its distributed sampler, or shard"
                    " data by the strategy's distributed_sampler_kwargs"
                )
        assert prepared.cut is not None
        longest = [max(table[rank][2] for rank in ranks) for ranks in self._pipelines]
        # Of all pipelines, so that too long a sequence is an error on every rank.
        targets = [self._lengths.of(length) for length in longest]
        length = targets[self._pipelines.index(self._mine)]
        padded = [pad_microbatch(item, length, self._keys) for item in prepared.cut.items]
        inputs = [self._inputs(item) for item in padded]
        lengths = tuple(self._size(item)[1] for item in prepared.cut.items)
        tokens = sum(table[ranks[0]][3] for ranks in self._pipelines)
        return StepInputs(inputs, tokens, prepared.cut, length, lengths)

    def _inputs(self, micro_batch: MicroBatch) -> StageInputs:
        if self._context is None:
            arguments, keywords = self._model_inputs(micro_batch)
            if self._documents is not None:
                keywords = self._documents.keywords(micro_batch, keywords)
            return StageInputs(arguments, keywords, target=micro_batch)
        part, within = self._context.cut(micro_batch, self._keys)
        return StageInputs(*self._context.inputs(part, self._model_inputs), target=part, contexts=(within,))


def _contents(batch: Any) -> list[tuple[Any, int]]:
    """The values of a batch, and how often each tensor has been written to."""
    leaves = tree_leaves(batch)
    return [(one, one._version if isinstance(one, Tensor) and not one.is_inference() else 0) for one in leaves]


def _digest(micro_batches: Sequence[MicroBatch]) -> int:
    """Of all tensors' contents, 63 bits; the same for the same batch."""
    state = hashlib.sha256()
    for item in micro_batches:
        for key in sorted(item):
            value = item[key]
            state.update(repr((key, tuple(value.shape), value.dtype) if isinstance(value, Tensor) else key).encode())
            if isinstance(value, Tensor):
                state.update(value.detach().cpu().contiguous().view(-1).view(torch.uint8).numpy().tobytes())
    return int.from_bytes(state.digest()[:8], "big") >> 1
