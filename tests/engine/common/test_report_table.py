"""Tables fold what does not fit a terminal, and cut nothing off."""

from __future__ import annotations

import io

import pytest
from rich.console import Console
from rich.file_proxy import FileProxy

from lightning_pipe.engine.common.report_table import ReportTable, print_report


def test_nothing_is_cut_off_in_a_narrow_terminal() -> None:
    table = ReportTable.create_with_number_columns("plan", "ms", "95 %")
    table.add_row("recsys_fused_sparse_dist_pipeline", "1234.567", "-10.000 .. 12.300")
    console = Console(file=io.StringIO(), width=40, color_system=None)
    console.print(table)
    assert isinstance(console.file, io.StringIO)
    text = console.file.getvalue()
    assert max(map(len, text.splitlines())) <= 40
    assert "…" not in text
    # What is folded continues in the next line.
    assert {"recsys_fuse", "d_sparse_di", "st_pipeline", "1234.567", "12.300"} <= set(text.split())


def test_a_report_is_printed_through_the_stdout_of_a_progress_bar_that_is_still_shown(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    above_bar, terminal = io.StringIO(), io.StringIO()
    monkeypatch.setattr("sys.stdout", FileProxy(Console(file=above_bar), terminal))
    print_report("a line\nanother")
    assert (above_bar.getvalue(), terminal.getvalue()) == ("a line\nanother\n", "")
