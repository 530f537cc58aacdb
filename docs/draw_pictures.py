"""Draws the pictures of the docs: ``python docs/draw_pictures.py [NAME ...]``, in a clone, on a quiet machine.

A picture shows the timeline of an example that PipelineTrace recorded, or is drawn by a script. Tables and timelines
in text are checked by tests, which run the command above each of them.
"""

from __future__ import annotations

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
# Module with an option --picture, and its other arguments.
SCRIPTS = {
    "demo": ("examples.rows_on_disk.demo",),
    # Needs root, for a link of 200 Mbit/s.
    "compute_ahead": (
        *("benchmarks.recsys_compute_ahead", "--kinds", "sequences", "--laws", "uniform"),
        *("--rounds", "2", "--times", "160"),
    ),
}


def main(names: list[str]) -> None:
    """Draw the pictures with these names; all pictures without names."""
    for name in names or [*TIMELINES, *SCRIPTS]:
        picture = ROOT / "docs" / "pictures" / f"{name}.png"
        with tempfile.TemporaryDirectory() as folder:
            if name in TIMELINES:
                _draw_timeline(*TIMELINES[name], Path(folder), picture)
            else:
                module, *options = SCRIPTS[name]
                command = [sys.executable, "-m", module, *options, "--picture", str(picture)]
                subprocess.run(command, cwd=ROOT, check=True)
        print(picture.relative_to(ROOT))


def _draw_timeline(example: str, first: int, count: int, folder: Path, picture: Path) -> None:
    options = {
        "trainer.callbacks": "lightning_pipe.callbacks.PipelineTrace",
        "trainer.callbacks.steps": f"[{first},{count}]",
        "trainer.callbacks.path": f"{folder}/trace.json",
        "trainer.callbacks.picture": str(picture),
    }
    _fit(example, first + count + 2, folder, options)


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
