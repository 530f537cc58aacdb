"""The lookup of slots on a CPU without what TorchRec's and FBGEMM's modules do around FBGEMM's operator.

For ids of users FBGEMM's module looks at types, shapes and bounds, and counts; of slots all that is known. TorchRec's
splits features by kernel, where there is mostly one, and logs. The operator, and so every bit of its result and of its
backward, is the same; it is called with what the modules would call it with.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import cache
from typing import Any

import torch
from fbgemm_gpu.split_embedding_configs import EmbOptimType
from fbgemm_gpu.split_table_batched_embeddings_ops_training import PoolingMode
from torch import Tensor
from torchrec.distributed.embedding_lookup import GroupedPooledEmbeddingsLookup
from torchrec.sparse.jagged_tensor import KeyedJaggedTensor

from lightning_pipe._compat.torch import schema_of
from lightning_pipe._compat.torchrec import fast_kernel_of

__all__ = ["look_slots_up", "skip_to_kernel"]

_OPERATORS = {
    EmbOptimType.EXACT_SGD: "sgd",
    EmbOptimType.SGD: "sgd",
    EmbOptimType.EXACT_ADAGRAD: "adagrad",
    EmbOptimType.EXACT_ROWWISE_ADAGRAD: "rowwise_adagrad",
}


def look_slots_up(kernel: Any) -> bool:
    """Has a kernel of a dynamic table's slots look up faster, where it is one that this is known of: one that pools.

    Args:
        kernel: FBGEMM's, on a CPU, whose bounds check is off.

    Returns:
        Whether it does.
    """
    operator = _operator(_OPERATORS.get(kernel.optimizer, ""))
    pools = kernel.pooling_mode in (PoolingMode.SUM, PoolingMode.MEAN)
    if operator is None or not pools or not kernel.use_cpu:
        return False
    kernel.forward = _SlotLookup(kernel, operator, kernel.forward)
    return True


def skip_to_kernel(lookup: Any) -> bool:
    """Has TorchRec's lookup of pooled embeddings go to its kernel at once, where it has one for all features.

    Features with weights, and those with a batch size each, go the whole way.

    Args:
        lookup: TorchRec's, on a CPU.

    Returns:
        Whether it does.
    """
    kernel = fast_kernel_of(lookup) if type(lookup) is GroupedPooledEmbeddingsLookup else None
    if kernel is None or not kernel.use_cpu:
        return False
    whole = lookup.forward

    def forward(sparse_features: KeyedJaggedTensor) -> Tensor:
        if (
            sparse_features.weights_or_none() is not None
            or sparse_features.variable_stride_per_key()
            or lookup.optim_state_tracker_fn is not None
        ):
            return whole(sparse_features)
        found: Tensor = kernel(indices=sparse_features.values(), offsets=sparse_features.offsets())
        return found

    lookup.forward = forward  # of this one only
    return True


class _SlotLookup:
    """In place of a kernel's ``forward``."""

    def __init__(self, kernel: Any, operator: Callable[..., Tensor], whole: Callable[..., Tensor]) -> None:
        self._kernel = kernel
        self._operator = operator
        self._whole = whole
        self._takes = {argument.name for argument in schema_of(operator).arguments}

    def __call__(
        self, indices: Tensor, offsets: Tensor, per_sample_weights: Tensor | None = None, **others: Any
    ) -> Tensor:
        if indices.dtype != torch.int64 or any(value is not None for value in others.values()):
            # A batch size per feature, and the like.
            return self._whole(indices, offsets, per_sample_weights, **others)
        kernel = self._kernel
        options = kernel.optimizer_args
        given = {
            "host_weights": kernel.weights_host,
            "weights_placements": kernel.weights_placements,
            "weights_offsets": kernel.weights_offsets,
            "D_offsets": kernel.D_offsets,
            "total_D": kernel.total_D,
            "max_D": kernel.max_D,
            "hash_size_cumsum": kernel.hash_size_cumsum,
            "total_hash_size_bits": kernel.total_hash_size_bits,
            "indices": indices,
            "offsets": offsets.to(torch.int64),
            "pooling_mode": int(kernel.pooling_mode.value),
            "indice_weights": per_sample_weights,
            "feature_requires_grad": None,
            "gradient_clipping": options.gradient_clipping,
            "max_gradient": options.max_gradient,
            "stochastic_rounding": options.stochastic_rounding,
            "learning_rate": kernel.learning_rate_tensor.item(),
            "output_dtype": kernel.output_dtype,
        }
        if "momentum1_host" in self._takes:
            for name in ("momentum1_host", "momentum1_placements", "momentum1_offsets"):
                given[name] = getattr(kernel, name)
            given["eps"] = options.eps
        if "weight_decay" in self._takes:
            given["weight_decay"] = options.weight_decay
            given["weight_decay_mode"] = options.weight_decay_mode
            given["max_norm"] = options.max_norm
        return self._operator(**given)


_KNOWN = {
    *("host_weights", "weights_placements", "weights_offsets", "D_offsets", "total_D", "max_D", "hash_size_cumsum"),
    *("total_hash_size_bits", "indices", "offsets", "pooling_mode", "indice_weights", "feature_requires_grad"),
    *("gradient_clipping", "max_gradient", "stochastic_rounding", "learning_rate", "output_dtype"),
    *("momentum1_host", "momentum1_placements", "momentum1_offsets", "eps"),
    *("weight_decay", "weight_decay_mode", "max_norm"),
}


@cache
def _operator(name: str) -> Any:
    """FBGEMM's operator for an optimiser, if it takes what is known here and no more."""
    found = getattr(torch.ops.fbgemm, f"split_embedding_codegen_lookup_{name}_function_cpu", None) if name else None
    operator = getattr(found, "default", None)
    if operator is None or {argument.name for argument in schema_of(operator).arguments} - _KNOWN:
        return None
    return operator
