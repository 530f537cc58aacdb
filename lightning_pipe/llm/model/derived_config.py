"""Config of a model, declared by the model itself or derived from its structure.

Tested in ``tests/llm/model/test_module_config.py``.
"""

from __future__ import annotations

from dataclasses import replace

from torch import nn

from lightning_pipe.engine.common.errors import SetupError
from lightning_pipe.llm.model.built_stages import BuiltStages
from lightning_pipe.llm.model.module_config import NEEDED, ModuleConfig, is_inside
from lightning_pipe.llm.model.stage_module import base_model, is_causal_lm, run_empty

__all__ = ["derive_config"]


def derive_config(model: nn.Module) -> ModuleConfig:
    """Config of a model, from its ``get_pp_module_config()`` or from a known structure.

    Known structures are a plain ``nn.Sequential`` and Hugging Face causal LMs (such as Llama, Qwen3 and GPT-NeoX).

    Raises:
        SetupError: the model has no ``get_pp_module_config()`` and no known structure, or its config does not match it.
    """
    if callable(own := getattr(model, "get_pp_module_config", None)):
        config = ModuleConfig.from_mapping(own())
    elif isinstance(model, nn.Sequential) and type(model).forward in (nn.Sequential.forward, BuiltStages.forward):
        config = ModuleConfig(len(model), "")
    elif is_causal_lm(model):
        config = _causal_lm_config(model)
    else:
        raise SetupError(
            f"{type(model).__name__} does not say what its stages are made of, and is neither an nn.Sequential nor a"
            f" Hugging Face causal LM. Expected: {NEEDED}"
        )
    config.check(model)
    return config


def _causal_lm_config(model: nn.Module) -> ModuleConfig:
    """Config of a Hugging Face causal LM, from its accessors and from the modules that run before and after layers."""
    names = {id(module): name for name, module in model.named_modules()}
    lists = {names[id(module)]: module for module in base_model(model).modules() if isinstance(module, nn.ModuleList)}
    outermost = {name: layers for name, layers in lists.items() if not is_inside(name, lists.keys() - {name})}
    if not outermost:
        raise SetupError(f"{type(model).__name__} has no ModuleList of layers. Expected: {NEEDED}")
    layer_prefix, layers = max(outermost.items(), key=lambda item: len(item[1]))
    before: list[str] = []
    after: list[str] = []
    everywhere: list[str] = []
    side = before
    for child in model.get_submodule(layer_prefix.rpartition(".")[0]).children():
        if child is layers:
            side = after
        elif next(child.parameters(), None) is None and next(child.buffers(), None) is not None:
            everywhere.append(names[id(child)])
        else:
            side.append(names[id(child)])
    head = model.get_output_embeddings()  # type: ignore[operator]
    if head is not None:
        after.append(names[id(head)])
    config = ModuleConfig(len(layers), layer_prefix, tuple(before), tuple(after), tuple(everywhere))
    config.check(model)
    # Registration order may differ from forward order: Phi registers the dropout of its embedding after its layers.
    called = run_empty(model, config).called
    first = called.index(config.layer(0)) if config.layer(0) in called else len(called)
    early = [name for name in called[:first] if name in after]
    late = [name for name in called[first:] if name in before]
    return replace(
        config,
        input_fqns=tuple(name for name in before if name not in late) + tuple(early),
        output_fqns=tuple(late) + tuple(name for name in after if name not in early),
    )
