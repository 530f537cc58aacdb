"""The calls of ``scaled_dot_product_attention`` in a model, handed to somebody else, and checked before.

It is the one function through which tokens meet that layers of Hugging Face's and of plain PyTorch have in common; a
function mode sees it wherever it is called.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from typing import Any, ClassVar, Literal

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.overrides import TorchFunctionMode

from lightning_pipe.engine.common.errors import SetupError
from lightning_pipe.llm.model.stage_module import PassThrough, StageModule, is_causal_lm
from lightning_pipe.llm.parallel.context_parallel import chunk_positions

__all__ = ["AttentionMode", "CheckedAttention", "OwnMasks", "check_call", "check_mask_heads"]

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


class AttentionMode(TorchFunctionMode):
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


class OwnMasks:
    """Masks that a model made itself for its chunk: they give way to the whole one, and so may say nothing else.

    A mask is looked at once for each chunk's length. What it says of other chunks it does not show: a window that is
    longer than a chunk goes unseen.

    Args:
        whole: of the whole sequences, (rows or 1, 1, length, length); None where tokens attend to all before them.
        rank: in the context dimension.
        size: ranks in that dimension.
        balanced: how sequences are cut.
    """

    _seen: ClassVar[set[tuple[int, bool]]] = set()

    def __init__(self, whole: Tensor | None, rank: int, size: int, *, balanced: bool = False) -> None:
        self._whole = whole
        self._rank, self._size, self._balanced = rank, size, balanced

    def check(self, mask: Tensor | None) -> None:
        """See that a mask of (..., length / size, length / size) says what the whole one does of these tokens.

        Raises:
            SetupError: it does not.
        """
        if mask is not None and mask.dtype == torch.bool:
            self._compare(mask)

    @torch.compiler.disable
    def _compare(self, mask: Tensor) -> None:
        part = mask.shape[-1]
        if (part, self._whole is None) in self._seen:
            return
        own = chunk_positions(self._rank, self._size, part * self._size, balanced=self._balanced).to(mask.device)
        if self._whole is None:
            expected = own[:, None] >= own
        else:
            expected = self._whole.index_select(-2, own).index_select(-1, own)
        # Of pieces that do not follow on from each other a model may make documents.
        pieces = torch.arange(part, device=mask.device) * (2 if self._balanced else 1) // part
        differs = (mask != expected) & (pieces[:, None] == pieces)
        if bool(differs.any()):
            raise SetupError(
                "the model calls scaled_dot_product_attention with a mask of its own, a sliding window say, which lets"
                " tokens attend to others than what the batch says of the whole sequences does: to all before them, but"
                " for padding and other documents; needed for context parallelism is that mask in the batch, as an"
                " attention_mask of (rows or 1, heads or 1, length, length)"
            )
        self._seen.add((part, self._whole is None))


class CheckedAttention(nn.Module):
    """A stage, whose forwards show whether context parallelism sees all of its attention.

    For the forwards without data that shapes are found by: every rank runs them for all stages, before any stage runs
    with data. An error there is one on every rank, and leaves no neighbour waiting.

    Args:
        stage: of the model, with fake parameters.
        layers: FQNs of the whole model's layers. Each calls ``scaled_dot_product_attention``, unless all in it are
            modules of PyTorch's that treat tokens one by one.
        size: ranks that sequences are cut over.
        method: ``ulysses``, in which those ranks share the heads, or ``ring``, in which attention has no dropout.
        tensor_size: ranks that share a layer's heads before.

    Raises:
        SetupError: a Hugging Face config with a sliding window, with rotary frequencies that depend on the length, or
            with dropout that the method has not.
            Forward raises it for attention that is not seen, does not fit, or would be another than the model's.
    """

    def __init__(
        self,
        stage: StageModule,
        layers: Sequence[str],
        size: int,
        method: Literal["ulysses", "ring"] = "ulysses",
        tensor_size: int = 1,
    ) -> None:
        super().__init__()
        if is_causal_lm(stage.module):
            _check_config(stage.module.config)
        # As in training, so that dropout shows.
        self.stage = stage.train()
        self._size = size if method == "ulysses" else 1
        self._dropout = method == "ulysses"
        self._tensor_size = tensor_size
        self._calls = 0
        for name in layers:
            layer = stage.module.get_submodule(name)
            if not all(type(part) in _TOKENWISE for part in layer.modules()):
                layer.register_forward_pre_hook(self._begin_layer)
                layer.register_forward_hook(self._end_layer(name))

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        mask = kwargs.get("attention_mask")
        square = isinstance(mask, Tensor) and mask.ndim == 4
        if isinstance(mask, Tensor) and square and mask.shape[1] > 1 and self._tensor_size > 1:
            raise SetupError(
                f"the batch's attention_mask has {mask.shape[1]} heads, which parallel.tp={self._tensor_size}"
                " shares out, and a rank does not know which are its own; needed is a mask of (rows or 1, 1, length,"
                " length), the same for all heads"
            )
        with _Watch(self._size, square, self._dropout, self._count):
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


class _Watch(AttentionMode):
    """Checks calls, and counts them."""

    def __init__(self, size: int, square: bool, dropout: bool, count: Callable[[], None]) -> None:
        super().__init__()
        self._size = size
        self._square = square
        self._dropout = dropout
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
        check_call(query, key, attn_mask, is_causal, self._size, self._square, 0.0 if self._dropout else dropout_p)
        self._count()
        return F.scaled_dot_product_attention(query, key, value, attn_mask, dropout_p, is_causal, **options)


def check_mask_heads(mask: Tensor | None, query: Tensor) -> None:
    """See that a mask of (rows or 1, heads or 1, ...) has the heads of the query.

    Raises:
        SetupError: it has others.
    """
    if mask is not None and mask.shape[1] not in (1, query.shape[1]):
        raise SetupError(
            f"the batch's attention_mask has {mask.shape[1]} heads, and attention {query.shape[1]} on this rank; needed"
            " is a mask with as many, or with 1 for all of them"
        )


def check_call(
    query: Tensor,
    key: Tensor,
    attn_mask: Tensor | None,
    is_causal: bool,
    size: int,
    square: bool,
    dropout: float = 0.0,
) -> None:
    """See that a call can be made over several ranks.

    Args:
        query: of a chunk, as are the others: (rows, heads, length / c, width).
        key: the same, with as many heads or fewer.
        attn_mask: the model's.
        is_causal: the model's.
        size: ranks that share the heads.
        square: the batch has a mask of (rows or 1, heads or 1, length, length), which counts.
        dropout: where it cannot be done.

    Raises:
        SetupError: it cannot.
    """
    if dropout:
        raise SetupError(
            f"scaled_dot_product_attention is called with dropout_p={dropout}, and attention over a ring has none;"
            " needed is 0.0, or parallel.cp_method='ulysses'"
        )
    if query.ndim != 4 or key.ndim != 4 or query.shape[-2] != key.shape[-2]:
        raise SetupError(
            f"scaled_dot_product_attention is called with a query of {tuple(query.shape)} and a key of"
            f" {tuple(key.shape)}; needed for context parallelism is (rows, heads, length, width) of one sequence that"
            " attends to itself"
        )
    if query.shape[1] % size:
        raise SetupError(
            f"attention has {query.shape[1]} heads, which parallel.cp={size} does not divide; needed is a"
            " multiple of it: choose a smaller size (tensor parallelism divides the heads, too), or"
            " parallel.cp_method='ring'"
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
