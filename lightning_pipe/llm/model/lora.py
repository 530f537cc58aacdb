"""LoRA adapters that peft adds to a model.

Peft wraps the adapted layers in place, and then the model. Stages use the model inside, whose modules keep their names,
with ``base_layer`` before the names of an adapted layer's own parameters.
"""

from __future__ import annotations

import json
import sys
from collections.abc import Mapping
from dataclasses import fields
from pathlib import Path
from typing import Any

from torch import Tensor, nn

from lightning_pipe.engine.common.errors import SetupError
from lightning_pipe.llm.model.stage_module import copy_model_sharing_tensors

ADAPTER = "lightning_pipe.adapter"  # key of a checkpoint for the text of the LoraConfig
# Fields of LoraConfig that may have any value. The others change the model's inputs, other modules than the adapted
# layers, or compute initial values from base weights, which ranks read later.
_SUPPORTED = {
    *("auto_mapping", "base_model_name_or_path", "inference_mode", "peft_type", "peft_version", "revision"),
    *("task_type", "r", "lora_alpha", "lora_dropout", "lora_bias", "bias", "use_rslora", "fan_in_fan_out"),
    *("target_modules", "exclude_modules", "layers_to_transform", "layers_pattern", "rank_pattern", "alpha_pattern"),
}
_INITIAL = (True, False, "gaussian")


def add_adapters(model: nn.Module, lora: Any) -> nn.Module:
    """Freeze a model and add adapters to its layers."""
    try:
        import peft
    except ImportError as error:
        raise SetupError(
            "`lora` needs the peft package, which is not installed. Run: pip install 'lightning-pipe[lora]'"
        ) from error
    try:
        named = json.loads(lora) if isinstance(lora, str) else {"default": lora}
        ((name, settings),) = named.items()
        config = peft.LoraConfig(**settings) if isinstance(settings, Mapping) else settings
        return unwrap_peft_model(peft.get_peft_model(model, config, adapter_name=name))
    except (AttributeError, TypeError, ValueError) as error:
        raise SetupError(
            f"peft cannot add adapters to the {type(model).__name__}: {error}. Check the fields of `lora`; adapters of"
            " the embedding and of the head are not supported"
        ) from error


def unwrap_peft_model(built: Any) -> Any:
    """Return the model inside a ``PeftModel``; any other model unchanged."""
    peft = sys.modules.get("peft")
    model = built.get_base_model() if peft is not None and isinstance(built, peft.PeftModel) else built
    configs: dict[str, Any] = getattr(built, "peft_config", None) or {}
    for config in configs.values():
        _check_lora_config(config, len(configs))
    embeddings = ("get_input_embeddings", "get_output_embeddings") if configs else ()
    for name in embeddings:
        if callable(get := getattr(model, name, None)) and hasattr(get(), "base_layer"):
            raise SetupError(
                f"target_modules of the LoraConfig names the module of {name}(), which is in no layer; expected modules"
                " of layers only. Remove it from target_modules"
            )
    return model


def is_adapted(model: nn.Module | None) -> bool:
    """Return True if a model, or a stage's part of it, has adapters."""
    return bool(getattr(model, "peft_config", None))


def make_model_view_without_adapters(model: nn.Module) -> nn.Module:
    """View of a model without its adapters, under the names of the base model and with the same tensors."""
    if not is_adapted(model):
        return model
    view = copy_model_sharing_tensors(model)
    for name, module in model.named_modules():
        if hasattr(module, "base_layer"):
            view.set_submodule(name, view.get_submodule(name).base_layer)  # type: ignore[arg-type]
    return view


def serialize_lora_config(model: nn.Module | None) -> str | None:
    """The model's ``LoraConfig`` as JSON, by the name of its adapter; None for a model without adapters."""
    configs: dict[str, Any] = getattr(model, "peft_config", None) or {}
    return json.dumps({name: config.to_dict() for name, config in configs.items()}, default=sorted) if configs else None


def write_adapters(model: nn.Module, weights: Mapping[str, Tensor], target: Path) -> None:
    """Write trained adapters to a folder that ``peft.PeftModel.from_pretrained`` loads."""
    import peft
    from safetensors.torch import save_file

    ((name, config),) = model.peft_config.items()  # type: ignore[union-attr, operator]
    state = peft.get_peft_model_state_dict(model, dict(weights), adapter_name=name, save_embedding_layers=False)
    target.mkdir(parents=True, exist_ok=True)
    prefix = "base_model.model."  # of the model in a PeftModel
    save_file(
        {prefix + key: tensor.contiguous() for key, tensor in state.items()}, target / "adapter_model.safetensors"
    )
    config.inference_mode = True
    config.save_pretrained(target)


def _check_lora_config(config: Any, count: int) -> None:
    kind = getattr(config.peft_type, "value", config.peft_type)
    if kind != "LORA" or count > 1:
        raise SetupError(
            f"the model has {count} adapter(s) of peft, with the type {kind}; expected one LORA adapter, since stages"
            " support no additional inputs and no choice of adapters. Use one LoraConfig"
        )
    default = type(config)()
    for field in fields(config):
        value = getattr(config, field.name)
        if field.name in _SUPPORTED or value == getattr(default, field.name) or value in ([], {}):
            continue
        if field.name != "init_lora_weights":
            raise SetupError(
                f"the LoraConfig has {field.name}={value!r}, which is not supported in stages; expected the default"
                f" {getattr(default, field.name)!r}. Remove {field.name}"
            )
        if value not in _INITIAL:
            raise SetupError(
                f"the LoraConfig has init_lora_weights={value!r}, which needs the base weights, but each rank reads"
                f" only those of its stages, later; expected one of {_INITIAL}. Change init_lora_weights"
            )
