"""Private names of PyTorch's attention: its kernels, and the ring of its context parallelism."""

from __future__ import annotations

from collections.abc import Generator, Sequence
from contextlib import contextmanager
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor
from torch._C import DisableTorchFunction as function_modes_disabled

__all__ = [
    "SAME_FLOPS_OPERATORS",
    "attend",
    "attend_backward",
    "function_modes_disabled",
    "use_balanced_ring_attention",
]

aten = torch.ops.aten
_LENGTH = 2  # of (rows, heads, length, width)
_HALF = (torch.float16, torch.bfloat16)
# CUDA's kernel for other types pads the sums to a multiple of this number of queries, and expects them back padded.
_SUMS = 32

# Operators that PyTorch's counts of operations lack, mapped to operators with the same number of operations.
SAME_FLOPS_OPERATORS = {
    aten._scaled_dot_product_flash_attention_for_cpu: aten._scaled_dot_product_flash_attention,
    aten._scaled_dot_product_flash_attention_for_cpu_backward: aten._scaled_dot_product_flash_attention_backward,
}


@contextmanager
def use_balanced_ring_attention(dtype: torch.dtype) -> Generator[tuple[Any, Any]]:
    """PyTorch's ring and its backward, with the process-wide options that balanced chunks need, restored afterwards."""
    from torch.distributed.tensor.experimental._context_parallel import _attention as ring

    options: Any = ring._cp_options
    before = vars(options).copy()
    options.enable_load_balance, options.rotate_method = True, ring._RotateMethod.ALL_TO_ALL
    options.convert_to_f32 = dtype in _HALF
    try:
        yield ring._templated_ring_attention, ring._templated_ring_attention_backward
    finally:
        vars(options).update(before)


def attend(query: Tensor, key: Tensor, value: Tensor, is_causal: bool, scale: float) -> tuple[Any, ...]:
    """Output, logarithms of the sums, and the other values that backward needs; without dropout."""
    if query.device.type == "cpu":
        return tuple(aten._scaled_dot_product_flash_attention_for_cpu(query, key, value, 0.0, is_causal, scale=scale))
    if query.dtype in _HALF:
        return tuple(aten._scaled_dot_product_flash_attention(query, key, value, 0.0, is_causal, scale=scale))
    attend = aten._scaled_dot_product_efficient_attention
    out, sums, *state = attend(query, key, value, None, True, 0.0, is_causal, scale=scale)
    return out, sums[..., : query.shape[_LENGTH]], *state


def attend_backward(
    gradient: Tensor, saved: Sequence[Tensor], state: Sequence[Any], is_causal: bool, scale: float
) -> tuple[Tensor, ...]:
    """Gradients of query, key and value."""
    query = saved[0]
    if query.device.type == "cpu":
        backward = aten._scaled_dot_product_flash_attention_for_cpu_backward
        return tuple(backward(gradient, *saved, 0.0, is_causal, scale=scale))
    if query.dtype in _HALF:
        backward = aten._scaled_dot_product_flash_attention_backward
        *ends_and_lengths, seed, offset, _ = state
        return tuple(backward(gradient, *saved, *ends_and_lengths, 0.0, is_causal, seed, offset, scale=scale))
    backward = aten._scaled_dot_product_efficient_attention_backward
    *tensors, sums = saved
    sums = F.pad(sums, (0, -sums.shape[-1] % _SUMS), value=float("inf"))  # padding queries
    inputs, needs_gradient = (*tensors[:3], None, tensors[3], sums), (True, True, True, False)
    return tuple(backward(gradient, *inputs, *state, 0.0, needs_gradient, is_causal, scale=scale)[:3])
