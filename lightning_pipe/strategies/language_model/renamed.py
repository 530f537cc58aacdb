"""Arguments of former versions that are now fields of option groups."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import yaml

from lightning_pipe.engine import SetupError

__all__ = ["RENAMED", "refuse_renamed"]

_OF_SPLIT = (
    *("layers_per_stage", "layer_ranges", "balance", "input_weight", "output_weight", "split_spec", "split_policy"),
    "tied_embeddings",
)
_OF_BATCHING = (
    *("variable_lengths", "max_length", "pad_to_multiple_of", "length_buckets", "pad_values", "strict_batches"),
    *("compare_batches", "schedule_cache_bytes"),
)
RENAMED: dict[str, str] = {
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
"""Each former argument, and the field of an option group that it has become."""


def refuse_renamed(arguments: Mapping[str, Any]) -> None:
    """Refuse arguments of former versions.

    Raises:
        SetupError: names them, with YAML that gives the same values to the fields they have become.
    """
    former = [name for name in arguments if name in RENAMED]
    if not former:
        return
    groups: dict[str, dict[str, Any]] = {}
    for name in former:
        group, field = RENAMED[name].split(".")
        groups.setdefault(group, {})[field] = _plain(arguments[name])
    raise SetupError(
        f"{', '.join(former)} {'is' if len(former) == 1 else 'are'} given, but expected are the option groups"
        f" {', '.join(groups)}; give the same values as:\n{yaml.safe_dump(groups, sort_keys=False)}"
    )


def _plain(value: Any) -> Any:
    """The value as YAML can write it."""
    if isinstance(value, Mapping):
        return {str(key): _plain(one) for key, one in value.items()}
    if isinstance(value, list | tuple):
        return [_plain(one) for one in value]
    return value if value is None or isinstance(value, bool | int | float | str) else str(value)
