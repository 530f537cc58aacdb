"""Lightning's ``WeightAveraging`` for tensors that are not those of the copied module, such as shards of a table.

The callback copies the LightningModule before the strategy sets it up, and then pairs the copy's parameters and buffers
with the module's by their order. Here it gets the tensors to average from the strategy, after set-up.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from typing import Any

import lightning.pytorch as pl
import torch
from lightning.pytorch.callbacks import WeightAveraging
from torch import Tensor, nn
from torch.optim.swa_utils import AveragedModel

NamedTensors = Callable[[], Mapping[Any, Tensor]]


class TrainedTensors:
    """Tensors to average by name, looked up at each use, because a step may replace a buffer by another tensor.

    Args:
        parameters: function that returns the tensors that count as parameters.
        buffers: function that returns those that count as buffers.
        prepare: function that is called with the buffers of the average before these are read or copied.
    """

    def __init__(
        self, parameters: NamedTensors, buffers: NamedTensors, prepare: Callable[[list[Tensor]], None]
    ) -> None:
        self.named_parameters, self.named_buffers, self.prepare = parameters, buffers, prepare

    def parameters(self) -> Iterator[Tensor]:
        """Iterate over the parameters, as ``nn.Module.parameters`` does."""
        return iter(self.named_parameters().values())

    def buffers(self) -> Iterator[Tensor]:
        """Iterate over the buffers, as ``nn.Module.buffers`` does."""
        return iter(self.named_buffers().values())

    def __deepcopy__(self, memo: Any) -> nn.Module:
        copied = nn.Module()
        copied.tensors = nn.ParameterList(
            nn.Parameter(tensor.detach().clone(), requires_grad=False) for tensor in self.parameters()
        )
        for index, buffer in enumerate(self.buffers()):
            copied.register_buffer(str(index), buffer.detach().clone())
        return copied


class _AveragedTensors(AveragedModel):
    """Average of tensors instead of a module's."""

    def __init__(self, tensors: TrainedTensors, **arguments: Any) -> None:
        super().__init__(tensors, **arguments)  # type: ignore[arg-type]  # it is only copied
        self.trained = tensors

    def update_parameters(self, model: nn.Module) -> None:
        super().update_parameters(self.trained)  # type: ignore[arg-type]


class _TensorAveraging(WeightAveraging):
    """Methods that replace those of a ``WeightAveraging`` callback."""

    _average_model: _AveragedTensors | None
    strategy: Any  # the strategy that calls start_averaging
    swapped = False  # True while the trained tensors have the averaged values

    def setup(self, trainer: pl.Trainer, pl_module: pl.LightningModule, stage: str) -> None:
        """Do nothing, unless the callback has moved to a trainer with another strategy."""
        if trainer.strategy is not self.strategy:
            self._average_model = None
            self.__class__ = type(self).__mro__[2]
            self.setup(trainer, pl_module, stage)

    def _swap_models(self, pl_module: pl.LightningModule) -> None:
        super()._swap_models(self._prepare_tensors())
        self.swapped = not self.swapped

    def _copy_average_to_current(self, pl_module: pl.LightningModule) -> None:
        super()._copy_average_to_current(self._prepare_tensors())

    def _prepare_tensors(self) -> Any:
        assert self._average_model is not None
        tensors = self._average_model.trained
        tensors.prepare(list(self._average_model.module.buffers()))
        return tensors

    def on_save_checkpoint(
        self, trainer: pl.Trainer, pl_module: pl.LightningModule, checkpoint: dict[str, Any]
    ) -> None:
        """Add the number of averaged steps. The strategy adds the averages."""
        if self._average_model is None:
            super().on_save_checkpoint(trainer, pl_module, checkpoint)
        else:
            self._prepare_tensors()
            checkpoint["averaging_state"] = {"n_averaged": self._average_model.n_averaged}

    def on_load_checkpoint(
        self, trainer: pl.Trainer, pl_module: pl.LightningModule, checkpoint: dict[str, Any]
    ) -> None:
        """Do nothing if there are averages: the strategy has read them."""
        if self._average_model is None:
            super().on_load_checkpoint(trainer, pl_module, checkpoint)


def replace_averaging_methods(callback: WeightAveraging, strategy: Any) -> None:
    """Let a callback average the tensors of :func:`start_averaging`. Called before its ``setup``."""
    kind = type(callback)
    if not isinstance(callback, _TensorAveraging):
        names = {"__qualname__": kind.__qualname__, "__module__": kind.__module__}  # its key in checkpoints
        callback.__class__ = type(kind.__name__, (_TensorAveraging, kind), names)
    callback.strategy = strategy  # type: ignore[attr-defined]


def start_averaging(callback: WeightAveraging, tensors: TrainedTensors, device: torch.device) -> None:
    """Create the average, which begins with the current values."""
    callback.swapped = False  # type: ignore[attr-defined]
    callback._average_model = _AveragedTensors(
        tensors, device=callback._device or device, use_buffers=callback._use_buffers, **callback._kwargs
    )


def discard_averages(callback: WeightAveraging) -> None:
    """Release the averages, which are those of another module."""
    callback._average_model = None


def get_averages(callback: WeightAveraging) -> tuple[dict[Any, Tensor], dict[Any, Tensor]]:
    """Averaged and trained values by name, whichever of the two the module has at present."""
    average: Any = callback._average_model
    tensors: TrainedTensors = average.trained
    trained = {**tensors.named_parameters(), **tensors.named_buffers()}
    values = (value.detach() for value in (*average.module.parameters(), *average.module.buffers()))
    averaged = dict(zip(trained, values, strict=True))
    return (trained, averaged) if callback.swapped else (averaged, trained)  # type: ignore[attr-defined]


def set_number_of_averaged_steps(callback: WeightAveraging, state: Any) -> None:
    """Set the number of averaged steps from a checkpoint's ``averaging_state``."""
    average: Any = callback._average_model
    average.n_averaged.copy_(state["n_averaged"])
