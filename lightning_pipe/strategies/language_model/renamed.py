"""Arguments of former versions that are now fields of option groups."""

from __future__ import annotations

__all__ = ["RENAMED"]

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
