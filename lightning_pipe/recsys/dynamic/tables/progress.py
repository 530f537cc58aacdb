"""Progress of training that is stored with rows, as texts."""

from __future__ import annotations

import reprlib
from collections.abc import Iterable, Mapping

from lightning_pipe.engine.common.errors import SetupError


def read_progress(
    progress: Mapping[str, str], tables: Iterable[str], seed: int, optimizers: int
) -> tuple[int, int, list[int]]:
    """Parse the result of ``RowTables.progress``."""
    try:
        step, found = int(progress.get("step", "0")), int(progress.get("seed") or seed)
        steps = [int(number) for number in progress.get("optimizer_steps", "").split(",") if number]
    except (AttributeError, TypeError, ValueError):
        step, found, steps = -1, 0, []
    if not all(0 <= number < 1 << 63 for number in [step, *steps]) or len(steps) not in (0, optimizers):
        raise SetupError(
            f"the rows of {', '.join(tables)} were written with the progress {reprlib.repr(progress)}; expected step,"
            f" seed and {optimizers} optimizer_steps, as texts of whole numbers. Restore the original file, or resume"
            " from another checkpoint"
        )
    return step, found, steps or [0] * optimizers
