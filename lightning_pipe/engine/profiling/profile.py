"""What a profile found, as data and as a table.

Tested in ``tests/callbacks/test_profiler.py``.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import asdict, dataclass, field
from typing import Any

from rich.console import Group
from rich.text import Text

from lightning_pipe.engine.common.errors import PlanError
from lightning_pipe.engine.common.fitted_table import FittedTable, print_report
from lightning_pipe.engine.common.safe_text import printable, shown
from lightning_pipe.engine.planning.costs import LONGEST

__all__ = ["ProfileResult", "TaskProfile"]


# Of a task's own time: what is hidden of it is said where it is known this closely.
_KNOWN = 0.25
# Of an iteration: an interval around 0 that is as narrow says that a task costs next to nothing.
_SMALL = 0.02


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

    @property
    def is_told_from_zero(self) -> bool:
        """Whether the interval leaves no doubt that the task makes an iteration longer."""
        return self.low is not None and self.low > 0

    @property
    def hidden(self) -> float | None:
        """The share of its own time that other work hides, from 0 to 1; None where that is not known.

        It is known to a quarter of the own time, where the interval is as narrow as that and has a part between
        nothing and all of it.
        """
        if self.exposed is None or self.low is None or self.high is None or not self.own:
            return None
        if self.high - self.low > 2 * _KNOWN * self.own or self.high < 0 or self.low > self.own:
            return None
        return min(1.0, max(0.0, 1 - self.exposed / self.own))


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

    @property
    def ranked(self) -> list[str]:
        """Tasks that make an iteration longer beyond doubt, by the least that they do: the interval's lower end."""
        sure = [name for name, one in self.tasks.items() if one.is_told_from_zero]
        return sorted(sure, key=lambda name: -(self.tasks[name].low or 0.0))

    @property
    def in_noise(self) -> str:
        """A line that says of how many tasks nothing can be said, where it is most of them; else empty."""
        measured = [one for one in self.tasks.values() if one.exposed is not None]
        doubtful = sum(not one.is_told_from_zero and one.hidden is None for one in measured)
        if doubtful <= len(measured) / 2:
            return ""
        return (
            f"{doubtful} of {len(measured)} intervals contain 0 and are wide: too noisy to rank these tasks; profile in"
            " more rounds, or on a quieter machine"
        )

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
        columns = ("task", "own", "exposed", "95 %", "share", "hidden")
        table = FittedTable.of_figures(*columns, collapse_padding=True, pad_edge=False)
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
        if self.in_noise:
            notes.append(self.in_noise)
        notes.append("own: in its thread, waits included. exposed: what an iteration is shorter by without the task.")
        return Group(Text(title, style="bold"), table, *(Text(note, style="dim") for note in notes))

    def print_report(self) -> None:
        """Print the table."""
        print_report(self.report())

    def _exposed_cells(self, one: TaskProfile) -> tuple[str, ...]:
        if one.exposed is None:
            return "-", "", "", ""
        assert one.low is not None and one.high is not None
        return _ms(one.exposed), f"{_ms(one.low)} .. {_ms(one.high)}", *self.cells(one)

    def cells(self, one: TaskProfile) -> tuple[str, str]:
        """Its share of an iteration, and how much of it is hidden; "-" for what is not known."""
        share, hidden = "-", "-"
        if one.exposed is not None and one.low is not None and one.high is not None and self.seconds:
            is_small = max(-one.low, one.high) <= _SMALL * self.seconds
            if one.is_told_from_zero or is_small:
                share = f"{100 * max(0.0, one.exposed) / self.seconds:.1f} %"
        if one.hidden is not None:
            hidden = f"{100 * one.hidden:.0f} %"
        return share, hidden


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
