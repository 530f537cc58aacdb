"""Options, report and saved plan of strategies with ``plan="auto"``."""

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

from lightning_pipe.engine import PlanError, SetupError
from lightning_pipe.engine.common.atomic_file import atomic_write
from lightning_pipe.engine.common.options import check_whole_number, parse_option_group
from lightning_pipe.engine.common.report_table import ReportTable, print_report
from lightning_pipe.engine.planning.plan_choice import find_best_hand_written_plan, interquartile_mean
from lightning_pipe.loops.programs.auto_program import PlanChoice, PlanSearchOptions

# Value of the argument ``plan`` that requests a search during training.
AUTO = "auto"


@dataclass(frozen=True)
class AutoOptions:
    """Options of the search for a plan during training, under ``plan="auto"``.

    Args:
        exploration: size of the search: ``iterations``, ``rounds``, ``extra_rounds``, ``max_generated`` and
            ``replan_above`` of :class:`~lightning_pipe.loops.programs.auto_program.PlanSearchOptions` (default None:
            its defaults).
        max_in_flight: maximum number of batches in flight (default 3). Each costs the memory of a batch on the device.
        save_plan: path of a YAML file for the chosen plan, for use as ``plan`` in later runs (default None: not
            written).

    Raises:
        SetupError: *exploration* has an unknown key, or *save_plan* is not a path.
        PlanError: a number is too small.
    """

    exploration: PlanSearchOptions | Mapping[str, Any] | None = None
    max_in_flight: int = 3
    save_plan: str | Path | None = None

    def __post_init__(self) -> None:
        parse_option_group(PlanSearchOptions, "exploration", self.exploration)
        check_whole_number("max_in_flight", self.max_in_flight, 1, error=PlanError)
        if self.save_plan is not None and not isinstance(self.save_plan, str | Path):
            raise SetupError(f"save_plan is {self.save_plan!r}; expected the path of a file to write, or None")

    @property
    def search_options(self) -> PlanSearchOptions:
        """Size of the search, with default values filled in."""
        return parse_option_group(PlanSearchOptions, "exploration", self.exploration)

    def refuse_without_auto(self, plan: object) -> None:
        """Refuse options of the search if the plan is given."""
        if plan != AUTO and self != AutoOptions():
            raise SetupError(
                f"plan is {plan!r}, but exploration, max_in_flight and save_plan are for plan='auto', which searches"
                " for a plan. Remove them, or set plan='auto'"
            )


def choice_report(choice: PlanChoice) -> Group:
    """Report of the chosen plan and the measurements, for a Rich console."""
    measured = choice.measured
    rounds = max(map(len, measured.values()))
    by_hand = find_best_hand_written_plan(measured, choice.hand_written)
    # Over the rounds in which both were timed, since plans that were too slow have fewer rounds.
    ratios = {
        name: interquartile_mean(times) / interquartile_mean(measured[by_hand][: len(times)])
        for name, times in measured.items()
    }
    wins = {name: sum(map(operator.lt, times, measured[by_hand])) for name, times in measured.items()}
    table = ReportTable.create_with_number_columns(
        "plan", "ms per iteration", "min .. max", f"rounds faster than {by_hand}", "ratio in the same rounds"
    )
    for name in sorted(ratios, key=lambda name: ratios[name]):
        table.add_row(
            name,
            f"{1e3 * interquartile_mean(measured[name]):.2f}",
            f"{1e3 * min(measured[name]):.2f} .. {1e3 * max(measured[name]):.2f}",
            "" if name == by_hand else f"{wins[name]} of {len(measured[name])}",
            f"{ratios[name]:.3f}",
            style="bold" if name == choice.plan.name else "",
        )
    chosen = choice.plan.name
    if chosen not in choice.hand_written:
        gain = 1 - ratios[chosen]
        why = (
            f"{gain:.1%} faster than {by_hand}, the best hand-written plan, and faster in {wins[chosen]} of {rounds}"
            " rounds"
        )
    elif len(ratios) > len(choice.hand_written):
        why = "no variant of the planner is faster beyond noise"
    else:
        why = "no other plan was tried" if len(ratios) == 1 else "only hand-written plans were tried"
    longest = sorted(choice.task_seconds, key=lambda name: -choice.task_seconds[name])[:4]
    tasks = ", ".join(f"{name} {1e3 * choice.task_seconds[name]:.2f}" for name in longest)
    ahead = [
        f"{name} {_format_stage_and_thread(where.stage, where.thread_group)}"
        for name, where in choice.plan.schedule.items()
        if where.stage or where.thread_group != "main"
    ]
    return Group(
        Text(f"plan {chosen} is the fastest: {why}", style="bold"),
        table,
        Text(f"tasks ahead of the trained batch: {', '.join(ahead) or 'none'}"),
        Text(f"longest tasks in serial order, in ms: {tasks}"),
    )


def _format_stage_and_thread(stage: int, group: str) -> str:
    thread = "" if group == "main" else f" in thread {group!r}"
    return f"by {stage}{thread}"


def report_choice(choice: PlanChoice, save_plan: str | Path | None) -> None:
    """Print the report of a choice, and write the plan if *save_plan* is a path. Called on one rank only."""
    print_report(choice_report(choice))
    if save_plan is not None:
        write_choice(choice.plan.to_yaml, save_plan, f"the plan {choice.plan.name!r}")


def write_choice(to_yaml: Callable[[], str], path: str | Path, choice: str) -> None:
    """Write a choice to a YAML file. A failure is a warning, and training continues."""
    try:
        with atomic_write(path) as unfinished:
            unfinished.write_text(to_yaml(), encoding="utf-8")
    except (OSError, ValueError, yaml.YAMLError) as error:
        rank_zero_warn(f"{choice} cannot be written to {str(path)!r} ({error}). Training continues with it")
