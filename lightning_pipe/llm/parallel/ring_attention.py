"""Ring attention over sequences that are cut over ranks: keys and values move around the ranks, queries stay.

Purely causal attention runs through PyTorch's ring (``torch.distributed.tensor.experimental``; Ring Attention, arXiv
2310.01889), which merges the results for the keys of one rank after another. PyTorch's public ``context_parallel``
cannot use the CPU's kernel; its internal functions accept any kernel that returns the logarithm of its sums.

Padding and packed documents need masks, which the ring does not support. In these cases the keys and values of whole
sequences are gathered, and each rank attends with its own rows of the whole mask (as Llama 3 was trained, arXiv
2407.21783, 3.3.2).
"""

from __future__ import annotations

from typing import Any

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor
from torch.autograd.function import once_differentiable

from lightning_pipe._compat.attention import (
    attend,
    attend_backward,
    function_modes_disabled,
    use_balanced_ring_attention,
)
from lightning_pipe._compat.collectives import all_gather_single_autograd, wait_tensor
from lightning_pipe.llm.parallel.sdpa_intercept import (
    ChunkMaskCheck,
    SDPAInterceptMode,
    check_mask_heads,
    check_sdpa_call_shardable,
)
from lightning_pipe.llm.parallel.sequence_chunks import AttentionPattern, chunk_positions

_LENGTH = 2  # of (rows, heads, length, width)


class RingAttention(SDPAInterceptMode):
    """While entered, computes ``scaled_dot_product_attention`` of balanced chunks over the whole sequences.

    Every rank of the group enters it around the same forward. It has any number of heads, and no attention dropout.
    """

    def __init__(self, group: dist.ProcessGroup, attention: AttentionPattern | None = None) -> None:
        super().__init__()
        self._group = group
        mask = None if attention is None else attention.as_mask()
        self._square = attention is not None and attention.mask is not None
        self._mask = None
        if mask is not None:
            positions = chunk_positions(group.rank(), group.size(), mask.shape[-1], balanced=True)
            self._mask = mask.index_select(-2, positions.to(mask.device))
        self._mask_check = ChunkMaskCheck(mask, group.rank(), group.size(), balanced=True, square=self._square)

    def attend(
        self,
        query: Tensor,
        key: Tensor,
        value: Tensor,
        attn_mask: Tensor | None = None,
        dropout_p: float = 0.0,
        is_causal: bool = False,
        scale: float | None = None,
        enable_gqa: bool = False,
        **options: Any,
    ) -> Tensor:
        check_sdpa_call_shardable(query, key, attn_mask, is_causal, 1, self._square, dropout_p)
        check_mask_heads(self._mask, query)
        self._mask_check.check(attn_mask, query.shape[-2])
        device = query.device.type
        if torch.is_autocast_enabled(device):  # as scaled_dot_product_attention does
            half = torch.get_autocast_dtype(device)
            query, key, value = (tensor.to(half) for tensor in (query, key, value))
        with function_modes_disabled():  # an outer context may be in the same mode
            if self._mask is None:
                return _ring_attention(
                    query, key, value, query.shape[-1] ** -0.5 if scale is None else scale, self._group
                )
            mask = self._mask.to(query.dtype) if self._mask.is_floating_point() else self._mask
            key, value = _gather_keys_and_values(key, value, self._group)
            return F.scaled_dot_product_attention(
                query, key, value, mask, scale=scale, enable_gqa=enable_gqa, **options
            )


@torch.compiler.disable
def _ring_attention(query: Tensor, key: Tensor, value: Tensor, scale: float, group: dist.ProcessGroup) -> Tensor:
    """Ring attention; not compiled: its kernel is compiled already, and Dynamo (2.13) cannot trace the merge."""
    widths = [tensor.shape[-1] for tensor in (query, key, value)]
    # Kernels need one width, CUDA's a multiple of 8; scaled_dot_product_attention pads in the same way.
    padded_width = max(widths) if query.device.type == "cpu" else -(-max(widths) // 8) * 8
    filled = (
        F.pad(tensor, (0, padded_width - width)) for tensor, width in zip((query, key, value), widths, strict=True)
    )
    attended: Tensor = _Ring.apply(*filled, scale, group)
    return attended[..., : widths[-1]]


def _gather_keys_and_values(key: Tensor, value: Tensor, group: dist.ProcessGroup) -> tuple[Tensor, Tensor]:
    """Keys and values of the whole sequences, in order; backward sums the gradients of each rank's chunk."""
    both = torch.cat([key, value], -1).movedim(_LENGTH, 0).contiguous()
    gathered: Tensor = wait_tensor(all_gather_single_autograd(both, 0, group))
    size = group.size()
    positions = torch.cat([chunk_positions(rank, size, len(gathered), balanced=True) for rank in range(size)])
    gathered = gathered.index_select(0, positions.argsort().to(gathered.device)).movedim(0, _LENGTH)
    key, value = gathered.split([key.shape[-1], value.shape[-1]], -1)
    return key, value


class _Ring(torch.autograd.Function):
    """PyTorch's ring with its backward; keys with fewer heads are sent unrepeated and repeated for the kernel."""

    @staticmethod
    def forward(ctx: Any, query: Tensor, key: Tensor, value: Tensor, scale: float, group: dist.ProcessGroup) -> Tensor:
        repeats = query.shape[1] // key.shape[1]

        def attend_with_repeated_heads(query: Tensor, key: Tensor, value: Tensor, is_causal: bool) -> tuple[Any, ...]:
            return attend(query, _repeat_heads(key, repeats), _repeat_heads(value, repeats), is_causal, scale)

        with use_balanced_ring_attention(query.dtype) as (ring, _):
            out, sums, *kernel_outputs = ring(
                group, _LENGTH, attend_with_repeated_heads, query=query, key=key, value=value, is_causal=True
            )
        ctx.save_for_backward(query, key, value, out, sums)
        ctx.kernel_outputs, ctx.scale, ctx.group, ctx.repeats = kernel_outputs, scale, group, repeats
        return out

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor | None, ...]:
        query, key, value, out, sums = ctx.saved_tensors
        repeats = ctx.repeats

        def attend_backward_with_repeated_heads(
            query: Tensor, key: Tensor, value: Tensor, out: Tensor, logsumexp: Tensor, is_causal: bool, grad_out: Tensor
        ) -> tuple[Tensor, ...]:
            saved = query, _repeat_heads(key, repeats), _repeat_heads(value, repeats), out, logsumexp
            grad_query, grad_key, grad_value = attend_backward(
                grad_out, saved, ctx.kernel_outputs, is_causal, ctx.scale
            )
            return grad_query, _sum_repeated_heads(grad_key, repeats), _sum_repeated_heads(grad_value, repeats)

        with use_balanced_ring_attention(query.dtype) as (_, ring_backward):
            gradients = ring_backward(
                ctx.group,
                _LENGTH,
                attend_backward_with_repeated_heads,
                grad_out=gradient.contiguous(),
                grad_out_name="grad_out",
                query=query,
                key=key,
                value=value,
                out=out,
                logsumexp=sums,
                is_causal=True,
            )
        return (*gradients[:3], None, None)


def _repeat_heads(tensor: Tensor, repeats: int) -> Tensor:
    return tensor if repeats == 1 else tensor.repeat_interleave(repeats, 1)


def _sum_repeated_heads(gradient: Tensor, repeats: int) -> Tensor:
    return gradient if repeats == 1 else gradient.unflatten(1, (-1, repeats)).sum(2)
