"""What a planner may do with a set of tasks.

Tested in ``tests/engine/planning/test_planner.py``.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field

from lightning_pipe.engine.common.errors import PlanError
from lightning_pipe.engine.common.options import check_whole_number
from lightning_pipe.engine.planning.costs import RESOURCES, Resource
from lightning_pipe.engine.plans.task import PipelineTask


@dataclass(frozen=True)
class PlanLimits:
    """The freedom that a planner has.

    Args:
        max_in_flight: the most batches in flight at once: what memory allows.
        on_workers: tasks that may leave the main thread. The others submit to process groups, call users' code or draw
            random numbers.
        by_caller: tasks that a caller with hooks of its own runs or surrounds; they keep stage 0, the main thread and
            the current stream.
        submitted_before: pairs of tasks of which, in every period, the first is to be submitted before the second,
            whatever iterations they run for.
        max_workers: the most worker threads.
        streams: name of the device stream of the tasks that work on a resource; the current one where there is none.
        allow_stale: whether reads of state that outlives an iteration may be a step behind, where that is faster. Such
            plans say so in their names.

    Raises:
        PlanError: no batch may be in flight, a negative number of workers, an unknown resource.
    """

    max_in_flight: int = 3
    on_workers: frozenset[str] = frozenset()
    by_caller: frozenset[str] = frozenset()
    submitted_before: tuple[tuple[str, str], ...] = ()
    max_workers: int = 4
    streams: Mapping[Resource, str] = field(default_factory=dict)
    allow_stale: bool = False

    def __post_init__(self) -> None:
        check_whole_number("max_in_flight", self.max_in_flight, 1, error=PlanError)
        if self.max_workers < 0:
            raise PlanError(f"max_workers is {self.max_workers}; give a number from 0")
        for resource in self.streams:
            if resource not in RESOURCES:
                raise PlanError(
                    f"streams are given for the resource {resource!r}; the resources are {', '.join(RESOURCES)}"
                )

    def check(self, tasks: Sequence[PipelineTask]) -> None:
        """Check the names of tasks.

        Raises:
            PlanError: an unknown task, or one that the caller runs and that may leave the main thread.
        """
        names = [task.name for task in tasks]
        pairs = (name for pair in self.submitted_before for name in pair)
        for what, given in (
            ("on_workers", self.on_workers),
            ("by_caller", self.by_caller),
            ("submitted_before", pairs),
        ):
            self._check_known(what, given, names)
        if both := sorted(self.on_workers & self.by_caller):
            raise PlanError(
                f"task {both[0]!r} is in by_caller and in on_workers; what the caller runs stays on the main thread:"
                " take it out of on_workers"
            )

    @staticmethod
    def _check_known(what: str, given: Iterable[str], names: Sequence[str]) -> None:
        if unknown := sorted(name for name in given if name not in names):
            raise PlanError(f"{what} names the unknown task {unknown[0]!r}; the tasks are {', '.join(names)}")
