"""Steps run for real, before training and without it: of stand-ins of a model's values, on a batch like training's.

Tested in ``tests/strategies/language_model/test_auto.py``.
"""

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
from lightning_pipe.strategies.language_model.pipeline_module import PipelineModule
from lightning_pipe.strategies.language_model.stage_parts import PartsMaker, StageParts, StagePlan

__all__ = ["StageTrials", "Trial"]

# A trial takes this long, in so many steps.
_SECONDS = 0.5
_LEAST, _MOST = 2, 10


@dataclass(frozen=True)
class Trial:
    """What came of a plan; the same on every rank.

    Attributes:
        seconds: of each step, of the rank that took longest: forwards, backwards, and what ranks tell each other of
            losses; without optimisers, and without what is done ahead of a step.
        events: what the ranks of the first pipeline noted in one more step, in their order.
        recorded: seconds of that step.
    """

    seconds: tuple[float, ...]
    events: tuple[Sequence[Bar], ...] = ()
    recorded: float = 0.0


class StageTrials:
    """Runs plans; every rank runs the same ones in the same order.

    Args:
        module: whose model is whole; it has it again after each trial. Its hooks are called.
        maker: of parts.
        batch: of training, on the CPU.
    """

    def __init__(self, module: PipelineModule, maker: PartsMaker, batch: Any) -> None:
        self._module = module
        self._maker = maker
        self._batch = move_data_to_device(batch, maker.device)

    def run(self, plan: StagePlan, *, record: bool = False) -> Trial:
        """Build the plan's stages, run some steps of them, and let go of them again.

        Raises:
            PipelineError: on every rank: the model cannot be cut so, a rank's memory is full, or a forward fails.
            Exception: on this rank alone, whatever else fails; the others wait for it in the middle of a step.
        """
        module, whole, maker = self._module, self._module.model, self._maker
        parts: Any = None
        try:
            parts = maker.make(module, plan, None, stand_ins=True)
            kept = parts.split.kept
            failed = "the stages cannot be converted to the trainer's precision"
            on_all_ranks(lambda: maker.precision.convert_module(kept), failed, maker.numbers_group)
            with maker.precision.train_step_context(), torch.enable_grad():
                return self._measure(parts, record)
        except Exception as error:
            if parts is not None and error is parts.runner.failure:  # of which all ranks have been told
                raise InputError(f"{type(error).__name__}: {error}") from error
            raise
        finally:
            module.model = whole
            parts = kept = None  # what is let go of now is not there beside the next one
            gc.collect()

    def _measure(self, parts: StageParts, record: bool) -> Trial:
        (first,) = self._longest([self._step(parts)])  # makes the schedule, and touches memory
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
