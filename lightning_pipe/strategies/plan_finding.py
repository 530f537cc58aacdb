"""Arguments, report and saved plan that all strategies share which find a plan themselves.

Tested in ``tests/scenarios/recommenders/test_recsys_auto.py``.
"""

from __future__ import annotations

import operator
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import yaml
from lightning.pytorch.utilities.rank_zero import rank_zero_warn
from rich.console import Group
from rich.text import Text

from lightning_pipe.engine import SetupError
from lightning_pipe.engine.common.fitted_table import FittedTable, print_report
from lightning_pipe.engine.common.options import option_group
from lightning_pipe.engine.common.whole_file import whole_file
from lightning_pipe.engine.planning.plan_choice import best_by_hand, typical
from lightning_pipe.engine.planning.plan_limits import PlanLimits
from lightning_pipe.loops.programs.auto_program import Exploration, PlanChoice

__all__ = ["AUTO", "AutoOptions", "choice_report", "tell_choice", "write_choice"]

# In the place of a plan's name.
AUTO = "auto"


@dataclass(frozen=True)
class AutoOptions:
    """How a plan is found while training, under ``plan="auto"``.

    Args:
        exploration: ``iterations``, ``rounds``, ``extra_rounds``, ``found`` and ``replan_above`` of
            :class:`~lightning_pipe.loops.programs.auto_program.Exploration`.
        max_in_flight: largest number of batches in flight, each of which takes its memory (default 3).
        save_plan: file to write the plan to that was chosen, in YAML, for ``plan`` to name later (default None).

    Raises:
        SetupError: an unknown key, or ``save_plan`` is no path.
        PlanError: a number that is too small.
    """

    exploration: Exploration | Mapping[str, Any] | None = None
    max_in_flight: int = 3
    save_plan: str | Path | None = None

    def __post_init__(self) -> None:
        option_group(Exploration, "exploration", self.exploration)
        PlanLimits(self.max_in_flight)  # says what is wrong with it
        if self.save_plan is not None and not isinstance(self.save_plan, str | Path):
            raise SetupError(f"save_plan is {self.save_plan!r}; needed is the path of a file to write, or None")

    @property
    def search(self) -> Exploration:
        """The exploration, with its defaults."""
        return option_group(Exploration, "exploration", self.exploration)

    def refuse_without_auto(self, plan: object) -> None:
        """Refuse options for finding a plan if the plan is given.

        Raises:
            SetupError: one of them is not its default.
        """
        if plan != AUTO and self != AutoOptions():
            raise SetupError(
                f"plan is {plan!r}, but exploration, max_in_flight and save_plan are for plan='auto', which looks for"
                " one; leave them out, or give plan='auto'"
            )


def choice_report(choice: PlanChoice) -> Group:
    """What was chosen, and why, for a Rich console."""
    measured = choice.measured
    rounds = max(map(len, measured.values()))
    by_hand = best_by_hand(measured, choice.hand_written)
    # Of the rounds that both were timed in: a plan that was too slow has dropped out.
    ratios = {name: typical(times) / typical(measured[by_hand][: len(times)]) for name, times in measured.items()}
    wins = {name: sum(map(operator.lt, times, measured[by_hand])) for name, times in measured.items()}
    table = FittedTable.of_figures("plan", "ms an iteration", "over rounds", "faster in", "by hand = 1")
    for name in sorted(ratios, key=lambda name: ratios[name]):
        table.add_row(
            name,
            f"{1e3 * typical(measured[name]):.2f}",
            f"{1e3 * min(measured[name]):.2f} .. {1e3 * max(measured[name]):.2f}",
            "" if name == by_hand else f"{wins[name]} of {len(measured[name])}",
            f"{ratios[name]:.3f}",
            style="bold" if name == choice.plan.name else "",
        )
    chosen = choice.plan.name
    if chosen not in choice.hand_written:
        gain = 1 - ratios[chosen]
        why = f"{gain:.1%} faster than {by_hand}, the best by hand, and faster in {wins[chosen]} of {rounds} rounds"
    elif len(ratios) > len(choice.hand_written):
        why = "no plan that was found is faster than it beyond noise"
    else:
        why = "no other plan was tried" if len(ratios) == 1 else "of those by hand; no other was tried"
    longest = sorted(choice.own, key=lambda name: -choice.own[name])[:4]
    tasks = ", ".join(f"{name} {1e3 * choice.own[name]:.2f}" for name in longest)
    ahead = [
        f"{name} {_where(where.stage, where.thread_group)}"
        for name, where in choice.plan.schedule.items()
        if where.stage or where.thread_group != "main"
    ]
    return Group(
        Text(f"plan {chosen} is the fastest: {why}", style="bold"),
        table,
        Text(f"ahead of the batch being trained: {', '.join(ahead) or 'nothing'}"),
        Text(f"one after the other the longest tasks take, in ms: {tasks}"),
    )


def _where(stage: int, group: str) -> str:
    thread = "" if group == "main" else f" in thread {group!r}"
    return f"by {stage}{thread}"


def tell_choice(choice: PlanChoice, save_plan: str | Path | None) -> None:
    """Print what was chosen, and write the plan, if that is asked for: on one rank."""
    print_report(choice_report(choice))
    if save_plan is not None:
        write_choice(choice.plan.to_yaml, save_plan, f"the plan {choice.plan.name!r}")


def write_choice(to_yaml: Callable[[], str], path: str | Path, what: str) -> None:
    """Write what was chosen, in YAML; where that fails, training goes on with a warning.

    Args:
        to_yaml: gives the text.
        path: of the file.
        what: is written, for the warning.
    """
    try:
        with whole_file(path) as unfinished:
            unfinished.write_text(to_yaml(), encoding="utf-8")
    except (OSError, ValueError, yaml.YAMLError) as error:
        rank_zero_warn(f"{what} cannot be written to {str(path)!r} ({error}); training goes on with it")
