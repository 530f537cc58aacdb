"""Tables whose cells are folded, not cut, if the terminal is narrow."""

from __future__ import annotations

from typing import Any

from rich import box
from rich.console import Console, RenderableType
from rich.table import Table


class ReportTable(Table):
    """Rich table of names and figures."""

    @classmethod
    def create_with_number_columns(cls, first: str, *figures: str, edge: bool = True, **options: Any) -> ReportTable:
        """Create a table of a column of names and columns of figures, with space around it if *edge*."""
        table = cls(box=box.SIMPLE, padding=(0, 1) if edge else (0, 1, 0, 0), show_edge=edge, **options)
        table.add_column(first, overflow="fold")
        for header in figures:
            table.add_column(header, justify="right", overflow="fold")
        return table


def print_report(report: RenderableType, *, soft_wrap: bool = False) -> None:
    """Print to the terminal. Markup is disabled because names may contain square brackets."""
    console = Console(markup=False, highlight=False, emoji=False, soft_wrap=soft_wrap)
    # A Console writes past the stdout of a progress bar that is still shown, which then erases these lines.
    with console.capture() as printed:
        console.print(report)
    print(printed.get(), end="", flush=True)
