"""Trial steps before training, with placeholder values of the model and a batch like those of training."""

from __future__ import annotations

import gc
import math
import time
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist
from lightning.fabric.utilities.apply_func import move_data_to_device

from lightning_pipe.engine import InputError
from lightning_pipe.engine.observe.timeline import Bar
from lightning_pipe.engine.ranks.together import gather, on_all_ranks
from lightning_pipe.llm.run.stage_parts import PartsMaker, StageParts, StagePlan
from lightning_pipe.strategies.language_model.pipeline_module import PipelineModule

# Target duration of a trial in seconds, and bounds on its number of steps.
_SECONDS = 0.5
_LEAST, _MOST = 2, 10


@dataclass(frozen=True)
class Trial:
    """Measurements of a plan, equal on every rank."""

    seconds: tuple[float, ...]
    events: tuple[Sequence[Bar], ...] = ()
    recorded: float = 0.0


class StageTrials:
    """Runs trial steps of plans. Every rank must run the same plans in the same order."""

    def __init__(self, module: PipelineModule, maker: PartsMaker, batch: Any) -> None:
        self._module = module
        self._maker = maker
        self._batch = move_data_to_device(batch, maker.device)

    def run(self, plan: StagePlan, *, record: bool = False) -> Trial:
        """Build the plan's stages, run some steps, and release the stages."""
        module, whole, maker = self._module, self._module.model, self._maker
        parts: Any = None
        try:
            parts = maker.make(module, plan, None, placeholders=True)
            kept = parts.split.kept
            failed = "the stages cannot be converted to the trainer's precision"
            on_all_ranks(lambda: module.trainer.precision_plugin.convert_module(kept), failed, maker.numbers_group)
            with module.trainer.precision_plugin.train_step_context(), torch.enable_grad():
                return self._measure(parts, record)
        except Exception as error:
            if parts is not None and error is parts.runner.failure:  # all ranks know of this failure
                raise InputError(f"{type(error).__name__}: {error}") from error
            raise
        finally:
            module.model = whole
            parts = kept = None  # release the memory before the next candidate is built
            gc.collect()

    def _measure(self, parts: StageParts, record: bool) -> Trial:
        (first,) = self._longest([self._step(parts)])  # warm-up: builds the schedule and allocates memory
        steps = min(max(math.ceil(_SECONDS / first), _LEAST), _MOST)
        seconds = self._longest([self._step(parts) for _ in range(steps)])
        if not record:
            return Trial(seconds)
        parts.runner.record_events = True
        (recorded,) = self._longest([self._step(parts)])
        noted = gather(list(parts.runner.events), self._maker.numbers_group)
        pipeline = self._maker.meshes.root.mesh.reshape(parts.plan.pipeline_size, -1)[:, 0].tolist()
        return Trial(seconds, tuple(noted[rank] for rank in pipeline), recorded)

    def _step(self, parts: StageParts) -> float:
        for parameter in parts.split.kept.parameters():
            parameter.grad = None
        prepared = parts.preparation.begin(self._batch)
        dist.barrier(group=self._maker.numbers_group)
        begin = time.perf_counter()
        parts.runs.run(self._batch, prepared)
        if self._maker.device.type != "cpu":
            torch.accelerator.synchronize(self._maker.device)
        return time.perf_counter() - begin

    def _longest(self, seconds: Sequence[float]) -> tuple[float, ...]:
        return tuple(map(max, zip(*gather(seconds, self._maker.numbers_group), strict=True)))
