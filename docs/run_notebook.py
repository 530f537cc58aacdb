"""Runs the notebook and stores what its cells print and draw: ``python docs/run_notebook.py``.

Cells run in this process, one after the other, which is all that this notebook needs, and needs no Jupyter.
"""

from __future__ import annotations

import base64
import contextlib
import io
import json
import types
from pathlib import Path
from typing import Any

import matplotlib
import matplotlib.pyplot as plt

NOTEBOOK = Path(__file__).resolve().parent / "notebook.ipynb"


def run(notebook: dict[str, Any]) -> None:
    """Run the cells of *notebook*, and put what they print and draw in the place of their outputs."""
    matplotlib.use("Agg")
    module = types.ModuleType("__main__")
    plt.show = lambda *_, **__: None
    codes = [cell for cell in notebook["cells"] if cell["cell_type"] == "code"]
    for count, cell in enumerate(codes, start=1):
        heard = io.StringIO()
        with contextlib.redirect_stdout(heard):
            exec(compile("".join(cell["source"]), f"cell {count}", "exec"), module.__dict__)
        cell["execution_count"], cell["outputs"] = count, []
        if heard.getvalue():
            text = "".join(f"{line.rstrip()}\n" for line in heard.getvalue().splitlines())
            cell["outputs"].append({"name": "stdout", "output_type": "stream", "text": text.splitlines(True)})
        for number in plt.get_fignums():
            picture = io.BytesIO()
            plt.figure(number).savefig(picture, format="png", bbox_inches="tight", dpi=96)
            data = {"image/png": base64.b64encode(picture.getvalue()).decode() + "\n", "text/plain": ["<Figure>"]}
            cell["outputs"].append({"data": data, "metadata": {}, "output_type": "display_data"})
        plt.close("all")


def main() -> None:
    notebook = json.loads(NOTEBOOK.read_text(encoding="utf-8"))
    run(notebook)
    NOTEBOOK.write_text(json.dumps(notebook, indent=1, ensure_ascii=False) + "\n", encoding="utf-8")


if __name__ == "__main__":
    main()
