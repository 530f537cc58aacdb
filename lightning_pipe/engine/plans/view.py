"""A plan as those see it who write or draw it.

Tested in ``tests/engine/plans/test_plan_yaml.py``.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, Protocol

from lightning_pipe.engine.plans.dependencies import Dependency

__all__ = ["PlanView"]


class PlanView(Protocol):
    """What of a :class:`~lightning_pipe.engine.PipelinePlan` is written and drawn."""

    @property
    def name(self) -> str: ...

    @property
    def schedule(self) -> Mapping[str, Any]: ...

    @property
    def order(self) -> Sequence[str]: ...

    @property
    def deps(self) -> Sequence[Dependency]: ...

    @property
    def cross_iter_deps(self) -> Sequence[Dependency]: ...

    @property
    def stale(self) -> Sequence[Dependency]: ...

    @property
    def dependencies(self) -> Sequence[Dependency]: ...

    @property
    def pipeline_depth(self) -> int: ...

    @property
    def max_stage(self) -> int: ...

    @property
    def thread_groups(self) -> Sequence[str]: ...
