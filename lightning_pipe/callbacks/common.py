"""Functions that several callbacks need: the loop and its pipeline, a process group, logged values, paths of files.

Tested in ``tests/callbacks/test_monitor.py``.
"""

from __future__ import annotations

from pathlib import Path

import lightning.pytorch as pl
import torch
import torch.distributed as dist

from lightning_pipe.engine import SetupError, SWPipeline
from lightning_pipe.engine.ranks.process_groups import new_group
from lightning_pipe.loops import PipelineTrainingEpochLoop

__all__ = [
    "checked_path",
    "group_of_its_own",
    "leave_group",
    "log_values",
    "loop_of",
    "numbered",
    "pipeline_of",
]


def loop_of(trainer: pl.Trainer) -> PipelineTrainingEpochLoop:
    """The loop that runs tasks, which the callback has seen to be there when fit began."""
    loop = trainer.fit_loop.epoch_loop
    assert isinstance(loop, PipelineTrainingEpochLoop)
    return loop


def pipeline_of(trainer: pl.Trainer, callback: pl.Callback) -> SWPipeline:
    """The pipeline at work.

    Raises:
        SetupError: there is none, since ``training_step`` fetches batches itself.
    """
    program = loop_of(trainer).program
    if program is None:
        name = type(callback).__name__
        raise SetupError(
            f"there is no pipeline for {name}, since training_step takes dataloader_iter and fetches its batches"
            f" itself; needed is training_step(batch, batch_idx), or no {name}"
        )
    return program.pipeline


def group_of_its_own() -> dist.ProcessGroup | None:
    """Of all ranks, on the CPU: others may be under way at the same time. None where there is one rank."""
    several = dist.is_initialized() and dist.get_world_size() > 1
    return new_group(backend="gloo") if several else None


def leave_group(group: dist.ProcessGroup | None) -> None:
    """End it, if the ranks are still in any."""
    if group is not None and dist.is_initialized():
        dist.destroy_process_group(group)


def log_values(trainer: pl.Trainer, values: dict[str, float]) -> None:
    """Give figures of this step to the trainer's ``callback_metrics`` and to its loggers."""
    trainer.callback_metrics.update({name: torch.tensor(value) for name, value in values.items()})
    # Not with the module's log: what that is told in one step, loggers are given again in the next ones.
    for logger in trainer.loggers:
        logger.log_metrics(values, step=trainer.fit_loop.epoch_loop._batches_that_stepped)


def checked_path(name: str, path: str | Path) -> Path:
    """A file's path as it was given.

    Raises:
        SetupError: no file can be called that.
    """
    found = Path(path)
    if not found.name or "\0" in str(path):
        raise SetupError(f"{name} is {str(path)!r}, which no file can be called; needed is a file's name, or None")
    return found


def numbered(folder: Path, path: Path, suffix: str) -> Path:
    """*path* in *folder*, with *suffix* behind its stem."""
    return folder / path.with_name(f"{path.stem}{suffix}{path.suffix}")
