"""Fits of the programs that train with Lightning: a straight run, and a run that a checkpoint divides in two."""

from __future__ import annotations

import os
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import lightning.pytorch as pl
import torch
from lightning.pytorch.accelerators import CUDAAccelerator
from torch.utils.data import DataLoader

from scripts.gpu.devices import device_of, peak_bytes, recorded_kernels, tensors

__all__ = ["PRECISIONS", "fit"]

PRECISIONS = {"bf16": "bf16-mixed", "fp16": "16-mixed"}


class SharedCUDA(CUDAAccelerator):
    """One GPU for all ranks, which Lightning refuses to share."""

    @staticmethod
    def parse_devices(devices: Any) -> list[int]:
        return list(range(int(devices)))

    @staticmethod
    def get_parallel_devices(devices: Any) -> list[torch.device]:
        return [torch.device("cuda", 0) for _ in devices]


def accelerator(kind: str, strategy: Any) -> Any:
    """Argument of the trainer, whose ranks may share a GPU."""
    if getattr(strategy, "parallel_devices", None):
        return "auto"  # with devices of the strategy, Lightning refuses an instance
    shares = torch.cuda.device_count() < int(os.environ.get("LOCAL_WORLD_SIZE", "1"))
    # By name elsewhere: with an instance, Lightning enables autocast on "cuda".
    return SharedCUDA() if kind == "cuda" and shares else kind


class Halfway(pl.Callback):
    """Saves a checkpoint after half of the batches, in the middle of the epoch."""

    def __init__(self, path: Path, step: int) -> None:
        self._path, self._step = path, step

    def on_train_batch_end(
        self, trainer: pl.Trainer, module: pl.LightningModule, outputs: Any, batch: Any, batch_idx: int
    ) -> None:
        if trainer.global_step == self._step:
            trainer.save_checkpoint(self._path)


class Kept(pl.Callback):
    """Copies the values at the end of the fit, while they are on the device."""

    def __init__(self, state: Callable[[pl.Trainer], Any]) -> None:
        self._state = state
        self.values: dict[str, torch.Tensor] = {}

    def on_train_end(self, trainer: pl.Trainer, module: pl.LightningModule) -> None:
        dense = [optimizer.state_dict()["state"] for optimizer in trainer.optimizers]
        self.values = tensors({**self._state(trainer), "state dense": dense})


def fit(
    variant: str,
    kind: str,
    folder: Path,
    make: Callable[[], pl.LightningModule],
    strategy: Callable[[], Any],
    data: Sequence[Any],
    state: Callable[[pl.Trainer], Any],
    callbacks: Sequence[pl.Callback] = (),
    **options: Any,
) -> tuple[dict[str, Any], pl.Trainer]:
    """Train a module from a fixed seed for an epoch, and return losses and values, and the last trainer.

    Args:
        variant: "resumed" to continue in a new trainer and module from a checkpoint in the middle of the epoch, a name
            in ``PRECISIONS``, or any other text for one run.
        kind: "cpu" or "cuda".
        folder: folder for checkpoints and logs, shared by all ranks.
        make: returns the module, whose list ``losses`` has the loss of each step.
        strategy: returns the strategy of a trainer.
        data: batches of the epoch.
        state: returns the values of a trainer's model.
        callbacks: callbacks of the last trainer.
        options: more arguments of each trainer.
    """
    values_callback, path, half = Kept(state), folder / "halfway.ckpt", len(data) // 2
    losses: list[Any] = []
    resumes = [False, True] if variant == "resumed" else [False]
    with recorded_kernels() as kernels, peak_bytes(device_of(kind)) as peak:
        for resume in resumes:
            saves = len(resumes) > 1 and not resume
            strategy_instance = strategy()
            trainer = pl.Trainer(
                accelerator=accelerator(kind, strategy_instance),
                devices=int(os.environ.get("LOCAL_WORLD_SIZE", "1")),
                num_nodes=int(os.environ.get("GROUP_WORLD_SIZE", "1")),
                strategy=strategy_instance,
                precision=PRECISIONS.get(variant, "32-true"),  # type: ignore[arg-type]
                max_epochs=1,
                logger=False,
                default_root_dir=folder,
                enable_checkpointing=False,
                enable_progress_bar=False,
                enable_model_summary=False,
                use_distributed_sampler=False,
                callbacks=[*callbacks, Halfway(path, half) if saves else values_callback],
                **options,
            )
            torch.manual_seed(1)
            module: Any = make()
            trainer.fit(module, DataLoader(data, batch_size=None), ckpt_path=path if resume else None)  # type: ignore[arg-type]
            losses += [torch.as_tensor(loss).float().cpu() for loss in module.losses[: half if saves else None]]
    return {"losses": torch.stack(losses), "values": values_callback.values, "peak": peak, "kernels": kernels}, trainer
