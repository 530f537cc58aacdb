"""Module that trains Hugging Face causal language models in stages."""

from __future__ import annotations

from collections.abc import Mapping
from contextlib import nullcontext
from difflib import get_close_matches
from pathlib import Path
from typing import Any, cast

import torch
from torch import Tensor, nn

from lightning_pipe.engine import SetupError
from lightning_pipe.environment import require_min_package_version
from lightning_pipe.llm.losses.balance_loss import BalanceLoss
from lightning_pipe.llm.losses.cross_entropy import chunked_cross_entropy
from lightning_pipe.llm.model.derived_config import returns_head_results
from lightning_pipe.llm.model.hf_weights import PretrainedWeights, pretrained_causal_lm
from lightning_pipe.llm.model.lora import add_adapters
from lightning_pipe.llm.model.meta_tensors import parameters_on_meta
from lightning_pipe.llm.parallel.attention_kernels import VARLEN, check_family_supports_attention, register_varlen
from lightning_pipe.llm.run.stage_hooks import labels_of
from lightning_pipe.strategies.language_model.pipeline_module import PipelineModule

# Families whose configs have the field but whose attention is causal in any case.
_ALWAYS_CAUSAL = ("gpt_neox", "gpt_neox_japanese")


class HFCausalLM(PipelineModule):
    """Hugging Face causal language model, trained with AdamW.

    With a config, the weights are initialized randomly. With a folder that ``save_pretrained`` wrote, training starts
    from its weights, in torch's default dtype regardless of the dtype of the files. Each rank reads only the tensors of
    its own stages.

    Batches hold ``input_ids`` and ``labels`` (rows x length; a label is the next token, see
    :func:`~lightning_pipe.llm.losses.cross_entropy.shift_labels`) and any other arguments of the model's forward. In
    training, the head and the cross-entropy process ``chunk_tokens`` tokens at a time, so the logits of a whole
    micro-batch never exist at once. Models that modify their logits after the head (such as Gemma 2), and those whose
    head is more than one linear layer (such as BERT), compute all logits.

    Args:
        config: mapping with ``model_type``, a ``PretrainedConfig``, or the path of a local folder with ``config.json``
            and safetensors.
        learning_rate: learning rate of AdamW (default 3e-4).
        weight_decay: weight decay of AdamW (default 0.1).
        attention: attention implementation of transformers, such as ``flash_attention_2``, ``flex_attention`` or
            ``eager``, or ``varlen_attn`` for PyTorch's kernel (default None: ``sdpa`` if the family supports it,
            otherwise ``eager``).
        chunk_tokens: number of tokens whose logits are computed at a time (default 1024).
        lora: a ``LoraConfig`` of peft, or a mapping of its fields, to train adapters and freeze all other parameters
            (default None: train all parameters).
        on_meta: True to build a model with a config in
            :func:`~lightning_pipe.llm.model.meta_tensors.parameters_on_meta`, so that no rank needs memory for the
            whole model (default False).
    """

    def __init__(
        self,
        config: Any,
        learning_rate: float = 3e-4,
        weight_decay: float = 0.1,
        attention: str | None = None,
        chunk_tokens: int = 1024,
        lora: Any = None,
        on_meta: bool = False,
    ) -> None:
        super().__init__()
        require_min_package_version("transformers", "5.23", "models of Hugging Face")
        self._weights = PretrainedWeights(config) if isinstance(config, (str, Path)) else None
        self.config = to_pretrained_config(config if self._weights is None else self._weights.config())
        if z_loss := getattr(self.config, "z_loss_coefficient", 0.0):
            raise SetupError(
                f"The config has z_loss_coefficient={z_loss}, for a term of the model's own loss that HFCausalLM does"
                " not compute. Set it to 0.0, or add the term in summed_loss, multiplied by the number of loss tokens."
            )
        self.max_sequence_length = getattr(self.config, "max_position_embeddings", None)
        self.learning_rate = learning_rate
        self.weight_decay = weight_decay
        self.attention = attention
        if attention == VARLEN:
            register_varlen()
        self.chunk_tokens = chunk_tokens
        self.lora = lora
        self.on_meta = on_meta

    def build_model(self) -> nn.Module:
        from transformers import AutoModelForCausalLM

        model: Any
        if self._weights is None:
            try:
                with parameters_on_meta() if self.on_meta else nullcontext():
                    model = AutoModelForCausalLM.from_config(  # type: ignore[no-untyped-call]
                        self.config, attn_implementation=self.attention
                    )
            except (ImportError, KeyError, ValueError) as error:
                fix = "Use the config of a causal language model, such as llama, qwen3 or gpt_neox."
                if self.attention is not None:
                    fix = "Leave out the argument `attention`, so that one is chosen that the family supports."
                raise SetupError(
                    f"The {self.config.model_type} model with attention={self.attention!r} cannot be built:"
                    f" {str(error).strip()}\n{fix}"
                ) from error
        else:
            model = pretrained_causal_lm(self._weights, self.config, self.attention)
        if getattr(model.config, "is_decoder", None) is False and model.config.model_type not in _ALWAYS_CAUSAL:
            raise SetupError(
                f"The config of the {model.config.model_type} model has is_decoder=False, so tokens attend to the"
                " tokens that they are trained to predict, and to padding. Set is_decoder=True."
            )
        check_family_supports_attention(model)
        BalanceLoss.from_model(model)  # raises if the family has another router loss
        head = model.get_output_embeddings()
        name = next((name for name, part in model.named_children() if part is head), None)
        if name is not None and type(head) is nn.Linear and returns_head_results(model):
            setattr(model, name, _DeferredLMHead(head, getattr(model.config, "initializer_range", None) or 0.02))
        return cast(nn.Module, model) if self.lora is None else add_adapters(model, self.lora)

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
        trained = [parameter for parameter in self.parameters() if parameter.requires_grad]
        return torch.optim.AdamW(trained, lr=self.learning_rate, weight_decay=self.weight_decay)

    def router_token_mask(self, micro_batch: Mapping[str, Any]) -> Tensor | None:
        """Return the tokens over which routers are balanced, as in :class:`PipelineModule`.

        For the model's own router loss, which ``output_router_logits`` enables, these are the tokens of the
        ``attention_mask``, or all tokens, as in transformers.
        """
        if not getattr(self.config, "output_router_logits", False):
            return super().router_token_mask(micro_batch)
        mask = micro_batch.get("attention_mask")
        return mask.bool() if isinstance(mask, Tensor) and mask.ndim == 2 else None

    def _head(self) -> _DeferredLMHead | None:
        assert self.model is not None
        return next((part for part in self.model.children() if isinstance(part, _DeferredLMHead)), None)


class _DeferredLMHead(nn.Module):
    """Head that returns the hidden states unchanged. The loss and the prediction multiply by its weight themselves."""

    def __init__(self, head: nn.Linear, std: float) -> None:
        super().__init__()
        self.weight = head.weight
        self.bias = head.bias
        self._std = std

    def reset_parameters(self) -> None:
        """Initialize as transformers does a linear layer. A head on the meta device is initialized after it is here."""
        nn.init.normal_(self.weight, std=self._std)
        if self.bias is not None:
            nn.init.zeros_(self.bias)

    def forward(self, hidden: Tensor) -> Tensor:
        return hidden


def to_pretrained_config(config: Any) -> Any:
    """Return *config* if it is a ``PretrainedConfig``, or build one from a mapping with ``model_type``."""
    try:
        from transformers import AutoConfig, PretrainedConfig
        from transformers.models.auto.configuration_auto import CONFIG_MAPPING_NAMES
    except ImportError as error:
        raise SetupError(
            "HFCausalLM needs the transformers package, which is not installed. Run: pip install 'lightning-pipe[hf]'"
        ) from error
    if isinstance(config, PretrainedConfig):
        return config
    if not isinstance(config, Mapping) or "model_type" not in config:
        raise SetupError(
            f"`config` must be a mapping with model_type, a PretrainedConfig or the path of a folder, got {config!r}."
            " Pass for example {'model_type': 'llama', 'hidden_size': 256}, or a folder that save_pretrained wrote."
        )
    try:
        return AutoConfig.for_model(**config)
    except ValueError as error:
        if config["model_type"] in CONFIG_MAPPING_NAMES:
            raise
        close = get_close_matches(str(config["model_type"]), CONFIG_MAPPING_NAMES) or sorted(CONFIG_MAPPING_NAMES)[:9]
        raise SetupError(
            f"`config` has model_type={config['model_type']!r}, which transformers does not know; expected a family"
            f" such as {', '.join(close)}. Correct the name, or install a release of transformers that has the family."
        ) from error
