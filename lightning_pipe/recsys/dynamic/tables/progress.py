"""Progress of training that is stored with rows, as texts."""

from __future__ import annotations

import reprlib
from collections.abc import Iterable, Mapping

from lightning_pipe.engine.common.errors import SetupError


def read_progress(
    progress: Mapping[str, str], tables: Iterable[str], seed: int, optimizers: int
) -> tuple[int, int, list[int]]:
    """Parse the result of ``RowTables.progress``.

    Args:
        progress: the texts; a text that is missing has its default.
        tables: names of the tables, for messages.
        seed: default of the seed.
        optimizers: number of row optimisers.

    Returns:
        Step, seed, and the steps of each row optimiser (default 0).

    Raises:
        SetupError: The texts are not whole numbers, or too large, or the number of optimisers differs.
    """
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
