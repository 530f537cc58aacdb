"""What a profile found, as data and as a table."""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import asdict, dataclass, field
from typing import Any

from rich import box
from rich.console import Console, Group
from rich.table import Table
from rich.text import Text

from lightning_pipe.engine.costs import LONGEST
from lightning_pipe.engine.errors import PlanError
from lightning_pipe.engine.shown import printable, shown

__all__ = ["ProfileResult", "TaskProfile"]


@dataclass(frozen=True)
class TaskProfile:
    """One task's times, in seconds an iteration.

    Args:
        own: the task's time in its thread, all waits inside it included; median over iterations.
        exposed: by how much an iteration is shorter without the task; None where that was not, or cannot be, measured.
        low: lower end of the interval in which *exposed* lies with 95 % confidence.
        high: upper end.
        with_it: tasks that have little left to do where this one is replayed: the backward of a forward, say. What
            *exposed* says includes them.
        not_measured: why *exposed* is None.
    """

    own: float
    exposed: float | None = None
    low: float | None = None
    high: float | None = None
    with_it: tuple[str, ...] = ()
    not_measured: str = ""


@dataclass(frozen=True)
class ProfileResult:
    """A profile of a plan.

    Args:
        plan: its name.
        seconds: of an iteration; median over rounds of each round's mean.
        tasks: by name, in serial order.
        rounds: in how many rounds each was measured.
        iterations: of each round.
    """

    plan: str
    seconds: float
    tasks: Mapping[str, TaskProfile] = field(default_factory=dict)
    rounds: int = 0
    iterations: int = 0

    @property
    def exposed(self) -> dict[str, float]:
        """Seconds an iteration by which each task that was measured makes it longer; none below zero."""
        return {name: max(0.0, one.exposed) for name, one in self.tasks.items() if one.exposed is not None}

    @property
    def own(self) -> dict[str, float]:
        """Seconds that each task takes in its thread."""
        return {name: one.own for name, one in self.tasks.items()}

    def to_json(self) -> str:
        """Text that :meth:`from_json` reads back."""
        return json.dumps(asdict(self), indent=1)

    @classmethod
    def from_json(cls, text: str) -> ProfileResult:
        """What :meth:`to_json` wrote.

        Raises:
            PlanError: it is no profile.
        """
        try:
            found: dict[str, Any] = json.loads(text)
            tasks = {
                name: TaskProfile(**{**one, "with_it": tuple(one.get("with_it", ()))})
                for name, one in found.pop("tasks").items()
            }
            profile = cls(tasks=tasks, **found)
        except (ValueError, TypeError, AttributeError, KeyError, RecursionError) as error:
            said = printable(f"{type(error).__name__}: {error}"[:500])
            raise PlanError(f"this is no profile ({said}); needed is what ProfileResult.to_json() wrote") from error
        _check(profile)
        return profile

    def report(self) -> Group:
        """The table of the tasks, for a Rich console."""
        table = Table(box=box.SIMPLE, padding=(0, 1), collapse_padding=True, pad_edge=False)
        # In a narrow terminal names are broken, but no figure.
        table.add_column("task", overflow="fold")
        for column in ("own", "exposed", "95 %", "share", "hidden"):
            table.add_column(column, justify="right", no_wrap=True)
        notes = []
        for name, one in self.tasks.items():
            table.add_row(name, _ms(one.own), *self._exposed_cells(one))
            if one.with_it:
                notes.append(f"{name}: what it exposes includes {', '.join(one.with_it)}")
            if one.not_measured:
                notes.append(f"{name}: {one.not_measured}")
        title = (
            f"plan {self.plan}: {_ms(self.seconds)} ms an iteration"
            f" ({self.rounds} rounds of {self.iterations} iterations); times in ms"
        )
        notes.append("own: in its thread, waits included. exposed: what an iteration is shorter by without the task.")
        return Group(Text(title, style="bold"), table, *(Text(note, style="dim") for note in notes))

    def print_report(self) -> None:
        """Print the table."""
        # No markup: names may hold square brackets.
        Console(markup=False, highlight=False, emoji=False).print(self.report())

    def _exposed_cells(self, one: TaskProfile) -> tuple[str, ...]:
        if one.exposed is None:
            return "-", "", "", ""
        assert one.low is not None and one.high is not None
        shown = max(0.0, one.exposed)
        share = f"{100 * shown / self.seconds:.1f} %" if self.seconds else "-"
        # Of a task that takes less than what is not known of it, nothing can be said.
        known = one.own > (one.high - one.low) / 2
        hidden = f"{100 * max(0.0, 1 - shown / one.own):.0f} %" if known else "-"
        return _ms(one.exposed), f"{_ms(one.low)} .. {_ms(one.high)}", share, hidden


def _check(profile: ProfileResult) -> None:
    """Refuse values that no profile has: the text may be anybody's."""
    texts: list[tuple[str, object]] = [("plan", profile.plan)]
    numbers: list[tuple[str, object]] = [("seconds", profile.seconds)]
    numbers += [("rounds", profile.rounds), ("iterations", profile.iterations)]
    for name, one in profile.tasks.items():
        if not _is_number(one.own, 0):
            raise PlanError(
                f"the profile says that {shown(name)[1:-1]} takes {shown(one.own)} seconds; needed is a number from 0"
                f" to {LONGEST:g}"
            )
        texts += [(f"tasks: {name}", name), (f"tasks: {name}: not_measured", one.not_measured)]
        texts += [(f"tasks: {name}: with_it", other) for other in one.with_it]
        of_task = {"exposed": one.exposed, "low": one.low, "high": one.high}
        numbers += [(f"tasks: {name}: {what}", value) for what, value in of_task.items() if value is not None]
    for where, text in texts:
        if not isinstance(text, str) or not text.isprintable():
            raise PlanError(f"the profile has {printable(where)} {shown(text)}; needed is text that can be printed")
    for where, value in numbers:
        if not _is_number(value, -LONGEST):
            raise PlanError(f"the profile has {where} {shown(value)}; needed is a number up to {LONGEST:g}")


def _is_number(value: object, least: float) -> bool:
    return isinstance(value, int | float) and not isinstance(value, bool) and least <= value <= LONGEST


def _ms(seconds: float) -> str:
    return f"{1e3 * seconds:.3f}"
