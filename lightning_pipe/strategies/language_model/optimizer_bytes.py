"""Bytes of the optimizer states for a model's parameters, computed before the states and parameters exist."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from typing import Any, cast

import torch
from torch import Tensor, nn
from torch.optim import Optimizer

from lightning_pipe._compat.lightning import optimizers_configured
from lightning_pipe.llm.measure.layer_bench import ModelPieceResults
from lightning_pipe.llm.model.module_config import PPModuleConfig
from lightning_pipe.llm.model.stage_module import copy_model_sharing_tensors, copy_tensor_attributes
from lightning_pipe.strategies.language_model.pipeline_module import PipelineModule

_SMALL = 2  # elements in each dimension


def compute_optimizer_bytes_per_piece(module: PipelineModule, config: PPModuleConfig) -> ModelPieceResults[int]:
    """Return the bytes of the states that the module's optimizers keep for each piece of its model.

    ``configure_optimizers`` is called with small parameters instead of the model's, and its optimizers run one step on
    them. Each dimension of a state that equals the dimension of its small parameter is then assumed to have the size of
    the original parameter.
    """
    model = module.model
    assert model is not None
    small = copy_model_sharing_tensors(model)
    large = _replace_parameters_by_small_ones(small)
    module.model = small
    try:
        configured: Any = module.configure_optimizers()
    finally:
        module.model = model
    optimizers: Sequence[Optimizer] = optimizers_configured(configured)[0] if configured is not None else []
    for param in small.parameters():
        param.grad = torch.zeros_like(param) if param.requires_grad else None
    sizes: dict[int, int] = {}
    for optimizer in optimizers:
        optimizer.step()
        for parameter, state in optimizer.state.items():
            tensors = [value for value in state.values() if isinstance(value, Tensor)]
            shape = large.get(id(parameter), parameter.shape)
            sizes[id(parameter)] = sum(_extrapolate_state_bytes(tensor, parameter, shape) for tensor in tensors)
    names = {name: sizes.get(id(tensor), 0) for name, tensor in small.named_parameters(remove_duplicate=False)}
    return sum_by_model_piece(names, config)


def sum_by_model_piece(sizes: Mapping[str, int], config: PPModuleConfig) -> ModelPieceResults[int]:
    """Sum numbers given by parameter name over each piece of a model."""

    def bytes_under(modules: Sequence[str]) -> int:
        return sum(size for name, size in sizes.items() if name.startswith(tuple(f"{fqn}." for fqn in modules)))

    return ModelPieceResults(
        0,
        bytes_under(config.input_fqns),
        tuple(bytes_under([name]) for name in config.layer_fqns),
        bytes_under(config.output_fqns),
    )


def _replace_parameters_by_small_ones(model: nn.Module) -> dict[int, torch.Size]:
    """Replace a model's parameters by small ones, in place, and return the original shapes by the new ones' ids."""
    replacements: dict[int, Tensor] = {}
    shapes: dict[int, torch.Size] = {}
    for part in model.modules():
        for name, parameter in part._parameters.items():
            if parameter is not None:
                if id(parameter) not in replacements:
                    bare = torch.zeros([min(size, _SMALL) for size in parameter.shape], dtype=parameter.dtype)
                    replacements[id(parameter)] = copy_tensor_attributes(parameter, bare)
                    shapes[id(replacements[id(parameter)])] = parameter.shape
                part._parameters[name] = cast(nn.Parameter, replacements[id(parameter)])
    return shapes


def _extrapolate_state_bytes(state: Tensor, small: Tensor, shape: torch.Size) -> int:
    """Return the bytes of a state for a parameter of the given shape."""
    sizes = shape if state.shape == small.shape else _extrapolate_optimizer_state_shape(state.shape, small.shape, shape)
    return math.prod(sizes) * state.element_size()


def _extrapolate_optimizer_state_shape(state: torch.Size, small: torch.Size, shape: torch.Size) -> list[int]:
    if len(state) != len(small):
        return list(state)
    return [
        large_size if state_size == small_size else state_size
        for state_size, small_size, large_size in zip(state, small, shape, strict=True)
    ]
