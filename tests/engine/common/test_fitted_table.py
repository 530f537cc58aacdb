"""Tables of which no terminal is too narrow: columns where they fit, and else a list."""

from __future__ import annotations

import io

import pytest
from rich import box
from rich.console import Console

from lightning_pipe.engine.common.fitted_table import FittedTable

NAMES = ("recsys_fused_sparse_dist_pipeline", "EmbInputDistStart")
FIGURES = ("1234.567", "-10.000 .. 12.300")
WORDS = "waits for one and for another"


def printed(width: int, no_wrap: bool = False) -> list[str]:
    table = FittedTable(box=box.SIMPLE, padding=(0, 1))
    table.add_column("plan", no_wrap=True)
    for name in ("ms", "95 %"):
        table.add_column(name, justify="right", no_wrap=True)
    table.add_column("more", no_wrap=no_wrap)
    for name in NAMES:
        table.add_row(name, *FIGURES, WORDS)
    console = Console(file=io.StringIO(), width=width, color_system=None)
    console.print(table)
    assert isinstance(console.file, io.StringIO)
    return console.file.getvalue().splitlines()


@pytest.mark.parametrize("width", [40, 60, 80, 120])
def test_no_name_and_no_figure_is_cut_at_any_width(width: int) -> None:
    lines = printed(width)
    assert max(map(len, lines)) <= width
    for name in NAMES:
        assert sum(name in line for line in lines) == 1, name
    for figure in FIGURES:
        assert sum(figure in line for line in lines) == len(NAMES), figure
    assert "…" not in "".join(lines)


def test_columns_are_columns_as_long_as_they_fit() -> None:
    fits = 120
    while not any("plan recsys" in line for line in printed(fits - 1)):
        fits -= 1
    # Of the last column only its longest word has to fit.
    wrapped = printed(fits)
    assert wrapped[1].split() == ["plan", "ms", "95", "%", "more"]
    assert "another" in wrapped[-2] + wrapped[-3]
    assert printed(fits - 1) == [
        f"plan {NAMES[0]}",
        f"   ms {FIGURES[0]}   95 % {FIGURES[1]}   more {WORDS}",
        f"plan {NAMES[1]}",
        f"   ms {FIGURES[0]}   95 % {FIGURES[1]}   more {WORDS}",
    ]


def test_a_column_that_must_not_wrap_makes_a_list_sooner() -> None:
    assert any("plan recsys" in line for line in printed(90, no_wrap=True))
    assert not any("plan recsys" in line for line in printed(90))
