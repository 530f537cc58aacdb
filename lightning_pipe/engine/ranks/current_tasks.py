"""Current task of each thread group, for the error of a collective that timed out or lost a rank.

Every rank that notices adds its batch and tasks to its error, so the output of a run that hung shows where ranks
differ.
"""

from __future__ import annotations

# Latest task of each thread group, its iteration, and True once it has ended without an error. The group "stages" has
# the schedule's actions. Shared by all pipelines of the process.
current_tasks: dict[str, tuple[str, int | None, bool]] = {}


def describe_current_tasks() -> str:
    """Text such as ``in DenseForward of iteration 7, after H2DAndShuffle of iteration 8 (thread copy)``."""
    texts = []
    for group, (task, iteration, ended) in list(current_tasks.items()):
        suffix = "" if iteration is None else f" of iteration {iteration}"
        thread = "" if group in ("main", "stages") else f" (thread {group})"
        texts.append(f"{'after' if ended else 'in'} {task}{suffix}{thread}")
    return ", ".join(texts)
