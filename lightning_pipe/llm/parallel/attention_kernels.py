"""Attention kernels of Hugging Face models that need a GPU, and PyTorch's kernel for sequences of varying lengths."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn

from lightning_pipe._compat.transformers import attention_implementation, model_supports_flash_attention
from lightning_pipe.engine.common.errors import InputError, SetupError
from lightning_pipe.llm.model.stage_module import is_causal_lm

VARLEN = "varlen_attn"


def reads_cu_seqlens(implementation: str) -> bool:
    """Return True if an attention implementation reads ``cu_seq_lens_q/k``."""
    return "flash" in implementation or implementation == VARLEN


def check_family_supports_attention(model: Any) -> None:
    """Check that a Hugging Face causal LM computes with an attention kernel what it computes without."""
    name, family = attention_implementation(model.config), model.config.model_type
    if (name == VARLEN and not model_supports_flash_attention(model)) or (
        name == "flex_attention" and family == "doge"
    ):
        expected = "that transformers uses FlashAttention for" if name == VARLEN else "other than doge"
        raise SetupError(
            f"attention={name!r} is not supported for {family!r} models, which would train with another mask than with"
            f" 'eager'; expected a family {expected}. Leave out the argument `attention`"
        )


def check_attention_device(model: nn.Module, device: torch.device) -> None:
    """Check that the attention of a Hugging Face causal LM can be trained on a device."""
    name = attention_implementation(model.config) if is_causal_lm(model) else ""
    if device.type in ("cpu", "mps") and (name == "flex_attention" or reads_cu_seqlens(name)):
        raise SetupError(
            f"attention={name!r} cannot be trained on {device.type}, where its kernel has no backward; expected a GPU."
            " Set attention='sdpa', or accelerator='gpu'"
        )


def register_varlen() -> None:
    """Make ``varlen_attn`` an attention implementation of transformers, for every model of this process."""
    from transformers import AttentionInterface, AttentionMaskInterface
    from transformers.masking_utils import flash_attention_mask

    AttentionInterface.register(VARLEN, _varlen_attention)
    AttentionMaskInterface.register(VARLEN, flash_attention_mask)


def _varlen_attention(
    module: nn.Module,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attention_mask: Tensor | None,
    dropout: float = 0.0,
    scaling: float | None = None,
    sliding_window: int | None = None,
    cu_seq_lens_q: Tensor | None = None,
    max_length_q: int | None = None,
    **options: Any,
) -> tuple[Tensor, None]:
    """Causal attention within documents; the arguments are those of transformers' attention functions."""
    from torch.nn.attention import varlen

    if attention_mask is not None:
        raise InputError(
            f"a layer gets an attention mask (of model_inputs, of parallel.cp, or the model's own), which attention="
            f"{VARLEN!r} does not read; expected causal attention within documents. Set attention='sdpa'"
        )
    present = [name for name in ("softcap", "s_aux", "position_bias") if options.get(name) is not None]
    present += ["dropout"] if dropout else []
    present += ["values of another head size than keys"] if query.shape[-1] != value.shape[-1] else []
    present += [] if getattr(module, "is_causal", True) else ["attention to later tokens"]
    if present:
        raise SetupError(
            f"the model has attention with {', '.join(present)}; expected causal attention without, which is what"
            f" attention={VARLEN!r} supports. Set attention='sdpa' or 'eager'"
        )
    rows, _, length, _ = query.shape
    if cu_seq_lens_q is None or max_length_q is None:
        # Each row is one document.
        cu_seq_lens_q = torch.arange(0, rows * length + 1, length, device=query.device, dtype=torch.int32)
        max_length_q = length
    # Rotary embeddings give queries and keys float32 under autocast, which casts no inputs of this kernel.
    device = query.device.type
    dtype = torch.get_autocast_dtype(device) if torch.is_autocast_enabled(device) else query.dtype
    query, key, value = (tensor.transpose(1, 2).flatten(0, 1).to(dtype) for tensor in (query, key, value))
    output: Any = varlen.varlen_attn(
        query,
        key,
        value,
        cu_seq_lens_q,
        cu_seq_lens_q,
        max_length_q,
        max_length_q,
        scale=scaling,
        window_size=(-1 if sliding_window is None else sliding_window - 1, 0),
        enable_gqa=query.shape[1] != key.shape[1],
    )
    return output.unflatten(0, (rows, length)), None
