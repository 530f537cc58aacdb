"""Errors for arguments from earlier versions, fields of option groups, and unknown arguments of strategies."""

from __future__ import annotations

import inspect
from collections.abc import Mapping, Sequence
from difflib import get_close_matches
from typing import Any

import yaml

from lightning_pipe.engine import SetupError

# Former arguments of the strategies for language models, with the option fields that replace them.
_OF_SPLIT = (
    *("layers_per_stage", "layer_ranges", "balance", "input_weight", "output_weight", "split_spec", "split_policy"),
    "tied_embeddings",
)
_OF_BATCHING = (
    *("variable_lengths", "max_length", "pad_to_multiple_of", "length_buckets", "pad_values", "strict_batches"),
    *("compare_batches", "schedule_cache_bytes"),
)
LANGUAGE_MODEL: dict[str, str] = {
    "pipeline_parallel_size": "parallel.pp",
    "data_parallel_replicate_size": "parallel.dp_replicate",
    "data_parallel_shard_size": "parallel.dp_shard",
    "context_parallel_size": "parallel.cp",
    "context_parallel_method": "parallel.cp_method",
    "tensor_parallel_size": "parallel.tp",
    "expert_parallel_size": "parallel.ep",
    "reshard_after_forward": "parallel.reshard_after_forward",
    "activation_checkpointing": "activation_checkpoint.mode",
    "activation_checkpointing_every": "activation_checkpoint.every",
    **{name: f"split.{name}" for name in _OF_SPLIT},
    **{name: f"batching.{name}" for name in _OF_BATCHING},
}
# Former arguments of the strategy for recommenders, with the option fields that replace them.
RECOMMENDER = {
    "sharding_plan": "sharding.plan",
    "constraints": "sharding.constraints",
    "topology": "sharding.topology",
    "replicas": "sharding.replicas",
    "sync_every": "sharding.sync_every",
    "quantized_comms": "wire.quantized_comms",
    "ids_on_wire": "wire.ids",
    "free_features_early": "memory.free_features_early",
    "validate_ids": "checks.validate_ids",
    "detect_nan": "checks.detect_nan",
    "exploration": "auto.exploration",
    "max_in_flight": "auto.max_in_flight",
    "save_plan": "auto.save_plan",
    "pipelined_evaluation": "rewrite.evaluation",
}


_REMOVED = {"copy_in_place": "PyTorch's caching allocator reuses the memory of finished batches"}


def refuse_renamed(
    arguments: Mapping[str, Any], renamed: Mapping[str, str], strategy: object = None, also: Sequence[str] = ()
) -> None:
    """Refuse arguments from earlier versions, and unknown arguments if *strategy* is given.

    Args:
        arguments: keyword arguments of a strategy that its own signature does not name.
        renamed: maps a former argument to the field that replaces it, ``group.field``.
        strategy: the strategy, whose class and bases define the known arguments (default None: no check for unknown
            arguments).
        also: known arguments that no signature names.

    Raises:
        SetupError: an argument is from an earlier version; the message contains YAML with the same values in the
            fields that replace it.
        TypeError: *strategy* has no such argument; the message contains the known arguments.
    """
    for name in arguments:
        if name in _REMOVED:
            raise SetupError(f"{name} is given, but it has been removed: {_REMOVED[name]}. Remove it")
    former = [name for name in arguments if name in renamed]
    if not former:
        if strategy is not None:
            _refuse_unknown(arguments, type(strategy), also)
        return
    groups: dict[str, dict[str, Any]] = {}
    for name in former:
        group, field = renamed[name].split(".")
        # Skip None, the default, and activation_checkpointing_every, which had no effect without checkpointing.
        every_of_none = name == "activation_checkpointing_every" and arguments.get("activation_checkpointing") is None
        if arguments[name] is not None and not every_of_none:
            groups.setdefault(group, {})[field] = _plain(arguments[name])
    if not groups:
        raise SetupError(
            f"{', '.join(former)} {'is' if len(former) == 1 else 'are'} given, but option groups are expected. The"
            " values are the defaults of these groups, so leave them out"
        )
    raise SetupError(
        f"{', '.join(former)} {'is' if len(former) == 1 else 'are'} given, but the option groups"
        f" {', '.join(groups)} are expected. Give the same values as:\n{yaml.safe_dump(groups, sort_keys=False)}"
    )


def _refuse_unknown(arguments: Mapping[str, Any], strategy: type, also: Sequence[str]) -> None:
    """Raise the error of Python for an unknown argument, but name the strategy instead of one of its bases."""
    found = [inspect.signature(vars(base)["__init__"]) for base in strategy.__mro__ if "__init__" in vars(base)]
    # Arguments are passed from base to base until one has no ``**kwargs``.
    end = next((place for place, one in enumerate(found) if not _takes_others(one)), len(found))
    taken = [one for signature in found[: end + 1] for one in signature.parameters.values()]
    known = {*also, *(one.name for one in taken if one.default is not one.empty)}
    for name in arguments.keys() - known:
        near = get_close_matches(name, known, 1)
        meant = f"did you mean {near[0]!r}? " if near else ""
        raise TypeError(
            f"{strategy.__name__}() got an unexpected keyword argument {name!r}; {meant}expected one of"
            f" {', '.join(sorted(known))}"
        )


def _takes_others(signature: inspect.Signature) -> bool:
    return any(parameter.kind is parameter.VAR_KEYWORD for parameter in signature.parameters.values())


def _plain(value: Any) -> Any:
    """Convert a value to types that YAML can write."""
    if isinstance(value, Mapping):
        return {str(key): _plain(one) for key, one in value.items()}
    if isinstance(value, list | tuple):
        return [_plain(one) for one in value]
    return value if value is None or isinstance(value, bool | int | float | str) else str(value)
