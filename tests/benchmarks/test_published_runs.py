"""The page about published runs shows what the script predicts today."""

from __future__ import annotations

from pathlib import Path

import pytest

pytest.importorskip("transformers")

from benchmarks.published_runs import tables, titles
from tests.tiers import sampled

SHOWN = (Path(__file__).resolve().parents[2] / "docs" / "published_runs.md").read_text(encoding="utf-8")
PREDICTIONS = SHOWN.split("<!-- predictions -->\n")[1].split("<!-- end of predictions -->")[0]


@pytest.mark.parametrize("title", sampled(titles(), lambda title: "AutoModel" in title))
def test_the_tables_of_the_page_are_those_of_the_script(title: str) -> None:
    assert "\n".join(tables(title)).strip() in PREDICTIONS


def test_the_page_has_no_other_tables() -> None:
    assert [line[4:] for line in PREDICTIONS.splitlines() if line.startswith("### ")] == titles()
