"""Tables that fit terminals of any width without truncated cells."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

from rich import box
from rich.cells import cell_len
from rich.console import Console, ConsoleOptions, RenderableType, RenderResult
from rich.table import Column, Table
from rich.text import Text

_WIDE = 10_000  # characters; wider than any table
_GAP = "   "


class FittedTable(Table):
    """Rich table that is printed as a list if its columns do not fit the terminal.

    A column that may wrap fits if its longest word fits. In the list, each row starts with a line for its first cell.
    The other cells follow, each after the header of its column.
    """

    @classmethod
    def of_figures(cls, first: str, *figures: str, edge: bool = True, **options: Any) -> FittedTable:
        """Create a table of names and figures."""
        table = cls(box=box.SIMPLE, padding=(0, 1) if edge else (0, 1, 0, 0), show_edge=edge, **options)
        table.add_column(first, no_wrap=True)
        for header in figures:
            table.add_column(header, justify="right", no_wrap=True)
        return table

    def __rich_console__(self, console: Console, options: ConsoleOptions) -> RenderResult:
        widest = self.__rich_measure__(console, options.update(max_width=_WIDE)).maximum
        if widest - sum(map(_slack, self.columns)) <= options.max_width:
            yield from super().__rich_console__(console, options)
            return
        headers = [" ".join(str(column.header).split()) for column in self.columns]
        for row in zip(*(column.cells for column in self.columns), strict=True):
            first, *others = map(str, row)
            if first:
                yield Text(f"{headers[0]} {first}", style="bold")
            pairs = [f"{header} {cell}" for header, cell in zip(headers[1:], others, strict=True) if cell]
            for line in _packed(pairs, options.max_width - len(_GAP)):
                yield Text(_GAP + line)


def print_report(report: RenderableType, *, soft_wrap: bool = False) -> None:
    """Print to the terminal. Markup is disabled because names may contain square brackets."""
    Console(markup=False, highlight=False, emoji=False, soft_wrap=soft_wrap).print(report)


def _slack(column: Column) -> int:
    """Number of characters that wrapping can save in *column*; 0 if the column must not wrap."""
    if column.no_wrap:
        return 0
    cells = [str(column.header), *map(str, column.cells)]
    line = max(cell_len(line) for cell in cells for line in cell.splitlines() or [""])
    return line - max(cell_len(word) for cell in cells for word in cell.split() or [""])


def _packed(parts: list[str], width: int) -> Iterator[str]:
    """Join *parts* into lines of at most *width* characters."""
    line = ""
    for part in parts:
        if line and cell_len(line + _GAP + part) > width:
            yield line
            line = ""
        line = f"{line}{_GAP}{part}" if line else part
    if line:
        yield line
