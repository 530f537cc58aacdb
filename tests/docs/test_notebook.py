"""The notebook runs, from its first cell to its last, in this process."""

from __future__ import annotations

import json
import runpy
from pathlib import Path
from typing import Any

import pytest

from tests.docs.pages import DOCS
from tests.running_in import running_in

NOTEBOOK = json.loads((DOCS / "notebook.ipynb").read_text(encoding="utf-8"))


def said(cell: dict[str, Any]) -> str:
    return "".join(line for output in cell["outputs"] for line in output.get("text", ()))


@pytest.mark.exhaustive
def test_it_runs_and_draws_and_says_what_it_says(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    import matplotlib.pyplot as plt

    monkeypatch.setattr(plt, "show", plt.show)  # which the runner replaces
    before = json.loads(json.dumps(NOTEBOOK))
    with running_in(tmp_path):
        runpy.run_path(str(DOCS / "run_notebook.py"))["run"](NOTEBOOK)
    assert sum("to the bit: True" in said(cell) for cell in NOTEBOOK["cells"] if cell["cell_type"] == "code") == 2
    for old, new in zip(before["cells"], NOTEBOOK["cells"], strict=True):
        kinds = [[output["output_type"] for output in cell.get("outputs", ())] for cell in (old, new)]
        assert kinds[0] == kinds[1], "the stored outputs are of another notebook: python docs/run_notebook.py"
