"""Attention over sequences that are cut over ranks: each takes some of the heads, for the whole length.

An all-to-all before attention gives a rank the whole sequences of its share of heads, one behind it gives the heads of
its chunk back (DeepSpeed-Ulysses, arXiv 2309.14509)::

    (rows, heads, length / c, width) ──► (rows, heads / c, length, width) ──► attention ──► and back

It works for any model that calls ``scaled_dot_product_attention``, as it is: a function mode sees those calls. What a
rank's chunk alone tells a model of who attends to whom is not the truth, so its mask gives way to the whole one.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Sequence
from typing import Any

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor, nn
from torch.distributed._functional_collectives import all_to_all_single_autograd, wait_tensor
from torch.overrides import TorchFunctionMode

from lightning_pipe.engine.errors import SetupError
from lightning_pipe.llm.context_parallel import FullAttention
from lightning_pipe.llm.stage_module import PassThrough, StageModule, is_causal_lm

__all__ = ["CheckedAttention", "Ulysses"]

# Nothing in them goes from one token to another.
_TOKENWISE = (
    nn.Dropout,
    nn.Embedding,
    nn.GELU,
    nn.Identity,
    nn.LayerNorm,
    nn.Linear,
    nn.ReLU,
    nn.RMSNorm,
    nn.Sequential,
    nn.SiLU,
    PassThrough,
)
# In Hugging Face's configs: tokens attend to some of those before them only. A mask of a chunk does not show it.
_WINDOWS = ("sliding_window", "attention_chunk_size")
# Rotary frequencies that follow the largest position, of which a rank would take its own chunk's.
_LENGTH_DEPENDENT_ROPE = ("dynamic", "longrope")


class _AttentionMode(TorchFunctionMode):
    """Hands calls of ``scaled_dot_product_attention`` over, and refuses attention that hides them."""

    def __torch_function__(
        self, func: Callable[..., Any], types: Iterable[type], args: tuple[Any, ...] = (), kwargs: Any = None
    ) -> Any:
        if func is F.scaled_dot_product_attention:
            return self.attend(*args, **(kwargs or {}))
        if func is F.multi_head_attention_forward:
            raise SetupError(
                "the model uses torch.nn.MultiheadAttention, which computes attention out of reach of context"
                " parallelism; needed is a layer that calls torch.nn.functional.scaled_dot_product_attention itself"
            )
        return func(*args, **(kwargs or {}))

    def attend(
        self,
        query: Tensor,
        key: Tensor,
        value: Tensor,
        attn_mask: Tensor | None = None,
        dropout_p: float = 0.0,
        is_causal: bool = False,
        **options: Any,
    ) -> Tensor:
        """In place of ``scaled_dot_product_attention``, with its arguments."""
        raise NotImplementedError


class Ulysses(_AttentionMode):
    """While it is entered, ``scaled_dot_product_attention`` of chunks is that of the whole sequences.

    Every rank of the group enters it around the same forward. It holds nothing of a call, so that it may be entered
    again, inside itself or when activation checkpointing runs a forward once more; backward needs no mode.

    Query heads are a multiple of the ranks. Key and value heads need not be: fewer than that are repeated first, as far
    as needed. A mask that the model built from its chunk is replaced, whatever it says. Under dropout of attention
    each rank draws for its own heads: as random as on one device, but not the same numbers.

    Args:
        group: the ranks that hold the chunks, in their order.
        attention: who attends to whom in the whole sequences; causal where None.
    """

    def __init__(self, group: dist.ProcessGroup, attention: FullAttention | None = None) -> None:
        super().__init__()
        self._group = group
        # Made once, and the same for all layers, since autograd keeps it for each until backward.
        self._mask = None if attention is None else attention.as_mask()
        self._square = attention is not None and attention.mask is not None

    def attend(
        self,
        query: Tensor,
        key: Tensor,
        value: Tensor,
        attn_mask: Tensor | None = None,
        dropout_p: float = 0.0,
        is_causal: bool = False,
        **options: Any,
    ) -> Tensor:
        size = self._group.size()
        _check_call(query, key, attn_mask, is_causal, size, self._square)
        repeats = size // math.gcd(key.shape[1], size)
        if repeats > 1:
            key, value = (tensor.repeat_interleave(repeats, 1) for tensor in (key, value))
        query, key, value = _heads_to_ranks([query, key, value], self._group)
        mask = self._of_own_heads(query)
        with torch._C.DisableTorchFunction():  # the same mode may be entered further out
            attended = F.scaled_dot_product_attention(query, key, value, mask, dropout_p, mask is None, **options)
        return _chunks_to_ranks(attended, self._group)

    def _of_own_heads(self, query: Tensor) -> Tensor | None:
        mask = self._mask
        if mask is None:
            return None
        if mask.shape[1] > 1:
            heads = query.shape[1]
            mask = mask.narrow(1, self._group.rank() * heads, heads)
        return mask.to(query.dtype) if mask.is_floating_point() else mask


class CheckedAttention(nn.Module):
    """A stage, whose forwards show whether context parallelism sees all of its attention.

    For the forwards without data that shapes are found by: every rank runs them for all stages, before any stage runs
    with data. An error there is one on every rank, and leaves no neighbour waiting.

    Args:
        stage: of the model, with fake parameters.
        layers: FQNs of the whole model's layers. Each calls ``scaled_dot_product_attention``, unless all in it are
            modules of PyTorch's that treat tokens one by one.
        size: ranks that sequences are cut over.

    Raises:
        SetupError: a Hugging Face config with a sliding window, or with rotary frequencies that depend on the length.
            Forward raises it for attention that is not seen, does not fit, or would be another than the model's.
    """

    def __init__(self, stage: StageModule, layers: Sequence[str], size: int) -> None:
        super().__init__()
        if is_causal_lm(stage.module):
            _check_config(stage.module.config)
        self.stage = stage
        self._size = size
        self._calls = 0
        for name in layers:
            layer = stage.module.get_submodule(name)
            if not all(type(part) in _TOKENWISE for part in layer.modules()):
                layer.register_forward_pre_hook(self._begin_layer)
                layer.register_forward_hook(self._end_layer(name))

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        mask = kwargs.get("attention_mask")
        with _Watch(self._size, isinstance(mask, Tensor) and mask.ndim == 4, self._count):
            return self.stage(*args, **kwargs)

    def _count(self) -> None:
        self._calls += 1

    def _begin_layer(self, layer: nn.Module, args: Any) -> None:
        self._calls = 0

    def _end_layer(self, name: str) -> Callable[[nn.Module, Any, Any], None]:
        def check(layer: nn.Module, args: Any, output: Any) -> None:
            if self._calls == 0:
                raise SetupError(
                    f"layer {name} ({type(layer).__name__}) does not call scaled_dot_product_attention, through which"
                    " alone tokens of different context ranks meet; needed is a call in every layer: choose that"
                    " implementation of attention (for Hugging Face models attn_implementation='sdpa'), and make a"
                    " layer without attention part of one that has it"
                )

        return check


class _Watch(_AttentionMode):
    """Checks calls, and counts them."""

    def __init__(self, size: int, square: bool, count: Callable[[], None]) -> None:
        super().__init__()
        self._size = size
        self._square = square
        self._count = count

    def attend(
        self,
        query: Tensor,
        key: Tensor,
        value: Tensor,
        attn_mask: Tensor | None = None,
        dropout_p: float = 0.0,
        is_causal: bool = False,
        **options: Any,
    ) -> Tensor:
        _check_call(query, key, attn_mask, is_causal, self._size, self._square)
        self._count()
        return F.scaled_dot_product_attention(query, key, value, attn_mask, dropout_p, is_causal, **options)


def _check_call(query: Tensor, key: Tensor, attn_mask: Tensor | None, is_causal: bool, size: int, square: bool) -> None:
    if query.ndim != 4 or key.ndim != 4 or query.shape[-2] != key.shape[-2]:
        raise SetupError(
            f"scaled_dot_product_attention is called with a query of {tuple(query.shape)} and a key of"
            f" {tuple(key.shape)}; needed for context parallelism is (rows, heads, length, width) of one sequence that"
            " attends to itself"
        )
    if query.shape[1] % size:
        raise SetupError(
            f"attention has {query.shape[1]} heads, which context_parallel_size={size} does not divide; needed is a"
            " multiple of it: choose a smaller size (tensor parallelism divides the heads, too)"
        )
    if square:
        return
    if attn_mask is None and not is_causal and query.shape[-2] > 1:
        raise SetupError(
            "scaled_dot_product_attention is called without a mask and with is_causal=False, so that all tokens attend"
            " to all; sequences that are cut over context ranks are causal: set is_causal=True, or give an"
            " attention_mask of (rows, 1, length, length)"
        )
    if attn_mask is not None and attn_mask.is_floating_point():
        raise SetupError(
            f"scaled_dot_product_attention is called with an attn_mask of {attn_mask.dtype}, which may be a bias"
            " (ALiBi, say) that a rank knows of its own chunk only; needed is a mask of bool, or is_causal=True, or an"
            " attention_mask of (rows, heads or 1, length, length) in the batch"
        )


def _check_config(config: Any) -> None:
    for name in _WINDOWS:
        if isinstance(window := getattr(config, name, None), int):
            raise SetupError(
                f"the model's config has {name}={window}, so that layers attend to some tokens only, and ranks of"
                f" context parallelism to all; needed is {name}=None, which is the same for sequences that fit into it"
            )
    scaling = getattr(config, "rope_scaling", None) or {}
    kind = scaling.get("rope_type", scaling.get("type"))
    if kind in _LENGTH_DEPENDENT_ROPE:
        raise SetupError(
            f"the model's config has rope_scaling of type {kind!r}, whose frequencies follow the sequence's length,"
            " which ranks of context parallelism do not see; needed is another type, such as 'linear' or 'yarn'"
        )


def _heads_to_ranks(tensors: Sequence[Tensor], group: dist.ProcessGroup) -> list[Tensor]:
    """Each (rows, heads, length / c, width) becomes (rows, heads / c, length, width): its heads of all chunks."""
    size = group.size()
    # In front comes the rank that it goes to, and afterwards the one that it came from.
    parts = [tensor.reshape(len(tensor), size, -1, *tensor.shape[2:]).movedim(1, 0) for tensor in tensors]
    received = _all_to_all(torch.cat([part.flatten(1) for part in parts], 1), group)
    pieces = received.split([part[0].numel() for part in parts], 1)
    return [piece.view(part.shape).movedim(0, 2).flatten(2, 3) for piece, part in zip(pieces, parts, strict=True)]


def _chunks_to_ranks(tensor: Tensor, group: dist.ProcessGroup) -> Tensor:
    """(rows, heads / c, length, width) becomes (rows, heads, length / c, width): its chunk of all heads."""
    parts = tensor.reshape(*tensor.shape[:2], group.size(), -1, tensor.shape[-1]).movedim(2, 0)
    return _all_to_all(parts, group).movedim(0, 1).flatten(1, 2)


def _all_to_all(parts: Tensor, group: dist.ProcessGroup) -> Tensor:
    """parts[i] goes to rank i; the result's [i] came from it. Backward sends gradients back."""
    received: Tensor = wait_tensor(all_to_all_single_autograd(parts.contiguous(), None, None, group))
    return received
