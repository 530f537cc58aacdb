"""What strategies that look for a plan have in common: their arguments, and what they say of what they found."""

from __future__ import annotations

import statistics
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from lightning.pytorch.utilities.rank_zero import rank_zero_warn
from rich import box
from rich.console import Console, Group
from rich.table import Table
from rich.text import Text

from lightning_pipe.engine import PipelinePlan, SetupError
from lightning_pipe.loops.auto_program import Exploration, PlanChoice

__all__ = ["AUTO", "choice_report", "exploration_of", "print_choice", "write_plan"]

# In the place of a plan's name.
AUTO = "auto"


def exploration_of(arguments: Mapping[str, Any] | None) -> Exploration:
    """The exploration that a strategy's argument asks for.

    Raises:
        SetupError: an unknown key.
        PlanError: a number that is too small.
    """
    try:
        return Exploration(**(arguments or {}))
    except TypeError as error:
        raise SetupError(
            f"exploration is {arguments!r}; its keys are {', '.join(Exploration.__dataclass_fields__)}"
        ) from error


def choice_report(choice: PlanChoice) -> Group:
    """What was chosen, and why, for a Rich console."""
    medians = {name: statistics.median(times) for name, times in choice.measured.items()}
    best = min(medians[name] for name in choice.hand_written)
    table = Table(box=box.SIMPLE, padding=(0, 1))
    table.add_column("plan", no_wrap=True)
    for column in ("ms an iteration", "in each round", "of the best by hand"):
        table.add_column(column, justify="right", no_wrap=True)
    for name in sorted(medians, key=lambda name: medians[name]):
        rounds = "  ".join(f"{1e3 * seconds:.2f}" for seconds in choice.measured[name])
        chosen = "bold" if name == choice.plan.name else ""
        table.add_row(name, f"{1e3 * medians[name]:.2f}", rounds, f"{medians[name] / best:.3f}", style=chosen)
    longest = sorted(choice.own, key=lambda name: -choice.own[name])[:4]
    tasks = ", ".join(f"{name} {1e3 * choice.own[name]:.2f}" for name in longest)
    why = "no plan that was found is faster than it beyond noise" if choice.plan.name in choice.hand_written else ""
    ahead = [
        f"{name} {_where(where.stage, where.thread_group)}"
        for name, where in choice.plan.schedule.items()
        if where.stage or where.thread_group != "main"
    ]
    return Group(
        Text(f"plan {choice.plan.name} is the fastest" + (f": {why}" if why else ""), style="bold"),
        table,
        Text(f"ahead of the batch being trained: {', '.join(ahead) or 'nothing'}"),
        Text(f"one after the other the longest tasks take, in ms: {tasks}"),
    )


def _where(stage: int, group: str) -> str:
    thread = "" if group == "main" else f" in thread {group!r}"
    return f"by {stage}{thread}"


def print_choice(choice: PlanChoice) -> None:
    """Print the report."""
    # No markup: names may hold square brackets.
    Console(markup=False, highlight=False).print(choice_report(choice))


def write_plan(plan: PipelinePlan, path: str | Path) -> None:
    """Write a plan in YAML; where that fails, training goes on with a warning."""
    try:
        Path(path).parent.mkdir(parents=True, exist_ok=True)
        Path(path).write_text(plan.to_yaml(), encoding="utf-8")
    except OSError as error:
        rank_zero_warn(f"the plan {plan.name!r} cannot be written to {str(path)!r} ({error}); training goes on with it")
