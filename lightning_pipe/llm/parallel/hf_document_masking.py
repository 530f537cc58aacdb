"""Separates the documents of packed rows in Hugging Face causal language models.

A row contains several documents if ``cu_seq_lens_q/k`` give boundaries, or if ``position_ids`` restart within it. The
effect of these inputs depends on the model family and the attention implementation. Of transformers',
``flash_attention_2`` uses ``cu_seq_lens``, or the positions of a single row. ``sdpa``, ``eager`` and ``flex_attention``
ignore ``cu_seq_lens``; most families find documents in ``position_ids`` if they get no mask. Others only follow a mask
of (rows, 1, length, length), and layers with a recurrence or a convolution mix all tokens of a row. This module gives
each family the input that it follows. A family that is not known to separate documents is refused.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from contextlib import AbstractContextManager
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn

from lightning_pipe._compat.transformers import attention_implementation, disable_packed_sequence_detection
from lightning_pipe.engine.common.errors import InputError
from lightning_pipe.llm.batches.host_values import copy_to_device_of
from lightning_pipe.llm.batches.padding import BOUNDARIES, PadValues
from lightning_pipe.llm.model.stage_module import is_causal_lm
from lightning_pipe.llm.parallel.attention_kernels import VARLEN, reads_cu_seqlens
from lightning_pipe.llm.parallel.sequence_chunks import AttentionPattern, document_positions, read_batch_attention

# By ``model_type``; tests compare each family with one run for each document (transformers 5.24).
POSITION_ID_FAMILIES = frozenset(
    [
        "apertus",
        "arcee",
        "bitnet",
        "cohere",
        "cohere2",
        "diffllama",
        "doge",
        "ernie4_5",
        "ernie4_5_moe",
        "exaone4",
        "flex_olmo",
        "gemma",
        "gemma2",
        "gemma3_text",
        "glm",
        "glm4",
        "glm4_moe",
        "gpt2",
        "gpt_bigcode",
        "gpt_neox",
        "granite",
        "helium",
        "hunyuan_v1_dense",
        "hunyuan_v1_moe",
        "llama",
        "ministral",
        "mistral",
        "mixtral",
        "olmo",
        "olmo2",
        "olmo3",
        "phi",
        "phi3",
        "qwen2",
        "qwen3",
        "qwen3_moe",
        "seed_oss",
        "smollm3",
        "starcoder2",
        "vaultgemma",
    ]
)
MASKED_FAMILIES = frozenset(
    [
        "biogpt",
        "codegen",
        "dbrx",
        "falcon",
        "gpt_neo",
        "gpt_neox_japanese",
        "gpt_oss",
        "gptj",
        "granitemoe",
        "granitemoeshared",
        "jetmoe",
        "nemotron",
        "olmoe",
        "opt",
        "persimmon",
        "phimoe",
        "qwen2_moe",
        "stablelm",
    ]
)
_DESCRIPTION = (*BOUNDARIES, *BOUNDARIES.values())


class HFDocumentMasking:
    """Inputs that separate documents in one model."""

    def __init__(self, config: Any, dtype: torch.dtype) -> None:
        self._family: str = config.model_type
        self._implementation = attention_implementation(config)
        window = getattr(config, "sliding_window", None)
        self._window: int | None = window if window and getattr(config, "use_sliding_window", True) else None
        self._dtype = dtype

    @staticmethod
    def from_model(model: nn.Module) -> HFDocumentMasking | None:
        """Build it for a model, or for a rank's part of one; None if it is not a Hugging Face causal LM."""
        if not is_causal_lm(model) or not hasattr(model.config, "model_type"):
            return None
        dtypes = (parameter.dtype for parameter in model.parameters() if parameter.is_floating_point())
        return HFDocumentMasking(model.config, next(dtypes, torch.get_default_dtype()))

    def check(self, micro_batch: Mapping[str, Any]) -> None:
        """Check that the model separates the documents of a micro-batch, if its rows have several."""
        if self._implementation == VARLEN and _has_padding_before_tokens(micro_batch.get("attention_mask")):
            raise InputError(
                f"the micro-batch's attention_mask masks tokens before others, which attention={VARLEN!r} does not"
                " support; expected padding at the end of rows. Pad on the right, or set attention='sdpa'"
            )
        documents = self._documents(micro_batch)
        if documents is None:
            return
        fix = "give each row one document, padded (an attention_mask masks padding)"
        if self._family not in POSITION_ID_FAMILIES | MASKED_FAMILIES:
            raise InputError(
                "the micro-batch has several documents a row (cu_seq_lens, or position_ids that restart), which"
                f" {self._family!r} models are not known to keep apart. To fix it, {fix}, or train a model of one of"
                f" the families {', '.join(sorted(POSITION_ID_FAMILIES | MASKED_FAMILIES))}"
            )
        positions = micro_batch.get("position_ids")
        if isinstance(positions, Tensor) and _find_document_boundaries(documents).gt(positions.diff(dim=1) != 1).any():
            raise InputError(
                "the micro-batch's position_ids continue where cu_seq_lens begin a document; expected positions that"
                " restart with each document. Leave position_ids out to have them computed"
            )
        if not self._needs_mask(micro_batch):
            return
        if reads_cu_seqlens(self._implementation) or self._implementation == "flex_attention":
            raise InputError(
                f"the micro-batch has several documents a row, which the attention {self._implementation!r} of"
                f" {self._family!r} models does not keep apart. Use attention='sdpa' or 'eager', or {fix}"
            )
        longest = int(document_positions(documents).max()) + 1
        if self._window is not None and longest > self._window:
            raise InputError(
                f"the micro-batch has several documents a row, of up to {longest} tokens, and {self._family!r} models"
                f" do not support documents together with a sliding window of {self._window}. To fix it, {fix}, or cut"
                " documents to the window"
            )

    def add_document_inputs(
        self, micro_batch: Mapping[str, Any], keywords: Mapping[str, Any], on_host: Mapping[str, Any] | None = None
    ) -> dict[str, Any]:
        """The model's keywords for a micro-batch, with the inputs that separate its documents.

        Documents are read from *on_host*, the micro-batch with its values on the host, if it is given.
        """
        on_host = micro_batch if on_host is None else on_host
        documents = self._documents(on_host)
        if documents is None or self._family not in POSITION_ID_FAMILIES | MASKED_FAMILIES:
            plain, mask = dict(keywords), keywords.get("attention_mask")
            unchanged = mask is micro_batch.get("attention_mask")
            if self._implementation == VARLEN and unchanged and isinstance(mask, Tensor) and mask.ndim == 2:
                plain["attention_mask"] = None  # causal attention of tokens does not reach padding at the end
            return plain
        model_keywords = {key: value for key, value in keywords.items() if key not in _DESCRIPTION}
        position_ids = micro_batch.get("position_ids")
        rows, length = PadValues().get_microbatch_rows_and_length(micro_batch)
        attention = read_batch_attention(micro_batch, length, on_host)
        assert attention.documents is not None
        if reads_cu_seqlens(self._implementation):
            # Boundaries in all rows, one after the other: transformers reads positions only if there is a single row.
            begins = nn.functional.pad(
                _find_document_boundaries(documents).expand(rows, -1), (1, 0), value=True
            ).flatten()
            ends = nn.functional.pad(begins.nonzero().flatten(), (0, 1), value=begins.numel()).int()
            longest, ends = int(ends.diff().max()), copy_to_device_of(attention.documents, ends)
            model_keywords |= dict(zip(_DESCRIPTION, (ends, ends, longest, longest), strict=True))
        if not isinstance(position_ids, Tensor):
            position_ids = document_positions(attention.documents).expand(rows, -1)
        model_keywords["position_ids"] = position_ids
        model_keywords["attention_mask"] = self._mask(attention) if self._needs_mask(on_host) else None
        return model_keywords

    def make_forward_contexts(
        self, micro_batch: Mapping[str, Any], keywords: Mapping[str, Any], on_host: Mapping[str, Any]
    ) -> tuple[Callable[[], AbstractContextManager[Any]], ...]:
        """Contexts of the model's forwards in which transformers does not read positions from the device.

        Empty for positions of ``model_inputs`` itself, and for families that may look for documents elsewhere.
        """
        positions = on_host.get("position_ids")
        packed = isinstance(positions, Tensor) and bool((positions.diff(dim=-1) != 1).any())
        if keywords.get("position_ids") is not micro_batch.get("position_ids"):
            packed = self._documents(on_host) is not None
            if not packed:
                return ()
        known = self._family in POSITION_ID_FAMILIES | MASKED_FAMILIES
        return (partial(disable_packed_sequence_detection, packed),) if known else ()

    def _documents(self, micro_batch: Mapping[str, Any]) -> Tensor | None:
        _, length = PadValues().get_microbatch_rows_and_length(micro_batch)
        return read_batch_attention(micro_batch, length).documents if length else None

    def _needs_mask(self, micro_batch: Mapping[str, Any]) -> bool:
        """Return True if the model gets a mask in addition to positions."""
        if self._family in MASKED_FAMILIES:
            return True
        # Padding at the end needs no mask: causal attention of real tokens does not reach it.
        return _has_padding_before_tokens(micro_batch.get("attention_mask"))

    def _mask(self, attention: AttentionPattern) -> Tensor:
        attends = attention.as_mask()
        assert attends is not None
        # The softmax of a row is undefined if all its keys are masked.
        attends = attends | torch.eye(attends.shape[-1], dtype=torch.bool, device=attends.device)
        lowest = torch.finfo(self._dtype).min
        return torch.zeros(attends.shape, dtype=self._dtype, device=attends.device).masked_fill(~attends, lowest)


def _has_padding_before_tokens(mask: Any) -> bool:
    return isinstance(mask, Tensor) and bool((mask.long().diff(dim=1) > 0).any())


def _find_document_boundaries(documents: Tensor) -> Tensor:
    """True where the next token begins a document: bool, (rows, length - 1)."""
    return documents.diff(dim=1) != 0
