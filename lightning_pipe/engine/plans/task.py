"""What to compute: tasks, the context they share, and the state that outlives an iteration."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from torch import Tensor

from lightning_pipe.engine.common.errors import PlanError
from lightning_pipe.engine.plans.checked_context import CheckedTask, checks_contexts


class State(str):
    """Name of something that outlives an iteration: tables, dense parameters, an optimiser, a learning rate.

    A task that reads or writes it says ``State("tables")``; a plain string names a field of the
    :class:`IterContext`, which each iteration has for itself. The two never conflict, even where spelled alike.
    """

    __slots__ = ()

    def __repr__(self) -> str:
        return f"State({str(self)!r})"


def fields(names: Iterable[str]) -> frozenset[str]:
    """Those of *names* that are context fields."""
    return frozenset(name for name in names if not isinstance(name, State))


class IterContext:
    """What one iteration's tasks hand to each other; they put whatever attributes they need on it.

    Args:
        batch: the batch as the data iterator gave it; tasks may replace it (by its copy on the device, say).
        iter_idx: index of the iteration, counted from 0 over the life of the pipeline.
    """

    batch: Any
    iter_idx: int

    def __init__(self, batch: Any = None, iter_idx: int = 0) -> None:
        self.batch = batch
        self.iter_idx = iter_idx

    if TYPE_CHECKING:
        # Tasks add fields freely, which a type checker must be told; at run time the plain way is the fast one.
        def __setattr__(self, name: str, value: Any) -> None: ...

    def take(self, name: str) -> Any:
        """Remove a field and return it; None if it is not there."""
        return self.__dict__.pop(name, None)

    def has(self, name: str) -> bool:
        """Whether a field is there."""
        return name in self.__dict__

    def __getattr__(self, name: str) -> Any:
        raise AttributeError(
            f"iteration {self.__dict__.get('iter_idx')} has no field {name!r}: the task that writes it has not run;"
            f" fields now: {sorted(self.__dict__)}"
        )

    def __repr__(self) -> str:
        return f"IterContext(iter_idx={self.iter_idx}, fields={sorted(self.__dict__)})"


class TrainingContext(IterContext):
    """Of iterations that a training loop cuts at its hooks.

    Attributes:
        training_step: what the forward task calls, set by the loop; absent for a batch that is not trained.
        run_backward: what the backward task calls, set by the loop.
        output: what the training step returned.
    """

    training_step: Callable[[], Any]
    run_backward: Callable[[], None]
    output: Any


def _nothing(ctx: Any) -> Iterable[Tensor]:
    return ()


@dataclass(frozen=True)
class DeclaredIO:
    """An effect of a task outside its context, or inside in a way of its own, which a replay of the task restores.

    Args:
        capture: called after a run that is captured; what it returns is kept, tensors detached and cloned.
        restore: called in a replay with what was kept, anew; gives what comes later what it would have found.
        fields: of the context that *restore* sets, and that are not captured otherwise.
        upstream: tensors outside the context that the task's outputs have gradients for, such as parameters.
    """

    capture: Callable[[Any], Any]
    restore: Callable[[Any, Any], None]
    fields: tuple[str, ...] = ()
    upstream: Callable[[Any], Iterable[Tensor]] = _nothing


class PipelineTask:
    """A schedulable unit of work. Equal and hashed by name.

    Args:
        name: unique in its plan.
        fn: called as ``fn(ctx)`` with the context of the iteration it runs for.
        io: effects of ``fn`` outside the context, as far as replays must restore them.
        reads: context fields (strings) and outliving state (:class:`State`) that ``fn`` reads.
        writes: the same for what ``fn`` writes, in-place changes included.
        not_replayable: why a run cannot be replayed, as the end of a sentence; empty where it can.
        context: class of the contexts that ``fn`` takes; a plan makes them of the most derived class of its tasks.

    From reads and writes follow the dependencies that correctness needs (see :mod:`.dependencies`), so they must be
    complete. With ``LIGHTNING_PIPE_CHECK_CONTEXTS=1`` in the environment, a task that touches a field that it does not
    declare raises a :class:`PlanError` (see :mod:`.checked_context`).

    Raises:
        PlanError: reads or writes is one name where a list of names is needed.
    """

    __slots__ = ("context", "fn", "io", "name", "not_replayable", "reads", "writes")

    def __init__(
        self,
        name: str,
        fn: Callable[[Any], None],
        io: Iterable[DeclaredIO] = (),
        *,
        reads: Iterable[str] = (),
        writes: Iterable[str] = (),
        not_replayable: str = "",
        context: type[IterContext] = IterContext,
    ) -> None:
        for what, names in (("reads", reads), ("writes", writes)):
            if isinstance(names, str):
                raise PlanError(f"task {name!r}: {what} is the single name {names!r}; give a list, [{names!r}]")
        self.name = name
        self.io = tuple(io)
        self.not_replayable = not_replayable
        self.reads = tuple(reads)
        self.writes = tuple(writes)
        self.context = context
        self.fn = CheckedTask(fn, name, fields(self.reads), fields(self.writes)) if checks_contexts() else fn

    def __eq__(self, other: object) -> bool:
        return isinstance(other, PipelineTask) and self.name == other.name

    def __hash__(self) -> int:
        return hash(self.name)

    def __repr__(self) -> str:
        return f"PipelineTask({self.name!r}, reads={self.reads}, writes={self.writes})"
