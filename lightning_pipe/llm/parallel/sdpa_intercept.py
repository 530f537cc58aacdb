"""Intercepts and checks the calls of ``scaled_dot_product_attention`` in a model.

Layers of Hugging Face and of plain PyTorch share this one function in which tokens interact. A function mode sees its
calls wherever they are made.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from typing import Any, Literal
from weakref import ReferenceType, ref

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.overrides import TorchFunctionMode

from lightning_pipe.engine.common.errors import SetupError
from lightning_pipe.llm.model.stage_module import PassThroughModule, StageModule, is_causal_lm
from lightning_pipe.llm.parallel.hf_document_masking import MASKED_FAMILIES, POSITION_ID_FAMILIES
from lightning_pipe.llm.parallel.sequence_chunks import chunk_positions

# Modules that treat each token independently.
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
)
# Families by ``model_type`` that take their positions from ``position_ids`` and mix tokens by attention alone; a test
# trains each of them on parts of sequences.
CONTEXT_PARALLEL_FAMILIES = (
    MASKED_FAMILIES
    | POSITION_ID_FAMILIES
    | {"deepseek_v2", "deepseek_v3", "dots1", "exaone", "glm4_moe_lite", "hy_v3", "internlm3", "jais2", "mellum"}
    | {"minimax_m2", "nanochat"}
)
# Keys of Hugging Face configs that limit the tokens a token attends to. A chunk's mask may not show the limit.
_WINDOWS = ("sliding_window", "attention_chunk_size")
# Rotary frequencies that depend on the largest position; a rank only sees the largest of its chunk.
_LENGTH_DEPENDENT_ROPE = ("dynamic", "longrope")
# An additive mask hides a token with this value or a lower one: its exponential is 0 in every dtype.
_MASKED = -1e4


class SDPAInterceptMode(TorchFunctionMode):
    """Redirects calls of ``scaled_dot_product_attention`` to :meth:`attend`; refuses attention that bypasses them."""

    def __torch_function__(
        self, func: Callable[..., Any], types: Iterable[type], args: tuple[Any, ...] = (), kwargs: Any = None
    ) -> Any:
        if func is F.scaled_dot_product_attention:
            return self.attend(*args, **(kwargs or {}))
        if func is F.multi_head_attention_forward:
            raise SetupError(
                "the model uses torch.nn.MultiheadAttention, whose attention context parallelism cannot intercept."
                " Replace it by a layer that calls torch.nn.functional.scaled_dot_product_attention"
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
        """Replacement of ``scaled_dot_product_attention``, with its arguments."""
        raise NotImplementedError


class ChunkMaskCheck:
    """Check of the masks that a model passes for its chunk: they are replaced, so they must match the whole mask.

    A chunk's mask does not show the pattern between chunks: a window at least as long as a chunk, or as a piece of a
    balanced chunk, goes unnoticed. Rows of padding are not compared, since no token attends to padding.
    """

    def __init__(
        self, full_mask: Tensor | None, rank: int, size: int, *, balanced: bool = False, square: bool = False
    ) -> None:
        self._full_mask, self._square = full_mask, square
        self._rank, self._size, self._balanced = rank, size, balanced
        # The mask of the last call and its version, which in-place changes increase: layers often share one mask.
        self._checked: tuple[ReferenceType[Tensor], int] | None = None

    def check(self, mask: Tensor | None, length: int) -> None:
        """Check that a mask equals the whole mask on the chunk's tokens."""
        if mask is not None:
            self._compare_with_full_mask(mask, length)

    @torch.compiler.disable
    def _compare_with_full_mask(self, mask: Tensor, length: int) -> None:
        version = -1 if mask.is_inference() else mask._version
        if self._checked is not None and self._checked[0]() is mask and self._checked[1] == version >= 0:
            return
        positions = chunk_positions(self._rank, self._size, length * self._size, balanced=self._balanced).to(
            mask.device
        )
        # The two pieces of a balanced chunk are not adjacent, and a model may treat them as documents.
        pieces = torch.arange(length, device=mask.device) * (2 if self._balanced else 1) // length
        compared = pieces[:, None] == pieces
        if self._full_mask is None:
            expected = positions[:, None] >= positions
        else:
            rows = self._full_mask.index_select(-2, positions)
            expected = rows.index_select(-1, positions)
            attends_itself = _as_bool_mask(expected).diagonal(dim1=-2, dim2=-1)
            # A mask of the batch is padded with tokens that attend to themselves only, other patterns with tokens that
            # none attends to.
            real = _as_bool_mask(rows).sum(-1) > attends_itself.long() if self._square else attends_itself
            compared = compared & real[..., None]
        if bool((_find_mask_differences(mask, expected) & compared).any()):
            raise SetupError(
                "the model calls scaled_dot_product_attention with its own mask, such as a sliding window, which"
                " differs from the attention pattern of the batch (its attention_mask of 4 dimensions, or else causal,"
                " except for padding and documents); expected one mask for all layers. Put that mask into the batch, as"
                " an attention_mask of (rows or 1, heads or 1, length, length)"
            )
        self._checked = (ref(mask), version)


def _as_bool_mask(mask: Tensor) -> Tensor:
    """True where a bool or additive mask lets a query attend to a key."""
    return mask > _MASKED if mask.is_floating_point() else mask.bool()


def _get_score_bias_where_attended(mask: Tensor) -> Tensor:
    """What a mask adds to the scores of the keys that a query attends to."""
    return mask if mask.is_floating_point() else mask.new_zeros((), dtype=torch.float32)


def _find_mask_differences(mask: Tensor, expected: Tensor) -> Tensor:
    """True where two masks, each bool or additive, differ in their effect."""
    attends, bias = _as_bool_mask(mask), _get_score_bias_where_attended(mask)
    return (attends != _as_bool_mask(expected)) | (
        attends & (bias != _get_score_bias_where_attended(expected).to(bias.dtype))
    )


class AttentionCheckedStage(nn.Module):
    """Stage whose forwards check that context parallelism intercepts all of its attention.

    It is used for the forwards on fake tensors that infer shapes. Every rank runs these for all stages, before any
    stage runs with data, so an error is raised on every rank and no neighbor is left waiting.
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
            _check_model_config(stage.module.config)
        # Training mode, so that dropout is visible.
        self.stage = stage.train()
        self._size = size if method == "ulysses" else 1
        self._dropout = method == "ulysses"
        self._tensor_size = tensor_size
        self._calls = 0
        for name in layers:
            layer = stage.module.get_submodule(name)
            if not all(type(part) in _TOKENWISE or isinstance(part, PassThroughModule) for part in layer.modules()):
                layer.register_forward_pre_hook(self._begin_layer)
                layer.register_forward_hook(self._end_layer(name))

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        mask = kwargs.get("attention_mask")
        square = isinstance(mask, Tensor) and mask.ndim == 4
        if isinstance(mask, Tensor) and square and mask.shape[1] > 1 and self._tensor_size > 1:
            raise SetupError(
                f"the batch's attention_mask has {mask.shape[1]} heads, which parallel.tp={self._tensor_size} shares"
                " out, and a rank cannot select its heads of the mask. Use one mask for all heads: (rows or 1, 1,"
                " length, length)"
            )
        with _AttentionCheckMode(self._size, square, self._dropout, self._count_attention_call):
            return self.stage(*args, **kwargs)

    def _count_attention_call(self) -> None:
        self._calls += 1

    def _begin_layer(self, layer: nn.Module, args: Any) -> None:
        self._calls = 0

    def _end_layer(self, name: str) -> Callable[[nn.Module, Any, Any], None]:
        def check_attention_called(layer: nn.Module, args: Any, output: Any) -> None:
            if self._calls == 0:
                raise SetupError(
                    f"layer {name} ({type(layer).__name__}) does not call scaled_dot_product_attention; expected a call"
                    " in every layer, since context parallelism exchanges tokens only there. Choose that implementation"
                    " of attention (HFCausalLM's attention='sdpa', or attn_implementation='sdpa' of transformers), and"
                    " merge a layer without attention into one with attention"
                )

        return check_attention_called


class _AttentionCheckMode(SDPAInterceptMode):
    """Checks and counts the calls."""

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
        check_sdpa_call_shardable(
            query, key, attn_mask, is_causal, self._size, self._square, 0.0 if self._dropout else dropout_p
        )
        self._count()
        return F.scaled_dot_product_attention(query, key, value, attn_mask, dropout_p, is_causal, **options)


def check_mask_heads(mask: Tensor | None, query: Tensor) -> None:
    """Check that a mask of (rows or 1, heads or 1, ...) has 1 head or those of the query."""
    if mask is not None and mask.shape[1] not in (1, query.shape[1]):
        raise SetupError(
            f"the batch's attention_mask has {mask.shape[1]} heads, and attention {query.shape[1]} on this rank. Use a"
            " mask with the same number of heads, or with 1 head"
        )


def check_sdpa_call_shardable(
    query: Tensor,
    key: Tensor,
    attn_mask: Tensor | None,
    is_causal: bool,
    size: int,
    square: bool,
    dropout: float = 0.0,
) -> None:
    """Check that a call can be computed over several ranks."""
    if dropout:
        raise SetupError(
            f"scaled_dot_product_attention is called with dropout_p={dropout}, which ring attention does not support;"
            " expected 0.0. Disable attention dropout, or set parallel.cp_method='ulysses'"
        )
    if query.ndim != 4 or key.ndim != 4 or query.shape[-2] != key.shape[-2]:
        raise SetupError(
            f"scaled_dot_product_attention is called with a query of {tuple(query.shape)} and a key of"
            f" {tuple(key.shape)}; expected (rows, heads, length, width) of one length for both. Use self-attention,"
            " since context parallelism supports no cross-attention"
        )
    if query.shape[1] % size:
        raise SetupError(
            f"attention has {query.shape[1]} heads, which parallel.cp={size} does not divide. Choose a smaller"
            " parallel.cp (tensor parallelism divides the heads, too), or parallel.cp_method='ring'"
        )
    if square:
        return
    if attn_mask is None and not is_causal and query.shape[-2] > 1:
        raise SetupError(
            "scaled_dot_product_attention is called without a mask and with is_causal=False, so that all tokens attend"
            " to all; expected causal attention for sequences that are cut over ranks. Set is_causal=True, or give an"
            " attention_mask of (rows, 1, length, length)"
        )
    if attn_mask is not None and attn_mask.is_floating_point():
        raise SetupError(
            f"scaled_dot_product_attention is called with an attn_mask of {attn_mask.dtype}, which may be a bias"
            " (such as ALiBi) that a rank only has for its own chunk. Use a bool mask, is_causal=True, or an"
            " attention_mask of (rows, heads or 1, length, length) in the batch"
        )


def _check_model_config(config: Any) -> None:
    if config.model_type not in CONTEXT_PARALLEL_FAMILIES:
        raise SetupError(
            f"parallel.cp is above 1, and {config.model_type!r} models are not known to train on parts of sequences;"
            f" expected one of {', '.join(sorted(CONTEXT_PARALLEL_FAMILIES))}. Set parallel.cp to 1"
        )
    for name in _WINDOWS:
        if isinstance(window := getattr(config, name, None), int):
            raise SetupError(
                f"the model's config has {name}={window}, which limits attention to some tokens, and context"
                f" parallelism does not support that. Set {name}=None, which gives the same results for sequences that"
                " fit into it"
            )
    scaling = getattr(config, "rope_scaling", None) or {}
    kind = scaling.get("rope_type", scaling.get("type"))
    if kind in _LENGTH_DEPENDENT_ROPE:
        raise SetupError(
            f"the model's config has rope_scaling of type {kind!r}, whose frequencies depend on the sequence length,"
            " which a rank of context parallelism does not see. Use another type, such as 'linear' or 'yarn'"
        )
