"""Cross-entropy summed over a micro-batch's tokens, from whole logits or, fused with the head, in chunks of tokens.

The losses are sums, not means: the number of tokens that count differs between micro-batches, ranks and accumulation
steps, so the gradient is divided once, at the end, by the total number of tokens.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.distributed.tensor import DTensor

from lightning_pipe._compat.torch import will_execute_node
from lightning_pipe.engine.common.errors import InputError, SetupError


def summed_cross_entropy(logits: Tensor, labels: Tensor, ignore_index: int = -100) -> Tensor:
    """Cross-entropy summed over the tokens that count, computed in float32 (float64 for such logits).

    Args:
        logits: (rows, length, vocabulary), of any floating type.
        labels: target of each position, (rows, length). They are not shifted here, see :func:`shift_labels`.
        ignore_index: label of tokens that do not count (default -100).

    Returns:
        A scalar; 0, with gradients of 0, if no token counts.

    Raises:
        InputError: the shape of the labels is not that of the logits without the last dimension.
    """
    _check_labels_shape("logits", logits, labels)
    flat = _at_least_float32(logits.flatten(0, -2))
    return F.cross_entropy(flat, labels.flatten(), ignore_index=ignore_index, reduction="sum")


def shift_labels(labels: Tensor, ignore_index: int = -100, cu_seq_lens: Tensor | None = None) -> Tensor:
    """Labels for next-token prediction: the label of each position is the next token.

    Args:
        labels: the tokens, or labels aligned with them, (rows, length).
        ignore_index: label that does not count, used for the last position (default -100).
        cu_seq_lens: document boundaries of one packed row, (documents + 1) (default None). The last position of each
            document then gets ``ignore_index``, so that no document predicts the start of the next.

    Raises:
        InputError: ``cu_seq_lens`` is given for several rows, or ends beyond the row.
    """
    shifted = torch.full_like(labels, ignore_index)
    shifted[..., :-1] = labels[..., 1:]
    if cu_seq_lens is not None:
        if labels[..., 0].numel() != 1 or cu_seq_lens[-1] > labels.shape[-1]:
            raise InputError(
                f"labels of the shape {tuple(labels.shape)} come with cu_seq_lens that end at {int(cu_seq_lens[-1])};"
                " expected one packed row that holds all of its documents. Shift each row separately"
            )
        # The "last position" of an empty document is that of the previous document or of the row: already ignored.
        shifted[..., cu_seq_lens[1:] - 1] = ignore_index
    return shifted


def chunked_cross_entropy(
    hidden: Tensor,
    weight: Tensor,
    labels: Tensor,
    *,
    bias: Tensor | None = None,
    chunk_tokens: int = 1024,
    ignore_index: int = -100,
) -> Tensor:
    """``summed_cross_entropy(linear(hidden, weight, bias), labels)`` without the whole logits.

    Head and loss are computed for ``chunk_tokens`` tokens at a time, and again in the backward. This costs one more
    product with the weight than keeping the logits. Other implementations compute the gradients in the forward. Here
    that would cost memory, since a schedule runs the forwards of several micro-batches before the first backward, and
    each would hold a gradient as large as the weight. It would also apply a loss scale, known only in the backward, too
    late to keep half-precision gradients from underflowing.

    Under autocast, products use its dtype, as in a linear layer. Sums over chunks are in float32, even if the weight
    has a lower precision.

    Args:
        hidden: hidden states, (rows, length, width).
        weight: weight of the head, (vocabulary, width). It must be a plain tensor: under FSDP2, call this function
            inside the forward of the module that holds it.
        labels: target of each position, (rows, length).
        bias: bias of the head, (vocabulary) (default None).
        chunk_tokens: number of tokens whose logits exist at a time, at least 1 (default 1024). Lower it to save memory.
        ignore_index: label of tokens that do not count (default -100).

    Returns:
        A scalar in float32 (float64 for such inputs). It can be differentiated once.

    Raises:
        InputError: the shapes do not match, or the weight is sharded.
        SetupError: in the backward, if it is differentiated again.
    """
    _check_labels_shape("hidden states", hidden, labels)
    tensors = {"hidden": hidden, "weight": weight} | ({} if bias is None else {"bias": bias})
    sharded = [name for name, tensor in tensors.items() if isinstance(tensor, DTensor)]
    if sharded:
        raise InputError(
            f"chunked cross-entropy is given a DTensor as {', '.join(sharded)}; expected plain tensors. Call it"
            " inside the forward of the module that FSDP2 shards, where its parameters are whole"
        )
    if chunk_tokens < 1:
        raise InputError(f"chunk_tokens is {chunk_tokens}; expected a whole number of at least 1, such as 1024")
    device = hidden.device.type
    autocast = torch.amp.is_autocast_available(device) and torch.is_autocast_enabled(device)
    compute = torch.get_autocast_dtype(device) if autocast else hidden.dtype
    # Views, since autograd says of what was computed, not of leaves, whether a backward needs its gradient.
    states, head = hidden.reshape(-1, hidden.shape[-1]), weight.view_as(weight)
    offset = None if bias is None else bias.view_as(bias)
    loss: Tensor = _ChunkedCrossEntropy.apply(
        states, head, offset, labels.flatten(), compute, chunk_tokens, ignore_index
    )
    return loss


class _ChunkedCrossEntropy(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any,
        hidden: Tensor,
        weight: Tensor,
        bias: Tensor | None,
        labels: Tensor,
        compute: torch.dtype,
        chunk_tokens: int,
        ignore_index: int,
    ) -> Tensor:
        ctx.save_for_backward(hidden, weight, bias, labels)
        ctx.compute, ctx.chunk_tokens, ctx.ignore_index = compute, chunk_tokens, ignore_index
        head, offset = _cast(weight, compute), _cast(bias, compute)
        losses = [
            F.cross_entropy(
                _at_least_float32(F.linear(_cast(states, compute), head, offset)),
                targets,
                ignore_index=ignore_index,
                reduction="sum",
            )
            for states, targets in zip(hidden.split(chunk_tokens), labels.split(chunk_tokens), strict=True)
        ]
        return torch.stack(losses).sum()

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor | None, ...]:
        # Grad mode is on only if the backward itself will be differentiated, where once_differentiable may not raise.
        if torch.is_grad_enabled():
            raise SetupError(
                "chunked cross-entropy cannot be differentiated twice (create_graph=True). Use summed_cross_entropy of"
                " whole logits instead"
            )
        hidden, weight, bias, labels = ctx.saved_tensors
        needs_hidden, needs_weight, needs_bias = (_running_backward_needs_arg_grad(ctx, index) for index in range(3))
        head, offset = _cast(weight, ctx.compute), _cast(bias, ctx.compute)
        grad_hidden = torch.empty_like(hidden) if needs_hidden else None
        grad_weight = _make_zero_gradient_sum(weight) if needs_weight else None
        grad_bias = _make_zero_gradient_sum(bias) if needs_bias else None
        for start in range(0, len(labels), ctx.chunk_tokens):
            part = slice(start, start + ctx.chunk_tokens)
            states = _cast(hidden[part], ctx.compute)
            grad_logits = _gradient_of_logits(F.linear(states, head, offset), labels[part], gradient, ctx.ignore_index)
            if grad_bias is not None:
                grad_bias += grad_logits.sum(0)
            grad_logits = grad_logits.to(ctx.compute)
            if grad_hidden is not None:
                grad_hidden[part] = grad_logits @ head
            if grad_weight is not None:
                grad_weight += grad_logits.T @ states
        return (
            grad_hidden,
            None if grad_weight is None else grad_weight.to(weight.dtype),
            None if grad_bias is None else grad_bias.to(bias.dtype),
            *(None,) * 4,
        )


def _gradient_of_logits(logits: Tensor, labels: Tensor, gradient: Tensor, ignore_index: int) -> Tensor:
    """Softmax minus the label's one, times the loss's gradient; 0 for tokens that do not count."""
    result = _at_least_float32(logits).softmax(-1)
    counts = labels != ignore_index
    minus_one = result.new_full((len(labels), 1), -1.0)
    result.scatter_add_(1, labels.where(counts, 0)[:, None], minus_one)
    return result.mul_(gradient).masked_fill_(~counts[:, None], 0.0)


def _running_backward_needs_arg_grad(ctx: Any, index: int) -> bool:
    """Return True if the running backward computes the gradient of this argument.

    Schedules that split the backward run it once for the inputs and once for the weights. ``needs_input_grad`` is fixed
    in the forward, so without this check each of the two runs would compute both.
    """
    node = ctx.next_functions[index][0]
    return node is not None and will_execute_node(node)


def _make_zero_gradient_sum(parameter: Tensor) -> Tensor:
    return torch.zeros_like(parameter, dtype=torch.promote_types(parameter.dtype, torch.float32))


def _cast(tensor: Any, dtype: torch.dtype) -> Any:
    return tensor if tensor is None else tensor.to(dtype)


def _at_least_float32(tensor: Tensor) -> Tensor:
    return tensor.to(torch.promote_types(tensor.dtype, torch.float32))


def _check_labels_shape(name: str, values: Tensor, labels: Tensor) -> None:
    if values.shape[:-1] != labels.shape:
        raise InputError(
            f"the {name} have the shape {tuple(values.shape)} and the labels {tuple(labels.shape)}; expected labels"
            f" of {tuple(values.shape[:-1])}, one for each position. Align them (shift_labels does so for next-token"
            " prediction)"
        )


def check_loss_is_sum(
    summed_loss: Callable[[Any, Any], Tensor], loss: Tensor, output: Any, micro_batch: Mapping[str, Any]
) -> None:
    """Check that a loss is a sum over tokens: it must double if the rows are doubled."""
    if not isinstance(loss, Tensor) or loss.numel() != 1:
        return
    once = float(loss.detach())
    if not isinstance(output, Tensor) or output.ndim < 2 or not math.isfinite(once) or once == 0.0:
        return
    rows = len(output)

    def duplicate_rows(value: Any) -> Any:
        has_rows = isinstance(value, Tensor) and value.ndim > 0 and len(value) == rows
        return torch.cat([value, value]) if has_rows else value

    try:
        with torch.no_grad():
            twice = float(
                summed_loss(duplicate_rows(output), {key: duplicate_rows(value) for key, value in micro_batch.items()})
            )
    except Exception:  # a loss that can be asked for its own rows only
        return
    if abs(twice - once) < 0.1 * abs(once):
        raise InputError(
            f"summed_loss gives {once:.6g} for a micro-batch, and {twice:.6g} for twice its rows, as a mean does;"
            " expected the sum over its tokens (reduction='sum'), since gradients are divided by all tokens at the"
            " end of the step"
        )
