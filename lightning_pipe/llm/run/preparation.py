"""Prepares the micro-batches of a step from a loader's batch, ahead of the step.

Ranks exchange a few numbers of each batch while an earlier batch trains::

    begin    cut into micro-batches, count tokens, measure lengths ──► gather (rows, length, tokens) of all ranks
             (counts, checks and document boundaries read the values on the host)
    finish   wait; compare; pad to the longest length of the pipeline's ranks; sum the tokens of all ranks
"""

from __future__ import annotations

import hashlib
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from lightning_pipe._compat.torch import tree_leaves
from lightning_pipe.engine.common.errors import InputError
from lightning_pipe.llm.batches.host_values import HostSourceTracker, values_on_host
from lightning_pipe.llm.batches.microbatches import MicroBatches, slice_batch_rows, split_batch
from lightning_pipe.llm.batches.options import Batching
from lightning_pipe.llm.batches.padding import PadValues, pad_microbatch
from lightning_pipe.llm.model.routing_replay import (
    MoEBlockInfo,
    check_replays_not_shared,
    check_routed_experts,
    pop_routed_experts_from_batch,
)
from lightning_pipe.llm.parallel.context_parallel_group import ContextParallelGroup
from lightning_pipe.llm.parallel.hf_document_masking import HFDocumentMasking
from lightning_pipe.llm.parallel.sequence_chunks import check_micro_batch_shardable
from lightning_pipe.llm.run.schedule_runner import StageInputs
from lightning_pipe.llm.run.stage_hooks import StageHooks, warn_about_unshifted_labels

MicroBatch = Mapping[str, Any]


@dataclass
class BatchInPreparation:
    """A batch whose numbers are being gathered."""

    batch: Any
    cut: MicroBatches | None
    on_host: MicroBatches | None
    error: Exception | None
    gathered: Tensor
    work: dist.Work
    seen: Sequence[tuple[Any, int]] = ()

    def matches(self, batch: Any) -> bool:
        """Return True if it was prepared from this batch, and the batch has not changed since."""
        if self.batch is not batch:
            return False
        contents = _list_values_with_versions(batch)
        return len(contents) == len(self.seen) and all(
            value is seen_value and version == seen_version
            for (value, version), (seen_value, seen_version) in zip(contents, self.seen, strict=True)
        )


@dataclass(frozen=True)
class StepInputs:
    """Inputs of a step: ``on_host`` padded, ``lengths`` before padding, ``tokens`` of all data-parallel ranks."""

    micro_batches: list[StageInputs]
    tokens: int
    cut: MicroBatches
    on_host: list[dict[str, Any]]
    length: int
    lengths: tuple[int, ...]


@dataclass(frozen=True, eq=False)
class BatchPreparation:
    """Cuts batches and agrees on their lengths; every rank calls the same methods for its batches in the same order."""

    hooks: StageHooks
    batching: Batching
    group: dist.ProcessGroup
    pipelines: Sequence[Sequence[int]]
    num_microbatches: int | None
    length_multiple: int = 1
    vocabulary: int | None = None
    mixtures: Sequence[MoEBlockInfo] = ()
    context: ContextParallelGroup | None = None
    documents: HFDocumentMasking | None = None

    @cached_property
    def padding_spec(self) -> PadValues:
        """Keys of the values that are padded."""
        return self.batching.padding_spec(self.hooks.ignore_index)

    def begin(self, batch: Any, copies: HostSourceTracker | None = None, *, counts: bool = True) -> BatchInPreparation:
        """Cut a batch and start gathering its numbers."""
        cut, on_host, error = None, None, None
        numbers = [0, 0, 0, 0, 0, 0]
        try:
            count = _count_micro_batches(batch) if self.num_microbatches is None else self.num_microbatches
            values, strict = values_on_host(batch, copies or HostSourceTracker()), self.batching.strict_batches
            cut = on_host = split_batch(values, count, self.padding_spec, strict=strict)
            if values is not batch:
                cut = split_batch(batch, count, self.padding_spec, on_host=values)
            tokens = sum(map(self._count_loss_tokens, on_host.items))
            self._check_ids(on_host)
            if not self.group.rank():
                warn_about_unshifted_labels(self.hooks, on_host.items, tokens)
            self._check_loss_ignores_padded_rows(on_host)
            check_replays_not_shared(cut.items if isinstance(batch, Mapping) else batch)
            sizes = [self.padding_spec.get_microbatch_rows_and_length(item) for item in on_host.items]
            for item, (_, length) in zip(on_host.items, sizes, strict=True):
                check_routed_experts(item, self.mixtures, self.padding_spec.get_microbatch_rows_and_length(item))
                # The result is discarded: this only refuses values that cannot be padded or cut.
                padded = pad_microbatch(item, length, self.padding_spec)
                if self.context is not None:
                    check_micro_batch_shardable(padded, self.padding_spec)
                elif self.documents is not None:
                    self.documents.check(padded)
            digest = _hash_micro_batches(on_host.items) if self.batching.compare_batches else 0
            longest = max(length for _, length in sizes)
            numbers = [1, max(rows for rows, _ in sizes), longest, tokens if counts else 0, digest, len(cut.items)]
        except Exception as caught:  # any exception: the other ranks wait for this rank's numbers
            error = caught
        gathered = torch.zeros(self.group.size(), len(numbers), dtype=torch.int64)
        work: Any = dist.all_gather_single(gathered, torch.tensor([numbers]), group=self.group, async_op=True)
        return BatchInPreparation(batch, cut, on_host, error, gathered, work, _list_values_with_versions(batch))

    def _count_loss_tokens(self, micro_batch: MicroBatch) -> int:
        tokens = self.hooks.loss_tokens(micro_batch)
        if not isinstance(tokens, int):
            raise InputError(
                f"loss_tokens gave {tokens!r}; expected an int. Return the number of tokens that the loss sums over"
            )
        return tokens

    def _check_ids(self, cut: MicroBatches) -> None:
        """Check that all ids are in the vocabulary: on an accelerator, the embedding would end the process."""
        for number, item in enumerate(cut.items):
            ids = item.get("input_ids")
            if self.vocabulary is None or not isinstance(ids, Tensor) or ids.is_floating_point():
                continue
            for place in ((ids < 0) | (ids >= self.vocabulary)).nonzero().tolist():
                row, *position = place[self.padding_spec.get_row_dim("input_ids") :]
                raise InputError(
                    f"input_ids of micro-batch {number} has the id {int(ids[tuple(place)])} in row {row}, position"
                    f" {(position or [0])[0]}; expected ids from 0 to {self.vocabulary - 1}, the model's vocabulary."
                    " Use the tokenizer of the model, or resize its embedding"
                )

    def _check_loss_ignores_padded_rows(self, cut: MicroBatches) -> None:
        """Check that the loss ignores the copied rows that fill up micro-batches."""
        remaining = cut.padded_rows
        for item in reversed(cut.items):
            if not remaining:
                return
            rows = self.padding_spec.get_microbatch_rows_and_length(item)[0]
            added = min(rows, remaining)
            part = slice_batch_rows(item, rows - added, added, rows, self.padding_spec)
            if (added < rows and self._count_loss_tokens(part)) or (added == rows and self._count_loss_tokens(item)):
                raise InputError(
                    f"the batch's {cut.rows} rows do not fill {len(cut.items)} micro-batches, and loss_tokens counts"
                    " tokens in the copied rows that fill them: only 'labels' are set to"
                    f" {self.padding_spec.labels} there."
                    " Rename the labels to 'labels', or make all batches fill their micro-batches (drop_last=True)"
                )
            remaining -= added

    def finish(self, prepared: BatchInPreparation) -> StepInputs:
        """Wait for the numbers of all ranks, and pad."""
        prepared.work.wait()
        table: list[list[int]] = prepared.gathered.tolist()
        if prepared.error is not None:
            raise prepared.error
        failed = [rank for rank, (is_cut, *_) in enumerate(table) if not is_cut]
        if failed:
            raise InputError(
                f"rank(s) {', '.join(map(str, failed))} could not use their batch. See the errors of these ranks"
            )
        counts = [row[-1] for row in table]
        if len(set(counts)) > 1:
            raise InputError(
                f"the ranks have {counts} micro-batches, in their order; expected the same number on every rank, since"
                " ranks run one schedule together. Give each call as many micro-batches on all ranks"
            )
        for ranks in self.pipelines:
            numbers_by_rank = {rank: table[rank][1:-1] for rank in ranks}
            if len({(rows, *numbers) for rows, _, *numbers in numbers_by_rank.values()}) > 1:
                raise InputError(
                    "ranks of one pipeline have different batches: (rows, length, loss tokens, digest) are"
                    f" {', '.join(f'{tuple(numbers)} on rank {rank}' for rank, numbers in numbers_by_rank.items())}."
                    " All stages need the same batches in the same order. Let Lightning insert its distributed sampler,"
                    " or shard data with the strategy's distributed_sampler_kwargs"
                )
        assert prepared.cut is not None and prepared.on_host is not None
        longest = [max(table[rank][2] for rank in ranks) for ranks in self.pipelines]
        # For all pipelines, so that a sequence that is too long raises on every rank.
        limits = self.length_multiple, self.hooks.max_sequence_length
        targets = [self.batching.padded_length(length, *limits) for length in longest]
        length = next(
            target for target, ranks in zip(targets, self.pipelines, strict=True) if self.group.rank() in ranks
        )
        on_host = [pad_microbatch(item, length, self.padding_spec) for item in prepared.on_host.items]
        padded = on_host
        if prepared.cut is not prepared.on_host:
            pairs = zip(prepared.cut.items, on_host, strict=True)
            padded = [pad_microbatch(item, length, self.padding_spec, host_item) for item, host_item in pairs]
        inputs = [self._build_stage_inputs(*pair) for pair in zip(padded, on_host, strict=True)]
        lengths = tuple(self.padding_spec.get_microbatch_rows_and_length(item)[1] for item in prepared.cut.items)
        tokens = sum(table[ranks[0]][3] for ranks in self.pipelines)
        return StepInputs(inputs, tokens, prepared.cut, on_host, length, lengths)

    def count_local_loss_tokens(self, step: StepInputs) -> list[int]:
        """Number of loss tokens in this rank's part of each padded micro-batch."""
        padded: list[Any] = step.on_host
        if self.context is not None:
            padded = [self.context.shard(item, self.padding_spec)[0] for item in padded]
        return [self.hooks.loss_tokens(pop_routed_experts_from_batch(item)[0]) for item in padded]

    def _build_stage_inputs(self, micro_batch: MicroBatch, on_host: MicroBatch) -> StageInputs:
        if self.context is None:
            micro_batch, replay = pop_routed_experts_from_batch(micro_batch)
            arguments, keywords = self.hooks.model_inputs(micro_batch)
            if self.documents is None:
                return StageInputs(arguments, keywords, micro_batch, replay)
            keywords = self.documents.add_document_inputs(micro_batch, keywords, on_host)
            contexts = self.documents.make_forward_contexts(micro_batch, keywords, on_host)
            return StageInputs(arguments, keywords, micro_batch, (*replay, *contexts))
        chunk, attention_context = self.context.shard(micro_batch, self.padding_spec, on_host)
        part, replay = pop_routed_experts_from_batch(chunk)
        return StageInputs(
            *self.context.build_model_inputs(part, self.hooks.model_inputs),
            target=part,
            contexts=(attention_context, *replay),
        )


def _list_values_with_versions(batch: Any) -> list[tuple[Any, int]]:
    """Values of a batch, each with its tensor's version counter, which counts in-place writes."""
    leaves = tree_leaves(batch)
    return [(leaf, leaf._version if isinstance(leaf, Tensor) and not leaf.is_inference() else 0) for leaf in leaves]


def _hash_micro_batches(micro_batches: Sequence[MicroBatch]) -> int:
    """Hash of all tensors' contents, 63 bits."""
    state = hashlib.sha256()
    for item in micro_batches:
        for key in sorted(item):
            value = item[key]
            state.update(repr((key, tuple(value.shape), value.dtype) if isinstance(value, Tensor) else key).encode())
            if isinstance(value, Tensor):
                state.update(value.detach().cpu().contiguous().view(-1).view(torch.uint8).numpy().tobytes())
    return int.from_bytes(state.digest()[:8], "big") >> 1


def _count_micro_batches(micro_batches: Any) -> int:
    if isinstance(micro_batches, Mapping) or not micro_batches:
        description = "a mapping" if isinstance(micro_batches, Mapping) else "no micro-batch"
        raise InputError(
            f"the call has {description}; expected a list of micro-batches, each a mapping of tensors. Pass"
            " [{'input_ids': ..., 'labels': ...}, ...], with the same number on every rank"
        )
    return len(micro_batches)
