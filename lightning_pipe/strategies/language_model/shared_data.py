"""Data and modules that all ranks of a pipeline must have alike.

Tested in ``tests/strategies/language_model/test_strategy.py``.
"""

from __future__ import annotations

import os
from typing import Any

import lightning.pytorch as pl
import torch
from lightning.pytorch.utilities.model_helpers import is_overridden

from lightning_pipe.engine import SetupError
from lightning_pipe.strategies.language_model.pipeline_module import PipelineModule

__all__ = ["check_module", "shuffle_alike"]


def shuffle_alike(dataloader: object, epoch: int) -> None:
    """Seed the samplers of a dataloader, so that ranks shuffle alike whatever each has drawn from its random stream.

    Args:
        dataloader: made by the user or by Lightning.
        epoch: current epoch. Loaders that are made anew in each epoch, or for another fit, would all shuffle alike.
    """
    batches = getattr(dataloader, "batch_sampler", None)
    samplers: tuple[Any, ...] = (getattr(dataloader, "sampler", None), batches, getattr(batches, "sampler", None))
    missing = object()
    for sampler in samplers:
        # Random and weighted samplers, and users' own that are made like them.
        if getattr(sampler, "generator", missing) is None:
            sampler.generator = torch.Generator().manual_seed(int(os.environ.get("PL_GLOBAL_SEED", 0)) + epoch)


def check_module(module: pl.LightningModule | None, fitting: bool) -> PipelineModule:
    """Check that a schedule can run a module.

    Args:
        module: module of the trainer.
        fitting: True if it is going to be trained.

    Raises:
        SetupError: another class than ``PipelineModule``, manual optimization, or a ``backward`` of its own.
    """
    if not isinstance(module, PipelineModule):
        raise SetupError(
            f"the module is a {type(module).__name__}; needed is a lightning_pipe.strategies.PipelineModule, which"
            " says what its stages are made of and what its summed loss is"
        )
    if not module.automatic_optimization:
        raise SetupError(
            "the module optimises by hand (automatic_optimization is False), but a schedule runs forward and"
            " backward in one. Use automatic optimisation"
        )
    if fitting and is_overridden("backward", module):
        raise SetupError(
            f"{type(module).__name__} overrides backward, which no schedule calls: gradients are there when"
            " training_step has run. Change the loss in summed_loss, or gradients in on_after_backward"
        )
    return module
