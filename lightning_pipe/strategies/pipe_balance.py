"""Number of layers of each partition of a pipe, from measurements before training."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, Literal, NoReturn

import lightning.pytorch as pl
import torch
from lightning.fabric.utilities.apply_func import move_data_to_device
from lightning.pytorch.utilities.model_helpers import is_overridden
from torch import nn

from lightning_pipe.engine import SetupError
from lightning_pipe.pipe.balance import balance_by_memory, balance_by_time

Measure = Literal["time", "memory"]


def measured_balance(
    by: Measure,
    module: pl.LightningModule,
    layers: nn.Sequential,
    partitions: int,
    stored_chunks: int,
    device: torch.device,
) -> list[int]:
    """Balance partitions by the measured time or memory of each layer in training."""
    sample = _capture_first_layer_input(layers, module, by, device)
    if by == "time":
        return balance_by_time(layers, partitions, sample, device=device)
    return balance_by_memory(layers, partitions, sample, chunks=stored_chunks, device=device)


def _capture_first_layer_input(layers: nn.Sequential, module: pl.LightningModule, by: str, device: torch.device) -> Any:
    """Return the input of the first layer when the module's forward runs on its example."""
    example = move_data_to_device(module.example_input_array, device)
    if example is None:
        raise SetupError(
            f"balance is {by!r}, which measures layers, but {type(module).__name__} has no example_input_array. Set it"
            " to an input with about as many rows as a micro-batch, or set balance to a list of numbers of layers"
        )
    if not is_overridden("forward", module):
        return _only(example if isinstance(example, tuple) else (example,), by)

    def stop_forward_with_inputs(layer: nn.Module, inputs: tuple[Any, ...]) -> NoReturn:
        raise _InputsCaptured(inputs)

    handle = layers.register_forward_pre_hook(stop_forward_with_inputs)
    try:
        # Code before the layers may draw random numbers, which must not advance the user's generator.
        with torch.random.fork_rng(devices=[]), torch.no_grad():
            if isinstance(example, Mapping):
                module(**example)
            else:
                module(*example if isinstance(example, tuple) else (example,))
    except _InputsCaptured as caught:
        return _only(caught.inputs, by)
    finally:
        handle.remove()
    raise SetupError(
        f"balance is {by!r}, which measures layers, but forward of {type(module).__name__} does not call them on"
        " example_input_array. Set balance to a list of numbers of layers"
    )


class _InputsCaptured(Exception):
    """Ends a forward at the first layer, with its inputs."""

    def __init__(self, inputs: tuple[Any, ...]) -> None:
        super().__init__()
        self.inputs = inputs


def _only(inputs: Any, by: str) -> Any:
    if isinstance(inputs, tuple) and len(inputs) == 1:
        return inputs[0]
    received = f"{len(inputs)} inputs" if isinstance(inputs, tuple) else f"a {type(inputs).__name__} of inputs"
    raise SetupError(
        f"balance is {by!r}, which measures layers one by one, but the first takes {received}; expected one input. Set"
        " balance to a list of numbers of layers"
    )
