"""Arguments of a strategy for language models, checked before anything is made of them.

Tested in ``tests/strategies/language_model/test_strategy.py``.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Any

from lightning_pipe.engine import SetupError
from lightning_pipe.llm.parallel.context_ranks import length_multiple

__all__ = ["check_arguments"]

# The least that each may be, and whether it may be None.
_INTEGERS: dict[str, tuple[int, bool]] = {
    "pipeline_parallel_size": (1, True),
    "num_microbatches": (1, True),
    "stages_per_rank": (1, True),
    "input_weight": (0, False),
    "output_weight": (0, False),
    "data_parallel_shard_size": (1, False),
    "data_parallel_replicate_size": (1, False),
    "context_parallel_size": (1, False),
    "tensor_parallel_size": (1, False),
    "expert_parallel_size": (1, False),
    "max_length": (1, True),
    "pad_to_multiple_of": (1, False),
    "schedule_cache_bytes": (0, False),
    "activation_checkpointing_every": (1, False),
}
_CHOICES: dict[str, tuple[Any, ...]] = {
    "balance": ("layers", "time", "memory"),
    "context_parallel_method": ("ulysses", "ring"),
    "tied_embeddings": ("sum", "refuse"),
    "activation_checkpointing": (None, "full", "selective"),
    "reshard_after_forward": (None, True, False),
    **dict.fromkeys(("variable_lengths", "strict_batches", "compare_batches", "offload_optimizer"), (True, False)),
}
_WAYS_TO_CUT = ("layers_per_stage", "layer_ranges", "split_spec", "split_policy")


def check_arguments(given: Mapping[str, Any]) -> None:
    """Refuse values of the wrong kind, and arguments that exclude each other.

    Raises:
        SetupError: names the argument, what was given and what is needed.
    """
    for name, (least, optional) in _INTEGERS.items():
        value = given[name]
        if not (optional and value is None) and not (_is_integer(value) and value >= least):
            raise SetupError(f"{name} is {value!r}; needed is a whole number, {least} or more")
    for name, choices in _CHOICES.items():
        value = given[name]
        if not any(value is choice or (isinstance(choice, str) and value == choice) for choice in choices):
            raise SetupError(f"{name} is {value!r}; needed is one of {', '.join(map(repr, choices))}")
    layers, ranges, buckets = given["layers_per_stage"], given["layer_ranges"], given["length_buckets"]
    if layers is not None and not _is_integers(layers):
        raise SetupError(f"layers_per_stage is {layers!r}; needed is a list of whole numbers, one a stage")
    if ranges is not None and not (
        isinstance(ranges, (list, tuple)) and all(_is_integers(pair) and len(pair) == 2 for pair in ranges)
    ):
        raise SetupError(
            f"layer_ranges is {ranges!r}; needed is a list of pairs, of each stage's first layer and the one after its"
            " last"
        )
    if buckets is not None and not (_is_integers(buckets) and buckets and min(buckets) > 0):
        raise SetupError(f"length_buckets is {buckets!r}; needed is a list of whole numbers above 0")
    if not isinstance(given["pad_values"] or {}, Mapping):
        raise SetupError(f"pad_values is {given['pad_values']!r}; needed is a mapping from keys of the batch to values")
    if not isinstance(given["compile_layers"], (bool, Mapping)):
        raise SetupError(
            f"compile_layers is {given['compile_layers']!r}; needed is true, false, or options of torch.compile"
        )
    ways = [name for name in _WAYS_TO_CUT if given[name] is not None]
    ways = ["a trace" if name.startswith("split_") else name for name in ways]
    ways += ["balance"] if given["balance"] != "layers" else []
    if len(set(ways)) > 1:
        raise SetupError(f"{' and '.join(dict.fromkeys(ways))} each say where the model is cut; needed is one of them")
    context = length_multiple(given["context_parallel_size"], given["context_parallel_method"])
    if not given["variable_lengths"]:
        if given["max_length"] is None:
            raise SetupError("variable_lengths is False, and every sequence is padded to max_length: give max_length")
        multiple = math.lcm(given["pad_to_multiple_of"], context)
        for name, divisor in (("pad_to_multiple_of", given["pad_to_multiple_of"]), ("context_parallel_size", context)):
            if given["max_length"] % divisor:
                more = multiple * (given["max_length"] // multiple + 1)
                twice = ", twice, for the ring" if divisor == 2 * given[name] else ""
                raise SetupError(
                    f"max_length is {given['max_length']}, to which every sequence is padded (variable_lengths is"
                    f" False); needed is a multiple of {name}={given[name]}{twice}, such as {more}"
                )


def _is_integer(value: Any) -> bool:
    return isinstance(value, int) and not isinstance(value, bool)


def _is_integers(values: Any) -> bool:
    return isinstance(values, (list, tuple)) and all(map(_is_integer, values))
