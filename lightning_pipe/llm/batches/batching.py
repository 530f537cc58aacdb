"""Options that say how a batch becomes micro-batches of one length."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

from lightning_pipe.engine.common.errors import SetupError
from lightning_pipe.engine.common.options import check_choice, check_whole_number, is_whole_numbers

__all__ = ["Batching"]


@dataclass(frozen=True)
class Batching:
    """How a batch is padded, cut and compared.

    Args:
        variable_lengths: pad to the longest sequence of the step (default), instead of to ``max_length``.
        max_length: largest number of tokens of a sequence; by default the module's ``max_sequence_length``.
        pad_to_multiple_of: lengths are rounded up to a multiple of this number of tokens (default 1).
        length_buckets: lengths are rounded up to the next of these, in tokens.
        pad_values: further keys of the batch to pad in dimension 1, with their pad values.
        strict_batches: refuse a batch whose rows do not fill the micro-batches, instead of filling it with copies.
        compare_batches: compare the batches of the ranks of a pipeline, tensor by tensor, in every step. Their sizes
            are always compared.
        schedule_cache_bytes: limit for the buffers of schedules for other lengths, in bytes on each rank (default
            1 GiB).

    Raises:
        SetupError: a value of the wrong kind, or a ``max_length`` that is missing or does not fit.
    """

    variable_lengths: bool = True
    max_length: int | None = None
    pad_to_multiple_of: int = 1
    length_buckets: Sequence[int] | None = None
    pad_values: Mapping[str, float] = field(default_factory=dict)
    strict_batches: bool = False
    compare_batches: bool = False
    schedule_cache_bytes: int = 2**30

    def __post_init__(self) -> None:
        for name in ("variable_lengths", "strict_batches", "compare_batches"):
            check_choice(f"batching.{name}", getattr(self, name), (True, False))
        check_whole_number("batching.max_length", self.max_length, 1, optional=True)
        check_whole_number("batching.pad_to_multiple_of", self.pad_to_multiple_of, 1)
        check_whole_number("batching.schedule_cache_bytes", self.schedule_cache_bytes, 0)
        buckets = self.length_buckets
        if buckets is not None and not (is_whole_numbers(buckets) and buckets and min(buckets) > 0):
            raise SetupError(f"batching.length_buckets is {buckets!r}; expected a list of whole numbers above 0")
        if not isinstance(self.pad_values, Mapping):
            raise SetupError(
                f"batching.pad_values is {self.pad_values!r}; expected a mapping from keys of the batch to values"
            )
        self.length_multiple(1)

    def length_multiple(self, context: int) -> int:
        """Number that all padded lengths are a multiple of, in tokens.

        Args:
            context: multiple that context parallelism needs (``ParallelDims.length_multiple``).

        Raises:
            SetupError: every sequence is padded to ``max_length``, which is missing or no such multiple.
        """
        multiple, length = math.lcm(self.pad_to_multiple_of, context), self.max_length
        if not self.variable_lengths and (length is None or length % multiple):
            raise SetupError(
                f"batching.max_length is {length}, and every sequence is padded to it (batching.variable_lengths is"
                f" False); expected a multiple of {multiple} (batching.pad_to_multiple_of={self.pad_to_multiple_of},"
                f" and {context} for context parallelism), such as {multiple * ((length or 0) // multiple + 1)}"
            )
        return multiple
