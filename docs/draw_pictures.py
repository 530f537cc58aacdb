"""Draws the pictures of the docs: ``python docs/draw_pictures.py [NAME ...]``, in a clone, on a quiet machine.

A picture shows the timeline of an example that PipelineTrace recorded, the top of a PipelineProfiler report in
Chromium, or the plot of a benchmark. Tables and timelines in text are checked by tests, which run the command above
each of them.
"""

from __future__ import annotations

import shutil
import subprocess
import sys
import tempfile
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
# Example, first batch of the picture, and number of batches.
TIMELINES = {
    "serial_timeline": ("recsys_movielens/serial.yaml", 40, 4),
    "prefetch_timeline": ("recsys_movielens/prefetch.yaml", 40, 4),
    "stages_timeline": ("llm_text/1f1b.yaml", 12, 1),
    "pipe_timeline": ("in_process/transformer.yaml", 9, 2),
}
# Benchmark and its arguments.
BENCHMARKS = {"rows_timeline": ("dynamic_embeddings", "--rows", "200000", "--latency", "60e-6", "--rounds", "2")}
# Example, step after which it is profiled, and visible height in pixels.
REPORTS = {"profile_report": ("recsys_movielens/prefetch.yaml", 40, 972)}
WIDTH = 1000  # of a report (pixels)


def main(names: list[str]) -> None:
    """Draw the pictures with these names; all pictures without names."""
    for name in names or [*TIMELINES, *BENCHMARKS, *REPORTS]:
        picture = ROOT / "docs" / "pictures" / f"{name}.png"
        with tempfile.TemporaryDirectory() as folder:
            if name in TIMELINES:
                _draw_timeline(*TIMELINES[name], Path(folder), picture)
            elif name in BENCHMARKS:
                module, *options = BENCHMARKS[name]
                command = [sys.executable, "-m", f"benchmarks.{module}", *options, "--picture", str(picture)]
                subprocess.run(command, cwd=ROOT, check=True)
            else:
                _draw_report(*REPORTS[name], Path(folder), picture)
        print(picture.relative_to(ROOT))


def _draw_timeline(example: str, first: int, count: int, folder: Path, picture: Path) -> None:
    options = {
        "trainer.callbacks": "lightning_pipe.callbacks.PipelineTrace",
        "trainer.callbacks.steps": f"[{first},{count}]",
        "trainer.callbacks.path": f"{folder}/trace.json",
        "trainer.callbacks.picture": str(picture),
    }
    _fit(example, first + count + 2, folder, options)


def _draw_report(example: str, step: int, height: int, folder: Path, picture: Path) -> None:
    report = folder / "report.html"
    options = {
        "trainer.callbacks": "lightning_pipe.callbacks.PipelineProfiler",
        "trainer.callbacks.at_steps": f"[{step}]",
        "trainer.callbacks.rounds": "40",
        "trainer.callbacks.path": "null",
        "trainer.callbacks.report": str(report),
    }
    _fit(example, step + 2, folder, options)
    browser = shutil.which("chromium") or shutil.which("google-chrome")
    if browser is None:
        sys.exit("neither chromium nor google-chrome is on the PATH; install one to take a picture of a report")
    shown = ["--headless", "--no-sandbox", "--hide-scrollbars", f"--window-size={WIDTH},{height}"]
    # Plotly draws after the page is loaded, so the page's virtual clock gets time for it.
    shown += ["--virtual-time-budget=10000", f"--screenshot={picture}", report.as_uri()]
    subprocess.run([browser, *shown], cwd=folder, check=True)


def _fit(example: str, steps: int, folder: Path, options: dict[str, str]) -> None:
    options = {
        "trainer.default_root_dir": str(folder),
        "trainer.logger": "false",
        "trainer.enable_checkpointing": "false",
        "trainer.enable_progress_bar": "false",
        "trainer.limit_val_batches": "0",
        "trainer.max_steps": str(steps),
        **options,
    }
    words = [word for key, value in options.items() for word in (f"--{key}", value)]
    command = [sys.executable, "-m", "lightning_pipe.cli", "fit", "--config", f"examples/{example}", *words]
    subprocess.run(command, cwd=ROOT, check=True)


if __name__ == "__main__":
    main(sys.argv[1:])
