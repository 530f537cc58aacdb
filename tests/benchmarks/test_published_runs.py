"""The page about predictions has the errors of what the script predicts today."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

pytest.importorskip("transformers")

from benchmarks.published_runs import tables, titles
from tests.tiers import sampled

PAGE = (Path(__file__).resolve().parents[2] / "docs" / "simulation.md").read_text(encoding="utf-8")


def ranges(title: str) -> list[tuple[str, float, float]]:
    """Figures of a source on the page, with the smallest and largest error of each."""
    found, source = [], ""
    for row in PAGE.partition("## Published runs")[2].splitlines():
        name, *cells = [cell.strip() for cell in row.strip("|").split("|")]
        source = "".join(re.findall(r"\[([^]]+)\]", name)) or source
        if len(cells) == 3 and source and source in title:
            errors = [float(value) for value in re.findall(r"[+-][\d.]+", cells[2])]
            found.append((cells[0].split(",")[0].split(" ")[0], errors[0], errors[-1]))
    return found


@pytest.mark.parametrize("title", sampled(titles(), lambda title: "AutoModel" in title))
def test_every_error_is_in_a_range_of_the_page(title: str) -> None:
    for row in "\n".join(tables(title)).splitlines():
        cells = [cell.strip() for cell in row.strip("|").split("|")]
        if len(cells) == 6 and re.match(r"[+-]\d", cells[5]):
            error = float(cells[5].split()[0])
            assert any(figure == cells[1] and low <= error <= high for figure, low, high in ranges(title)), row
