"""Results of a profile: data, a summary in a few sentences, and a table."""

from __future__ import annotations

import json
import math
from collections.abc import Mapping
from dataclasses import asdict, dataclass, field
from typing import Any

from rich.console import Group
from rich.text import Text

from lightning_pipe.engine.common.errors import PlanError
from lightning_pipe.engine.common.report_table import ReportTable, print_report
from lightning_pipe.engine.common.safe_text import escape_unprintable

# Share of a task's own time. The hidden share is shown if its interval extends at most this far to each side.
_KNOWN = 0.25
# Share of an iteration. An interval within this distance of 0 shows that the exposed time is negligible.
_SMALL = 0.02
# Share of the cores' time from which on waits are assumed to be waits for a core, which no plan can hide. Two ranks on
# two cores reach 0.75: the cores also move the messages.
_BUSY = 0.7
# Share of the serial plan's time below which a predicted gain is not worth another plan.
_LITTLE = 0.03
# Difference between the simulated and the measured time of the plan in use from which on no prediction is shown.
_WRONG = 0.2
_FEWEST_ROUNDS = 3
# Share of an iteration. Exposed times with wider intervals are not named in the summary.
_WIDE = 0.5
# Smallest part of a task's own time that must overlap for the task to be called hidden.
_HIDDEN = 0.5
THIS_MACHINE = "on this machine"  # key of the predictions for the network and the storage of the profile


@dataclass(frozen=True)
class TaskProfile:
    """Times of one task, in seconds per iteration.

    Args:
        seconds: time of the task in its thread, including waits inside the task; median over iterations.
        exposed: time by which an iteration is shorter without the task; None if it was not or cannot be measured.
        low: lower end of the 95 % confidence interval of *exposed*.
        high: upper end of the interval.
        included_tasks: tasks that have little work left when this one is replayed, such as the backward of a forward.
            *exposed* includes them.
        unmeasured_reason: reason why *exposed* is None.
    """

    seconds: float
    exposed: float | None = None
    low: float | None = None
    high: float | None = None
    included_tasks: tuple[str, ...] = ()
    unmeasured_reason: str = ""

    @property
    def is_significantly_exposed(self) -> bool:
        """True if the whole interval is above 0: the task makes an iteration longer."""
        return self.low is not None and self.low > 0

    @property
    def overlapped_fraction(self) -> float | None:
        """Share of the own time that is overlapped with other work, from 0 to 1; None if unknown.

        The share is known to a quarter of the own time: the interval must be at most half the own time wide and overlap
        the range from 0 to the own time.
        """
        if self.exposed is None or self.low is None or self.high is None or not self.seconds:
            return None
        if self.high - self.low > 2 * _KNOWN * self.seconds or self.high < 0 or self.low > self.seconds:
            return None
        return min(1.0, max(0.0, 1 - self.exposed / self.seconds))


@dataclass(frozen=True)
class ProfileResult:
    """Profile of a plan.

    Args:
        plan: name of the plan.
        seconds: time of an iteration in seconds: median of the rounds' means.
        tasks: profile of each task by name, in serial order (default: none).
        rounds: number of measurements of each task (default 0).
        iterations: number of iterations per measurement (default 0).
        busy: share of the time in which the cores of this machine were busy, from 0 to 1; None (default) if it is
            unknown, or if a device computes.
        predicted: predicted seconds of an iteration for each plan, by the network and storage of the prediction
            (default: none). The key :data:`THIS_MACHINE` is for those of the profile.
    """

    plan: str
    seconds: float
    tasks: Mapping[str, TaskProfile] = field(default_factory=dict)
    rounds: int = 0
    iterations: int = 0
    busy: float | None = None
    predicted: Mapping[str, Mapping[str, float]] = field(default_factory=dict)

    @property
    def exposed(self) -> dict[str, float]:
        """Exposed time of each measured task in seconds per iteration; negative values are clipped to 0."""
        return {name: max(0.0, profile.exposed) for name, profile in self.tasks.items() if profile.exposed is not None}

    @property
    def task_seconds(self) -> dict[str, float]:
        """Time of each task in its thread, in seconds per iteration."""
        return {name: profile.seconds for name, profile in self.tasks.items()}

    @property
    def exposed_tasks(self) -> list[str]:
        """Tasks whose interval is above 0, ordered by its lower end, largest first."""
        sure = [name for name, profile in self.tasks.items() if profile.is_significantly_exposed]
        return sorted(sure, key=lambda name: -(self.tasks[name].low or 0.0))

    @property
    def noise_warning(self) -> str:
        """Warning line if the measurements of most tasks are inconclusive; otherwise empty."""
        measured = [profile for profile in self.tasks.values() if profile.exposed is not None]
        doubtful = sum(
            not profile.is_significantly_exposed and profile.overlapped_fraction is None for profile in measured
        )
        if doubtful <= len(measured) / 2:
            return ""
        return (
            f"{doubtful} of {len(measured)} intervals contain 0 and are wide: too noisy to rank these tasks; use more"
            " rounds, or a quieter machine"
        )

    def summarize(self) -> list[str]:
        """Return at most five lines: where the time goes, what a plan can hide, and what to try next."""
        longest = sorted(self.tasks, key=lambda name: -self.tasks[name].seconds)[:3]
        shares = [f"{name} {100 * self.tasks[name].seconds / self.seconds:.0f} %" for name in longest if self.seconds]
        longest_text = f"; longest of the measured tasks: {', '.join(shares)}" if shares else ""
        lines = [f"The tasks of a step take {_short_ms(self.seconds)} ms under the plan {self.plan}{longest_text}."]
        lines += [self._summarize_exposed_times(), *self._summarize_hidden_time()]
        elsewhere = [where for where in self.predicted if where != THIS_MACHINE]
        if elsewhere and (self._has_busy_cores or self._simulation_error <= _WRONG):
            plans = " / ".join(self.predicted[elsewhere[0]])
            times = [
                f"{where} {' / '.join(_short_ms(s) for s in self.predicted[where].values())} ms" for where in elsewhere
            ]
            lines.append(f"Predicted for the same step with a core for each rank, under {plans}: {'; '.join(times)}.")
        return lines

    @property
    def _has_busy_cores(self) -> bool:
        return self.busy is not None and self.busy >= _BUSY

    @property
    def _simulation_error(self) -> float:
        """Difference between the simulated and the measured time of the plan in use, relative to the latter."""
        simulated = self.predicted.get(THIS_MACHINE, {}).get(self.plan, self.seconds)
        return abs(simulated - self.seconds) / self.seconds if self.seconds else 0.0

    def _summarize_exposed_times(self) -> str:
        if not self.exposed or not self.seconds:
            return "No task was replayed, so only own times are known."
        if self.rounds < _FEWEST_ROUNDS:
            return f"Fewer than {_FEWEST_ROUNDS} rounds give no intervals, so no task is known to make a step longer."
        mentioned: list[str] = []
        names: list[str] = []
        for name in self._narrowly_exposed_tasks[:3]:
            task = self.tasks[name]
            least, most = (min(100.0, 100 * (seconds or 0.0) / self.seconds) for seconds in (task.low, task.high))
            companions = [companion for companion in task.included_tasks if companion not in mentioned]
            mentioned += [name, *companions]
            together = f" together with {' and '.join(companions)}" if companions else ""
            names.append(f"{name}{together} ({least:.0f} to {most:.0f} %)")
        hidden = [
            name
            for name, task in self.tasks.items()
            if name not in mentioned
            and task.seconds > 0.01 * self.seconds
            and task.overlapped_fraction is not None
            and (task.high or 0.0) < (1 - _HIDDEN) * task.seconds
        ]
        sentences = [f"A step would be shorter without {', '.join(names)}."] if names and not self.noise_warning else []
        if hidden:
            sentences.append(f"The plan hides {', '.join(hidden)}.")
        if self.noise_warning:
            sentences.append(self.noise_warning[:1].upper() + self.noise_warning[1:] + ".")
        elif not names:
            sentences.append("No confidence interval lies above 0: no measured task makes an iteration longer.")
        return " ".join(sentences)

    @property
    def _narrowly_exposed_tasks(self) -> list[str]:
        def is_narrow(task: TaskProfile) -> bool:
            return (task.high or 0.0) - (task.low or 0.0) <= _WIDE * self.seconds

        return [name for name in self.exposed_tasks if is_narrow(self.tasks[name])]

    def _summarize_hidden_time(self) -> list[str]:
        if self._has_busy_cores:
            return [
                f"The cores of this machine are busy for {100 * (self.busy or 0.0):.0f} % of the time: a step waits for"
                " them, which no plan can hide. A plan helps where it waits for a network, a disk, a copy or a loader."
            ]
        here = self.predicted.get(THIS_MACHINE)
        if not here or not here.get("serial"):
            return []
        serial, best = here["serial"], min(here, key=lambda plan: here[plan])
        hidden = serial - here.get(self.plan, self.seconds)
        if self._simulation_error > _WRONG:
            return [
                f"A simulation of this plan gives {_short_ms(here[self.plan])} ms a step, too far from the measured"
                " time to predict other plans: profile again on a quieter machine, or with more rounds."
            ]
        lines = [
            f"Predicted: a plan can hide {_short_ms(serial - here[best])} of the serial plan's {_short_ms(serial)} ms;"
            f" {self.plan} hides {_short_ms(max(0.0, hidden))} ms."
        ]
        if self.noise_warning or self.rounds < _FEWEST_ROUNDS:
            return lines
        if serial - here[best] - hidden > _LITTLE * serial:
            lines.append(f"Next: try the plan {best!r}.")
        elif self._narrowly_exposed_tasks:
            lines.append(f"Next: make {self._narrowly_exposed_tasks[0]} faster; no other plan hides more.")
        return lines

    def to_json(self) -> str:
        """Convert the profile to JSON; inverse of :meth:`from_json`."""
        return json.dumps(asdict(self), indent=1)

    @classmethod
    def from_json(cls, text: str) -> ProfileResult:
        """Read a profile from the output of :meth:`to_json`.

        Raises:
            PlanError: *text* is not a profile.
        """
        try:
            content: dict[str, Any] = json.loads(text)
            tasks = {name: _parse_task_profile(values) for name, values in content["tasks"].items()}
            rounds, iterations = (int(content.get(name, 0)) for name in ("rounds", "iterations"))
            busy = content.get("busy")
            return cls(
                str(content["plan"]),
                float(content["seconds"]),
                tasks,
                rounds,
                iterations,
                None if busy is None else float(busy),
                {
                    str(where): {str(plan): float(seconds) for plan, seconds in times.items()}
                    for where, times in content.get("predicted", {}).items()
                },
            )
        except (ValueError, TypeError, AttributeError, KeyError, RecursionError, OverflowError) as error:
            problem = escape_unprintable(f"{type(error).__name__}: {error}"[:500])
            raise PlanError(f"this is not a profile ({problem}); expected output of ProfileResult.to_json()") from error

    def report(self, table: bool | None = None) -> Group:
        """Summary and table of the tasks, for a Rich console.

        Args:
            table: True to include the table, False to leave it out, None (default) to include it if its intervals are
                narrow enough to rank tasks.
        """
        summary = [Text(line) for line in self.summarize()]
        if table is False or (table is None and self.noise_warning):
            return Group(*summary)
        return Group(*summary, "", self._make_table())

    def _make_table(self) -> Group:
        columns = ("task", "own", "exposed", "95 %", "share", "hidden")
        table = ReportTable.create_with_number_columns(*columns, collapse_padding=True, pad_edge=False)
        notes = []
        for name, profile in self.tasks.items():
            table.add_row(name, _ms(profile.seconds), *self._exposed_cells(profile))
            if profile.included_tasks:
                notes.append(f"{name}: exposed time includes {', '.join(profile.included_tasks)}")
            if profile.unmeasured_reason:
                notes.append(f"{name}: {profile.unmeasured_reason}")
        title = (
            f"plan {self.plan}: {_ms(self.seconds)} ms an iteration"
            f" ({self.rounds} rounds of {self.iterations} iterations); times in ms"
        )
        notes.append("own: time in its thread, with waits. exposed: time an iteration would save without the task.")
        return Group(Text(title, style="bold"), table, *(Text(note, style="dim") for note in notes))

    def print_report(self, table: bool | None = None) -> None:
        """Print the summary and the table, as in :meth:`report`."""
        print_report(self.report(table))

    def _exposed_cells(self, profile: TaskProfile) -> tuple[str, ...]:
        if profile.exposed is None:
            return "-", "", "", ""
        assert profile.low is not None and profile.high is not None
        return _ms(profile.exposed), f"{_ms(profile.low)} .. {_ms(profile.high)}", *self.format_share_cells(profile)

    def format_share_cells(self, profile: TaskProfile) -> tuple[str, str]:
        """Table cells of a task: its share of an iteration and its hidden share; "-" if unknown.

        Args:
            profile: profile of the task.
        """
        share, hidden = "-", "-"
        if profile.exposed is not None and profile.low is not None and profile.high is not None and self.seconds:
            is_small = max(-profile.low, profile.high) <= _SMALL * self.seconds
            if profile.is_significantly_exposed or is_small:
                share = f"{100 * max(0.0, profile.exposed) / self.seconds:.1f} %"
        if profile.overlapped_fraction is not None:
            hidden = f"{100 * profile.overlapped_fraction:.0f} %"
        return share, hidden


def _parse_task_profile(values: Mapping[str, Any]) -> TaskProfile:
    exposed, low, high = (
        None if values.get(name) is None else float(values[name]) for name in ("exposed", "low", "high")
    )
    times = [float(values["seconds"]), *(seconds for seconds in (exposed, low, high) if seconds is not None)]
    if len(times) not in (1, 4) or not all(map(math.isfinite, times)):
        raise ValueError("exposed, low and high must be given together, and all times must be finite")
    names = tuple(map(str, values.get("included_tasks", ())))
    return TaskProfile(float(values["seconds"]), exposed, low, high, names, str(values.get("unmeasured_reason", "")))


def _ms(seconds: float) -> str:
    return f"{1e3 * seconds:.3f}"


def _short_ms(seconds: float) -> str:
    milliseconds = 1e3 * seconds
    return f"{milliseconds:.1f}" if milliseconds >= 1 else f"{milliseconds:.3f}"
