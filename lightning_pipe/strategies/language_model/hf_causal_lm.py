"""Module that trains Hugging Face causal language models in stages."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any, cast

import torch
from torch import Tensor, nn

from lightning_pipe.engine import SetupError
from lightning_pipe.environment import require_release
from lightning_pipe.llm.losses.cross_entropy import chunked_cross_entropy
from lightning_pipe.llm.model.hf_weights import PretrainedWeights, pretrained_causal_lm
from lightning_pipe.llm.run.stage_hooks import labels_of
from lightning_pipe.strategies.language_model.pipeline_module import PipelineModule

__all__ = ["HFCausalLM", "read_config"]

# Config attributes of models that modify logits before the loss. A chunked head would skip that step.
_CHANGE_LOGITS = (
    "final_logit_softcapping",  # Gemma 2 and 3
    "lm_head_multiplier",  # Falcon-H1
    "logit_scale",  # Cohere
    "logits_scaling",  # Granite
    "logits_soft_cap",  # RecurrentGemma
    "output_logit_soft_cap",  # xLSTM
)
_ROUTER_LOSSES = ("router_aux_loss_coef", "aux_loss_alpha", "router_z_loss_coef")


class HFCausalLM(PipelineModule):
    """Hugging Face causal language model, trained with AdamW.

    With a config, the weights are initialized randomly. With a folder that ``save_pretrained`` wrote, training starts
    from its weights, in torch's default dtype regardless of the dtype of the files. Each rank reads only the tensors of
    its own stages.

    Batches hold ``input_ids`` and ``labels`` (rows x length; a label is the next token, see
    :func:`~lightning_pipe.llm.losses.cross_entropy.shift_labels`) and any other arguments of the model's forward. In
    training, the head and the cross-entropy process ``chunk_tokens`` tokens at a time, so the logits of a whole
    micro-batch never exist at once. Models that modify their logits before the loss (such as Gemma 2) compute all
    logits.

    Args:
        config: mapping with ``model_type``, a ``PretrainedConfig``, or the path of a local folder with ``config.json``
            and safetensors.
        learning_rate: learning rate of AdamW (default 3e-4).
        weight_decay: weight decay of AdamW (default 0.1).
        attention: attention implementation of transformers (default ``sdpa``, which trains on all devices).
        chunk_tokens: number of tokens whose logits are computed at a time (default 1024).
    """

    def __init__(
        self,
        config: Any,
        learning_rate: float = 3e-4,
        weight_decay: float = 0.1,
        attention: str = "sdpa",
        chunk_tokens: int = 1024,
    ) -> None:
        super().__init__()
        require_release("transformers", "models of Hugging Face")
        self._weights = PretrainedWeights(config) if isinstance(config, (str, Path)) else None
        self.config = read_config(config if self._weights is None else self._weights.config())
        _refuse_router_loss(self.config)
        self.max_sequence_length = getattr(self.config, "max_position_embeddings", None)
        self.learning_rate = learning_rate
        self.weight_decay = weight_decay
        self.attention = attention
        self.chunk_tokens = chunk_tokens

    def build_model(self) -> nn.Module:
        from transformers import AutoModelForCausalLM

        model: Any
        if self._weights is None:
            model = AutoModelForCausalLM.from_config(  # type: ignore[no-untyped-call]
                self.config, attn_implementation=self.attention
            )
        else:
            model = pretrained_causal_lm(self._weights, self.config, self.attention)
        head = model.get_output_embeddings()
        name = next((name for name, part in model.named_children() if part is head), None)
        if head is None or name is None:
            raise SetupError(
                "The config must be that of a causal language model with a head for the next token next to its layers,"
                f" got model_type {self.config.model_type!r} with a {type(model).__name__}. Use a model such as llama,"
                " qwen3 or gpt_neox."
            )
        plain = not any(getattr(self.config, name, None) for name in _CHANGE_LOGITS)
        if plain:
            setattr(model, name, _ChunkedHead(head))
        return cast(nn.Module, model)

    def pretrained_weights(self) -> PretrainedWeights | None:
        return self._weights

    def summed_loss(self, output: Tensor, micro_batch: Mapping[str, Any]) -> Tensor:
        head = self._head()
        if head is None:
            return super().summed_loss(output, micro_batch)
        return chunked_cross_entropy(
            output,
            head.weight,
            labels_of(micro_batch),
            bias=head.bias,
            chunk_tokens=self.chunk_tokens,
            ignore_index=self.ignore_index,
        )

    def prediction(self, output: Tensor, micro_batch: Mapping[str, Any]) -> Tensor:
        """Return logits of shape rows x length x vocabulary."""
        head = self._head()
        return output if head is None else nn.functional.linear(output, head.weight, head.bias)

    def configure_optimizers(self) -> Any:
        return torch.optim.AdamW(self.parameters(), lr=self.learning_rate, weight_decay=self.weight_decay)

    def _call(self, arguments: tuple[Any, ...], keywords: dict[str, Any]) -> Tensor:
        assert self.model is not None
        (tokens,) = arguments
        output: Tensor = self.model(input_ids=tokens, use_cache=False, **keywords).logits
        return output

    def _head(self) -> _ChunkedHead | None:
        assert self.model is not None
        return next((part for part in self.model.children() if isinstance(part, _ChunkedHead)), None)


class _ChunkedHead(nn.Module):
    """Head that returns the hidden states unchanged. The loss and the prediction multiply by its weight themselves.

    Args:
        head: head whose parameters are used, with the same names.
    """

    def __init__(self, head: nn.Linear) -> None:
        super().__init__()
        self.weight = head.weight
        self.bias = head.bias

    def forward(self, hidden: Tensor) -> Tensor:
        return hidden


def _refuse_router_loss(config: Any) -> None:
    coefficient = next((getattr(config, name, None) for name in _ROUTER_LOSSES if getattr(config, name, None)), None)
    if getattr(config, "output_router_logits", False) and coefficient:
        raise SetupError(
            f"The config has output_router_logits=True and a coefficient of {coefficient}, for a router loss that"
            f" Hugging Face's {config.model_type} model computes over all of its layers. HFCausalLM computes only the"
            " loss of the tokens, so the routers would not be balanced. Set output_router_logits=False, and call"
            " lightning_pipe.llm.model.hf_experts.tap_routers in build_model, which adds losses to each layer's router."
        )


def read_config(given: Any) -> Any:
    """Return *given* if it is a ``PretrainedConfig``, or build one from a mapping with ``model_type``."""
    try:
        from transformers import AutoConfig, PretrainedConfig
    except ImportError as error:
        raise SetupError(
            "HFCausalLM needs the transformers package, which is not installed. Run: pip install 'lightning-pipe[hf]'"
        ) from error
    if isinstance(given, PretrainedConfig):
        return given
    if not isinstance(given, Mapping) or "model_type" not in given:
        raise SetupError(
            f"`config` must be a mapping with model_type, a PretrainedConfig or the path of a folder, got {given!r}."
            " Pass for example {'model_type': 'llama', 'hidden_size': 256}, or a folder that save_pretrained wrote."
        )
    return AutoConfig.for_model(**given)
