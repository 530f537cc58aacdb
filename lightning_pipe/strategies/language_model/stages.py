"""Stages of the modules that a trainer is given, over meshes that are made once.

Tested in ``tests/strategies/language_model/test_strategy.py``.
"""

from __future__ import annotations

from collections.abc import Callable, Generator
from contextlib import contextmanager
from datetime import timedelta

import torch
import torch.distributed as dist
from lightning.pytorch.plugins import Precision

from lightning_pipe.engine.ranks.process_groups import new_group
from lightning_pipe.llm.model.deferred import DeferredInit, deferred_init
from lightning_pipe.llm.parallel.dimensions import StageMeshes
from lightning_pipe.strategies.language_model.pipeline_module import PipelineModule
from lightning_pipe.strategies.language_model.stage_parts import PartsMaker, StageParts, StagePlan, StageSettings

__all__ = ["Stages"]


class Stages:
    """Meshes, process groups and the stages of each module; making them is collective.

    Args:
        settings: of the strategy.
        device: device of this rank.
        precision: plugin of the trainer.
        timeout: of the process groups.
        earlier: stages of an earlier set-up by the same trainer, whose modules stay split.

    Attributes:
        meshes: over all ranks.
        maker: makes the parts of a module.
        parts: of the module at work; None before the first one is split.
    """

    def __init__(
        self,
        settings: StageSettings,
        device: torch.device,
        precision: Precision,
        timeout: timedelta | None,
        earlier: Stages | None,
    ) -> None:
        self.meshes = StageMeshes(settings.sizes, device.type)
        # On the CPU, since they carry a few numbers beside the schedule; two, since both may be under way at once.
        numbers_group = new_group(backend="gloo", timeout=timeout)
        loss_group = new_group(backend="gloo", timeout=timeout)
        assert numbers_group is not None and loss_group is not None
        self.maker = PartsMaker(settings, self.meshes, device, precision, numbers_group, loss_group)
        self.parts: StageParts | None = None if earlier is None else earlier.parts
        self._known: dict[int, StageParts] = {} if earlier is None else earlier._known
        self._record: DeferredInit | None = None

    @property
    def plan(self) -> StagePlan:
        """How the module at work is cut and scheduled; before the first one, how modules are going to be."""
        return self.maker.settings.plan if self.parts is None else self.parts.plan

    @contextmanager
    def deferred(self) -> Generator[None, None, None]:
        """Context in which a model is made without memory, to be split later."""
        # Every rank draws what the first one would: one model, whoever makes which part of it.
        state = torch.get_rng_state()
        dist.broadcast(state, src=0, group=self.maker.numbers_group)
        torch.set_rng_state(state)
        with deferred_init() as self._record:
            yield

    def split(self, module: PipelineModule, plan_for: Callable[[PipelineModule], StagePlan]) -> None:
        """Split a module, unless that was done before; a trainer may be given several in turn.

        Args:
            module: module of the trainer.
            plan_for: gives the plan of a module that has not been split yet.
        """
        parts = self._known.get(id(module.model))
        if parts is None:
            self.maker.check(module)
            record, self._record = self._record, None
            parts = self.maker.make(module, plan_for(module), record)
            self._known[id(parts.split.kept)] = parts
        self.parts = parts
