"""Fast lookup of slots on a CPU, which calls FBGEMM's operator without the overhead of TorchRec's and FBGEMM's modules.

FBGEMM's module checks types, shapes and bounds of ids and keeps statistics; slots do not need these checks. TorchRec's
module splits features by kernel, of which there is usually only one, and logs. The operator and its arguments are the
same as in those modules, so results and gradients are bitwise identical.
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

from lightning_pipe._compat.torch import get_operator_schema
from lightning_pipe._compat.torchrec import get_single_kernel_of_lookup

_OPERATORS = {
    EmbOptimType.EXACT_SGD: "sgd",
    EmbOptimType.SGD: "sgd",
    EmbOptimType.EXACT_ADAGRAD: "adagrad",
    EmbOptimType.EXACT_ROWWISE_ADAGRAD: "rowwise_adagrad",
}
# Arguments of the operators: attributes of the kernel, options of its optimizer, and what a lookup gives.
_OF_KERNEL = {
    *("weights_placements", "weights_offsets", "D_offsets", "total_D", "max_D", "hash_size_cumsum"),
    *("total_hash_size_bits", "output_dtype", "momentum1_host", "momentum1_placements", "momentum1_offsets"),
}
_OF_OPTIONS = {
    *("gradient_clipping", "max_gradient", "stochastic_rounding", "eps"),
    *("weight_decay", "weight_decay_mode", "max_norm"),
}
_OF_LOOKUP = ("host_weights", "indices", "offsets", "pooling_mode", "indice_weights", "feature_requires_grad")
_KNOWN = {*_OF_KERNEL, *_OF_OPTIONS, *_OF_LOOKUP, "learning_rate"}


def install_fast_cpu_lookup(kernel: Any) -> bool:
    """Replace the ``forward`` of a dynamic table's kernel by the fast lookup, if the kernel is supported.

    Supported are CPU kernels with sum or mean pooling and a known optimizer.
    """
    operator = _find_fbgemm_operator(_OPERATORS.get(kernel.optimizer, ""))
    pools = kernel.pooling_mode in (PoolingMode.SUM, PoolingMode.MEAN)
    if operator is None or not pools or not kernel.use_cpu:
        return False
    kernel.forward = _SlotLookup(kernel, operator, kernel.forward)
    return True


def bypass_grouped_lookup(lookup: Any) -> bool:
    """Make TorchRec's lookup of pooled embeddings call its kernel directly, if one CPU kernel serves all features.

    Features with weights, and features with a batch size per feature, still use TorchRec's implementation.
    """
    kernel = get_single_kernel_of_lookup(lookup) if type(lookup) is GroupedPooledEmbeddingsLookup else None
    if kernel is None or not kernel.use_cpu:
        return False
    original = lookup.forward

    def forward(sparse_features: KeyedJaggedTensor) -> Tensor:
        if (
            sparse_features.weights_or_none() is not None
            or sparse_features.variable_stride_per_key()
            or lookup.optim_state_tracker_fn is not None
        ):
            return original(sparse_features)
        embeddings: Tensor = kernel(indices=sparse_features.values(), offsets=sparse_features.offsets())
        return embeddings

    lookup.forward = forward  # on this instance only
    return True


class _SlotLookup:
    """Replacement of a kernel's ``forward``."""

    def __init__(self, kernel: Any, operator: Callable[..., Tensor], original: Callable[..., Tensor]) -> None:
        self._kernel = kernel
        self._operator = operator
        self._original = original
        takes = {argument.name for argument in get_operator_schema(operator).arguments}
        self._of_kernel, self._of_options = takes & _OF_KERNEL, takes & _OF_OPTIONS

    def __call__(
        self, indices: Tensor, offsets: Tensor, per_sample_weights: Tensor | None = None, **kwargs: Any
    ) -> Tensor:
        if indices.dtype != torch.int64 or any(value is not None for value in kwargs.values()):
            # Inputs that the fast lookup does not support, such as a batch size per feature.
            return self._original(indices, offsets, per_sample_weights, **kwargs)
        kernel = self._kernel
        return self._operator(
            host_weights=kernel.weights_host,
            indices=indices,
            offsets=offsets.to(torch.int64),
            pooling_mode=int(kernel.pooling_mode.value),
            indice_weights=per_sample_weights,
            feature_requires_grad=None,
            learning_rate=kernel.learning_rate_tensor.item(),
            **{name: getattr(kernel, name) for name in self._of_kernel},
            **{name: getattr(kernel.optimizer_args, name) for name in self._of_options},
        )


@cache
def _find_fbgemm_operator(name: str) -> Any:
    """FBGEMM's operator for an optimizer; None if it does not exist or has arguments that are unknown here."""
    packet = getattr(torch.ops.fbgemm, f"split_embedding_codegen_lookup_{name}_function_cpu", None) if name else None
    operator = getattr(packet, "default", None)
    if operator is None or {argument.name for argument in get_operator_schema(operator).arguments} - _KNOWN:
        return None
    return operator
