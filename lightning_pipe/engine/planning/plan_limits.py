"""Limits for the search for plans."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field

from lightning_pipe.engine.common.errors import PlanError
from lightning_pipe.engine.common.options import check_whole_number
from lightning_pipe.engine.planning.costs import RESOURCES, Resource
from lightning_pipe.engine.plans.task import PipelineTask


@dataclass(frozen=True)
class PlanLimits:
    """Limits that every plan found by a search keeps.

    Args:
        max_in_flight: maximum number of batches in flight (default 3). More batches take more memory.
        on_workers: names of the tasks that may run in worker threads (default none). Leave out tasks that submit to
            process groups, call users' code or draw random numbers.
        by_caller: names of the tasks that the caller runs or surrounds with hooks (default none). These tasks keep
            stage 0, the main thread and the current stream.
        submitted_before: pairs of task names (default none). In every period the first task of a pair is submitted
            before the second, even if the two run for different iterations.
        max_workers: maximum number of worker threads (default 4).
        streams: name of the device stream for the tasks on each resource (default none: the current stream).
        allow_stale: True to also search for plans in which reads of state lag by one step, if this can reduce the
            iteration time (default False). The names of such plans contain ``stale``.

    Raises:
        PlanError: *max_in_flight* is less than 1, *max_workers* is negative, or a resource is unknown.
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
            raise PlanError(
                f"max_workers is {self.max_workers}, expected at least 0. Give the maximum number of worker threads."
            )
        for resource in self.streams:
            if resource not in RESOURCES:
                raise PlanError(
                    f"streams are given for the unknown resource {resource!r}. Use one of {', '.join(RESOURCES)}."
                )

    def check(self, tasks: Sequence[PipelineTask]) -> None:
        """Check the names of tasks against *tasks*.

        Raises:
            PlanError: a task is unknown, or is in both *by_caller* and *on_workers*.
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
                f"task {both[0]!r} is in by_caller and in on_workers, but tasks of the caller stay on the main thread."
                " Remove it from on_workers."
            )

    @staticmethod
    def _check_known(what: str, given: Iterable[str], names: Sequence[str]) -> None:
        if unknown := sorted(name for name in given if name not in names):
            raise PlanError(
                f"{what} names the unknown task {unknown[0]!r}. Remove it, or use one of {', '.join(names)}."
            )
