"""Documents of packed rows, kept apart in the causal language models of Hugging Face.

A row holds several documents where ``cu_seq_lens_q/k`` say so, or ``position_ids`` that begin again. What a model makes
of it differs by family and by implementation of attention: ``flash_attention_2`` takes both, ``sdpa`` and ``eager``
ignore ``cu_seq_lens``. Most families find documents in ``position_ids`` where there is no mask. Others only heed a mask
of (rows, 1, length, length), and layers with a recurrence or a convolution mix all tokens of a row. Here each family
gets what it heeds. A family that is not known to keep documents apart is refused.

Tested in ``tests/scenarios/language_models/test_hf_documents.py``.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor, nn

from lightning_pipe.engine.common.errors import InputError
from lightning_pipe.llm.model.stage_module import is_causal_lm
from lightning_pipe.llm.parallel.context_parallel import attention_of, positions_of

__all__ = ["BY_MASK", "BY_POSITIONS", "HFDocuments"]

# By ``model_type``; tests compare each family with one run for each document (transformers 4.57).
BY_POSITIONS = frozenset(
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
BY_MASK = frozenset(
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
_DESCRIPTION = ("cu_seq_lens_q", "cu_seq_lens_k", "max_length_q", "max_length_k")


class HFDocuments:
    """What keeps documents apart in one model.

    Args:
        config: the model's.
        dtype: of its parameters.
    """

    def __init__(self, config: Any, dtype: torch.dtype) -> None:
        self._family: str = config.model_type
        self._implementation = str(getattr(config, "_attn_implementation", None) or "eager")
        window = getattr(config, "sliding_window", None)
        self._window: int | None = window if window and getattr(config, "use_sliding_window", True) else None
        self._dtype = dtype

    @staticmethod
    def of(model: nn.Module) -> HFDocuments | None:
        """For a model, or the part of it that a rank has; None where it is not one of Hugging Face's."""
        if not is_causal_lm(model) or not hasattr(model.config, "model_type"):
            return None
        kinds = (one.dtype for one in model.parameters() if one.is_floating_point())
        return HFDocuments(model.config, next(kinds, torch.get_default_dtype()))

    def check(self, micro_batch: Mapping[str, Any]) -> None:
        """See that the documents of a micro-batch, where it has several, are kept apart.

        Args:
            micro_batch: as the user gave it, with ``input_ids`` of (rows, length).

        Raises:
            InputError: the model's family is not known to do it, nor this implementation of its attention; or
                ``cu_seq_lens`` and ``position_ids`` contradict each other.
        """
        documents = self._documents(micro_batch)
        if documents is None:
            return
        fix = "give each row one document, padded (an attention_mask masks padding)"
        if self._family not in BY_POSITIONS | BY_MASK:
            raise InputError(
                "the micro-batch has several documents a row (cu_seq_lens, or position_ids that begin again), which"
                f" {self._family!r} models are not known to keep apart; {fix}, or train a model of one of the families"
                f" {', '.join(sorted(BY_POSITIONS | BY_MASK))}"
            )
        positions = micro_batch.get("position_ids")
        if isinstance(positions, Tensor) and _boundaries(documents).gt(positions.diff(dim=1) != 1).any():
            raise InputError(
                "the micro-batch's position_ids go on where cu_seq_lens begin a document; needed are positions that"
                " begin again with each document: leave position_ids out, and they are made so"
            )
        if not self._masks(micro_batch):
            return
        if self._implementation.startswith(("flash", "flex")):
            raise InputError(
                "the micro-batch has several documents a row, which the attention"
                f" {self._implementation!r} of {self._family!r} models does not keep apart; use attention='sdpa' or"
                f" 'eager', or {fix}"
            )
        longest = int(positions_of(documents).max()) + 1
        if self._window is not None and longest > self._window:
            raise InputError(
                f"the micro-batch has several documents a row, of up to {longest} tokens, and {self._family!r} models"
                f" cannot be given documents beside a sliding window of {self._window}; {fix}, or cut documents to the"
                " window"
            )

    def keywords(self, micro_batch: Mapping[str, Any], keywords: Mapping[str, Any]) -> dict[str, Any]:
        """The model's keywords for a micro-batch, by which it keeps documents apart.

        Args:
            micro_batch: padded; :meth:`check` was content with it.
            keywords: as the user's ``model_inputs`` has them.
        """
        documents = self._documents(micro_batch)
        if documents is None or self._family not in BY_POSITIONS | BY_MASK:
            return dict(keywords)
        heeds_description = self._implementation.startswith("flash")
        found = {key: value for key, value in keywords.items() if heeds_description or key not in _DESCRIPTION}
        given = micro_batch.get("position_ids")
        rows = len(micro_batch["input_ids"])
        found["position_ids"] = given if isinstance(given, Tensor) else positions_of(documents).expand(rows, -1)
        found["attention_mask"] = self._mask(micro_batch) if self._masks(micro_batch) else None
        return found

    def _documents(self, micro_batch: Mapping[str, Any]) -> Tensor | None:
        tokens = micro_batch.get("input_ids")
        if not isinstance(tokens, Tensor) or tokens.ndim != 2:
            return None
        return attention_of(micro_batch, tokens.shape[1]).documents

    def _masks(self, micro_batch: Mapping[str, Any]) -> bool:
        """Whether the model is given a mask, and not positions alone."""
        if self._family in BY_MASK:
            return True
        mask = micro_batch.get("attention_mask")
        # What only pads the end is before no token that counts.
        return isinstance(mask, Tensor) and bool((mask.diff(dim=1) > 0).any())

    def _mask(self, micro_batch: Mapping[str, Any]) -> Tensor:
        tokens = micro_batch["input_ids"]
        attends = attention_of(micro_batch, tokens.shape[1]).as_mask()
        assert attends is not None
        # A row of nothing but masked keys has no softmax.
        attends = attends | torch.eye(tokens.shape[1], dtype=torch.bool, device=attends.device)
        lowest = torch.finfo(self._dtype).min
        return torch.zeros(attends.shape, dtype=self._dtype, device=attends.device).masked_fill(~attends, lowest)


def _boundaries(documents: Tensor) -> Tensor:
    """(rows, length - 1): whether the next token begins a document."""
    return documents.diff(dim=1) != 0
