"""Options for padding a batch and cutting it into micro-batches."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

from lightning_pipe.engine.common.errors import InputError, SetupError
from lightning_pipe.engine.common.options import check_choice, check_whole_number, is_whole_numbers
from lightning_pipe.llm.batches.padding import PadValues


@dataclass(frozen=True)
class Batching:
    """Padding, cutting and checks of batches.

    Args:
        variable_lengths: pad to the longest sequence of the step (default True). If False, every sequence is padded to
            ``max_length``, which costs compute but gives all steps one shape.
        max_length: maximum sequence length in tokens (default: the module's ``max_sequence_length``).
        pad_to_multiple_of: number of tokens that padded lengths are a multiple of (default 1).
        length_buckets: lengths that sequences are padded to, in tokens (default None: any length). Fewer lengths mean
            fewer shapes to compile and more padding.
        pad_values: pad values of further batch keys, which are padded in dimension 1 (default: none).
        chunk_dims: dimension of the rows of batch keys in which it is not 0, or None for a value that every micro-batch
            gets whole, such as ``{"position_ids": 1, "table": None}`` (default: dimension 0 for all tensors), as
            PyTorch's ``TensorChunkSpec`` and ``_Replicate``. The length of a padded key is the dimension after it.
        strict_batches: refuse a batch whose rows do not fill all micro-batches, instead of adding copies of rows that
            do not train (default False).
        compare_batches: compare the batches of all ranks of a pipeline, tensor by tensor, in every step (default
            False). Their sizes are always compared.
        detect_nan: raise an error on every rank, before the optimizer steps, if the loss of a training batch is NaN or
            infinite (default False).
        schedule_cache_bytes: limit for the cached buffers of schedules for other lengths, in bytes on each rank
            (default 1 GiB).

    Raises:
        SetupError: a value has the wrong type or range, or ``max_length`` is missing or not a valid multiple.
    """

    variable_lengths: bool = True
    max_length: int | None = None
    pad_to_multiple_of: int = 1
    length_buckets: Sequence[int] | None = None
    pad_values: Mapping[str, float] = field(default_factory=dict)
    chunk_dims: Mapping[str, int | None] = field(default_factory=dict)
    strict_batches: bool = False
    compare_batches: bool = False
    detect_nan: bool = False
    schedule_cache_bytes: int = 2**30

    def __post_init__(self) -> None:
        for name in ("variable_lengths", "strict_batches", "compare_batches", "detect_nan"):
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
        dims = self.chunk_dims
        numbers = [dim for dim in dims.values() if dim is not None] if isinstance(dims, Mapping) else None
        if not is_whole_numbers(numbers) or min(numbers, default=0) < 0:
            raise SetupError(
                f"batching.chunk_dims is {dims!r}; expected a mapping from keys of the batch to dimensions, whole"
                " numbers from 0, or None"
            )
        self.length_multiple(1)

    def padding_spec(self, ignore_index: int) -> PadValues:
        """Keys of the values that are padded, for labels that this index excludes."""
        return PadValues(labels=ignore_index, extra_pad_values=self.pad_values, chunk_dims=self.chunk_dims)

    def padded_length(self, longest: int, context: int = 1, maximum: int | None = None) -> int:
        """Length in tokens that the sequences of a step are padded to.

        Args:
            longest: length of the longest sequence of the step.
            context: see :meth:`length_multiple`.
            maximum: maximum length of the model, used without ``max_length`` (default None: no limit).

        Raises:
            InputError: the sequence is longer than the longest bucket, or longer than the maximum after padding.
        """
        fitting = [longest]
        if self.length_buckets is not None:
            fitting = [bucket for bucket in self.length_buckets if bucket >= longest]
            if not fitting:
                raise InputError(
                    f"a sequence has {longest} tokens, and the longest bucket has {max(self.length_buckets)}; expected"
                    f" a bucket of at least {longest}. Add one, or cut the sequences"
                )
        multiple = self.length_multiple(context)
        chosen = -(-min(fitting) // multiple) * multiple
        most = maximum if self.max_length is None else self.max_length
        if most is not None and chosen > most:
            padded = "" if chosen == longest else f", {chosen} once padded to a multiple of {multiple}"
            raise InputError(
                f"a sequence has {longest} tokens{padded}; the model's maximum is {most}. Cut the sequences to fit, pad"
                " less, or raise the maximum in the model's configuration"
            )
        return chosen if self.variable_lengths or most is None else most

    def length_multiple(self, context: int) -> int:
        """Number of tokens that all padded lengths are a multiple of.

        Args:
            context: multiple required by context parallelism (``ParallelDims.length_multiple``).

        Raises:
            SetupError: every sequence is padded to ``max_length``, which is missing or not such a multiple.
        """
        multiple, length = math.lcm(self.pad_to_multiple_of, context), self.max_length
        if not self.variable_lengths and (length is None or length % multiple):
            raise SetupError(
                f"batching.max_length is {length}, and every sequence is padded to it (batching.variable_lengths is"
                f" False); expected a multiple of {multiple} (batching.pad_to_multiple_of={self.pad_to_multiple_of},"
                f" and {context} for context parallelism). Set it to {multiple * ((length or 0) // multiple + 1)}, for"
                " example"
            )
        return multiple
