"""Draws the pictures of the docs anew: ``python docs/draw_pictures.py [NAME ...]``, from a clone, on a quiet machine.

Each is what the callback PipelineTrace recorded while an example trained. The tables and timelines in text are checked
by the tests, which run the command that is written in front of each of them.
"""

from __future__ import annotations

import subprocess
import sys
import tempfile
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
# The example, its first batch that is drawn, and how many.
PICTURES = {
    "serial_timeline": ("recsys_movielens/serial.yaml", 40, 4),
    "prefetch_timeline": ("recsys_movielens/prefetch.yaml", 40, 4),
    "stages_timeline": ("llm_text/1f1b.yaml", 12, 1),
    "pipe_timeline": ("in_process/transformer.yaml", 9, 2),
}


def main(names: list[str]) -> None:
    """Draw these, or all of them."""
    for name in names or PICTURES:
        example, first, count = PICTURES[name]
        picture = ROOT / "docs" / "pictures" / f"{name}.png"
        with tempfile.TemporaryDirectory() as folder:
            options = {
                "trainer.default_root_dir": folder,
                "trainer.logger": "false",
                "trainer.enable_checkpointing": "false",
                "trainer.enable_progress_bar": "false",
                "trainer.limit_val_batches": "0",
                "trainer.max_steps": f"{first + count + 2}",
                "trainer.callbacks": "lightning_pipe.callbacks.PipelineTrace",
                "trainer.callbacks.steps": f"[{first},{count}]",
                "trainer.callbacks.path": f"{folder}/trace.json",
                "trainer.callbacks.picture": str(picture),
            }
            words = [word for key, value in options.items() for word in (f"--{key}", value)]
            command = [sys.executable, "-m", "lightning_pipe.cli", "fit", "--config", f"examples/{example}", *words]
            subprocess.run(command, cwd=ROOT, check=True)
        print(picture.relative_to(ROOT))


if __name__ == "__main__":
    main(sys.argv[1:])
