"""Tasks of a pipeline, the context of an iteration, and names of state that outlives an iteration."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from torch import Tensor

from lightning_pipe.engine.common.errors import PlanError
from lightning_pipe.engine.plans.checked_context import CheckedTask, is_context_check_enabled


class State(str):
    """Name of state that outlives an iteration: tables, dense parameters, an optimizer, a learning rate.

    Tasks list it in ``reads`` or ``writes`` as ``State("tables")``. A plain string names a field of the
    :class:`IterContext`, which exists once per iteration. A state and a field of the same name are independent.
    """

    __slots__ = ()

    def __repr__(self) -> str:
        return f"State({str(self)!r})"


def select_iter_context_fields(names: Iterable[str]) -> frozenset[str]:
    """Select the context fields from *names*, leaving out :class:`State`."""
    return frozenset(name for name in names if not isinstance(name, State))


class IterContext:
    """Data that the tasks of one iteration share. Tasks may set any attributes.

    Args:
        batch: batch from the data iterator (default None). Tasks may replace it, for example with its device
            copy.
        iter_idx: index of the iteration, counted from 0 over the life of the pipeline (default 0).
    """

    batch: Any
    iter_idx: int

    def __init__(self, batch: Any = None, iter_idx: int = 0) -> None:
        self.batch = batch
        self.iter_idx = iter_idx

    if TYPE_CHECKING:
        # Type checkers must know that tasks may add fields; at run time object.__setattr__ is faster.
        def __setattr__(self, name: str, value: Any) -> None: ...

    def pop(self, name: str) -> Any:
        """Remove the field *name* and return its value; None if the field does not exist."""
        return self.__dict__.pop(name, None)

    def has(self, name: str) -> bool:
        """Return True if the field *name* exists."""
        return name in self.__dict__

    def __getattr__(self, name: str) -> Any:
        raise AttributeError(
            f"iteration {self.__dict__.get('iter_idx')} has no field {name!r}: the task that writes it has not run."
            f" Current fields: {sorted(self.__dict__)}"
        )

    def __repr__(self) -> str:
        return f"IterContext(iter_idx={self.iter_idx}, fields={sorted(self.__dict__)})"


class TrainingContext(IterContext):
    """Context of an iteration whose forward and backward are run through the hooks of a training loop.

    Attributes:
        training_step: function that the forward task calls, set by the loop; absent for a batch that is not trained.
        run_backward: function that the backward task calls, set by the loop.
        output: value returned by the training step.
    """

    training_step: Callable[[], Any]
    run_backward: Callable[[], None]
    output: Any


def _return_no_tensors(ctx: Any) -> Iterable[Tensor]:
    return ()


@dataclass(frozen=True)
class DeclaredIO:
    """Side effect of a task that a replay restores: outside the context, or on context fields that need special care.

    Args:
        capture: function called with the context after the captured run. Its return value is saved, with tensors
            detached and cloned.
        restore: function called in each replay with the context and a fresh copy of the saved value. It recreates the
            effect for later tasks.
        fields: context fields that *restore* sets (default none). They are not captured in any other way.
        upstream: function that returns tensors outside the context, such as parameters, for which the task's outputs
            have gradients (default: a function that returns none). It is called with the context.
    """

    capture: Callable[[Any], Any]
    restore: Callable[[Any, Any], None]
    fields: tuple[str, ...] = ()
    upstream: Callable[[Any], Iterable[Tensor]] = _return_no_tensors


class PipelineTask:
    """Schedulable unit of work. Tasks are compared and hashed by name.

    Dependencies are derived from reads and writes (see :mod:`.dependencies`), so both must be complete. With
    ``LIGHTNING_PIPE_CHECK_CONTEXTS=1`` in the environment, a task that accesses an undeclared field raises a
    :class:`PlanError` (see :mod:`.checked_context`).

    Args:
        name: name of the task, unique in its plan.
        fn: function called as ``fn(ctx)`` with the context of the iteration.
        io: side effects of ``fn`` that replays must restore (default none). Only profiling and shortcuts use them.
        reads: context fields (strings) and state (:class:`State`) that ``fn`` reads.
        writes: context fields and state that ``fn`` writes, including in-place changes.
        collectives: names of the process groups that ``fn`` submits collectives to (default none). A plan that runs
            tasks with a common group in several threads must order them (:class:`~.schedule.TaskSchedule`).
        not_replayable: reason why a run cannot be replayed, as the end of a sentence (default empty: it can be
            replayed).
        context: class of the context that ``fn`` expects (default :class:`IterContext`). A plan creates contexts of the
            most derived class of its tasks.

    Raises:
        PlanError: *reads*, *writes* or *collectives* is a single name instead of a list of names.
    """

    __slots__ = ("collectives", "context", "fn", "io", "name", "not_replayable", "reads", "writes")

    def __init__(
        self,
        name: str,
        fn: Callable[[Any], None],
        io: Iterable[DeclaredIO] = (),
        *,
        reads: Iterable[str] = (),
        writes: Iterable[str] = (),
        collectives: Iterable[str] = (),
        not_replayable: str = "",
        context: type[IterContext] = IterContext,
    ) -> None:
        for argument, names in (("reads", reads), ("writes", writes), ("collectives", collectives)):
            if isinstance(names, str):
                raise PlanError(f"task {name!r}: {argument} is the single name {names!r}; give a list, [{names!r}]")
        self.name = name
        self.io = tuple(io)
        self.not_replayable = not_replayable
        self.reads = tuple(reads)
        self.writes = tuple(writes)
        self.collectives = tuple(collectives)
        self.context = context
        self.fn = (
            CheckedTask(fn, name, select_iter_context_fields(self.reads), select_iter_context_fields(self.writes))
            if is_context_check_enabled()
            else fn
        )

    def __eq__(self, other: object) -> bool:
        return isinstance(other, PipelineTask) and self.name == other.name

    def __hash__(self) -> int:
        return hash(self.name)

    def __repr__(self) -> str:
        return f"PipelineTask({self.name!r}, reads={self.reads}, writes={self.writes})"
