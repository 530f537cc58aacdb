"""Models whose tensors have no memory: their initial values by stage, and copies that tell shapes.

A model that fits into the memory of the host is built whole on every rank. A larger one is built on the meta device,
and each rank then initializes the modules of its stages. The random numbers of a module depend on a seed and on its
name, so every split of the model starts from the same values.
"""

from __future__ import annotations

import copy
import hashlib
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.modules.module import register_module_parameter_registration_hook
from torch.utils.weak import WeakIdKeyDictionary

from lightning_pipe._compat.torch import FakeTensorMode, get_reset_parameters_method, tree_leaves
from lightning_pipe._compat.transformers import get_init_weights_method
from lightning_pipe.engine import SetupError
from lightning_pipe.llm.model.module_config import is_inside
from lightning_pipe.llm.model.stage_module import copy_tensor_attributes, replace_module_tensors


@contextmanager
def parameters_on_meta() -> Iterator[None]:
    """Build a model that is too large for the host: its parameters are on the meta device, and take no memory.

    Each rank then gives memory to the parameters of its stages, and initializes each of their modules by its
    ``reset_parameters()``, and by the model's ``_init_weights(module)``. Buffers are computed as usual.
    """
    moved = WeakIdKeyDictionary()

    def move_parameter_to_meta(module: nn.Module, name: str, parameter: nn.Parameter) -> Any:
        if parameter is None or parameter.is_meta or not parameter.is_floating_point():
            return None
        if parameter not in moved:
            moved[parameter] = copy_tensor_attributes(parameter, parameter.detach().to("meta"))
        return moved[parameter]

    handle = register_module_parameter_registration_hook(move_parameter_to_meta)
    try:
        yield
    finally:
        handle.remove()


def initialize_modules(model: nn.Module, names: Sequence[str], keep: Callable[[str], bool], seed: int) -> None:
    """Give the kept parameters of a whole model memory on the CPU, and the values of their initializers, in place.

    Each module of the named ones runs its ``reset_parameters``, and then the ``_init_weights(module)`` of the innermost
    model around it that has this method, as models of Hugging Face do. Children come before their parents.
    """
    buffers = [name for name, buffer in model.named_buffers() if buffer.is_meta]
    if buffers:
        raise SetupError(
            f"the buffers {', '.join(buffers[:3])} of the {type(model).__name__} were built on the meta device, and"
            " have no values. Build the model inside parameters_on_meta() instead of torch.device('meta')"
        )
    parameters = dict(model.named_parameters(remove_duplicate=False))
    local_names = [name for name, parameter in parameters.items() if parameter.is_meta and keep(name)]
    without_memory = {id(parameters[name]) for name in local_names}
    replace_module_tensors(
        model, lambda tensor: _make_nan_tensor_like(tensor) if id(tensor) in without_memory else tensor
    )
    first_names = {id(parameter): name for name, parameter in model.named_parameters()}
    parameters = dict(model.named_parameters(remove_duplicate=False))
    local_ids = {id(parameters[name]) for name in local_names}
    with torch.no_grad(), torch.random.fork_rng(devices=[]):
        for name in names:
            part = model.get_submodule(name)
            module_parameters = [parameter for parameter in part.parameters() if id(parameter) in local_ids]
            # A parameter that is tied to one of another module gets its value there.
            tied = [
                (parameter, parameter.clone())
                for parameter in module_parameters
                if not is_inside(first_names[id(parameter)], {name})
            ]
            for place, initialize in _iter_module_initializers(model, name) if module_parameters else ():
                torch.manual_seed(int.from_bytes(hashlib.sha256(f"{seed} {place}".encode()).digest()[:7]))
                initialize()
            for parameter, value in tied:
                parameter.copy_(value)
    unset = [name for name in local_names if parameters[name].isnan().any()]
    if unset:
        raise SetupError(
            f"{', '.join(unset[:3])} of the {type(model).__name__} were built on the meta device, and have no values:"
            " neither reset_parameters() of their module nor _init_weights() of the model sets them. Add this method,"
            " or build the model without parameters_on_meta()"
        )


def _iter_module_initializers(model: nn.Module, name: str) -> Iterator[tuple[str, Callable[[], Any]]]:
    """Initializers of a module and of the modules in it, in their order, with the names of their modules."""
    inner = [
        (f"{name}.{below}" if below else name, module) for below, module in model.get_submodule(name).named_modules()
    ]
    for place, module in reversed(inner):
        if (reset := get_reset_parameters_method(module)) is not None:
            yield place, reset
    for place, module in reversed(inner):
        path = place.split(".")
        parents = [model, *(model.get_submodule(".".join(path[:depth])) for depth in range(1, len(path)))]
        method = next(
            (
                initializer
                for parent in reversed(parents)
                if (initializer := get_init_weights_method(parent)) is not None
            ),
            None,
        )
        if method is not None:
            yield place, partial(method, module)


def _make_nan_tensor_like(tensor: Tensor) -> Tensor:
    return torch.full_like(tensor, torch.nan, device="cpu", requires_grad=False)


def fake_copy(model: nn.Module) -> tuple[nn.Module, FakeTensorMode]:
    """Return a deep copy of `model`, real or on the meta device, without memory, and the mode to run it under.

    Inputs must be created under the mode, or with its `from_tensor`. Tensors keep shape, strides, dtype, device and
    ties, but views of each other become independent tensors. Tensors on the meta device are copied as CPU tensors.
    """
    mode = FakeTensorMode()
    memo: dict[int, Any] = {}
    for module in model.modules():
        for tensor in tree_leaves(dict(vars(module))):
            if isinstance(tensor, Tensor) and id(tensor) not in memo:
                device = torch.device("cpu") if tensor.is_meta else tensor.device
                with mode:
                    bare = torch.empty_strided(tensor.size(), tensor.stride(), dtype=tensor.dtype, device=device)
                memo[id(tensor)] = copy_tensor_attributes(tensor, bare)
    return copy.deepcopy(model, memo), mode
