"""The files that a user names: plans, costs, profiles, schedules.

Tested in ``tests/scenarios/trainer/test_pipeline_auto.py``.
"""

from __future__ import annotations

import os
import stat
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from pathlib import Path

from lightning_pipe.engine.common.errors import PlanError
from lightning_pipe.engine.plans.spec import PlanSpec

__all__ = ["named", "plan_file", "read_text"]

_MOST_BYTES = 2**22  # a profile of ten thousand tasks; readers of YAML allow less


@contextmanager
def plan_file(plan: object, names: Iterable[str], example: str) -> Iterator[PlanSpec]:
    """Read a plan's file. A PlanError that is raised inside names the file.

    Args:
        plan: what the user gave, which is none of *names*; a path, if it is right.
        names: what he could have given instead.
        example: a plan that ``lightning-pipe plan show`` knows, to begin a file of one's own with.

    Raises:
        PlanError: it is no file, no text in UTF-8, or no plan.
    """
    write_one = f"'lightning-pipe plan show {example} --format yaml'"
    if not (isinstance(plan, (str, Path)) and os.path.exists(plan)):
        given = str(plan) if isinstance(plan, Path) else repr(plan)
        raise PlanError(
            f"there is no plan {given}: it is neither one of {', '.join(names)} nor a file; name one, or write one with"
            f" {write_one}"
        )
    text = read_text(plan, f"the plan {plan}", f"name a file written as by {write_one}")
    with named(plan):
        yield PlanSpec.from_yaml(text)


@contextmanager
def named(path: str | Path) -> Iterator[None]:
    """Put *path* in front of the message of a PlanError that is raised inside."""
    try:
        yield
    except PlanError as error:
        raise PlanError(f"{path}: {error}") from error


def read_text(path: str | Path, what: str, needed: str) -> str:
    """The text of a regular file in UTF-8, of at most 4 MiB.

    Args:
        path: of the file.
        what: what to call it in messages: "the plan my.yaml".
        needed: what to name instead, for messages.

    Raises:
        PlanError: it cannot be read, is a folder or device or the like, is larger, or is no text in UTF-8.
    """
    try:
        with open(path, "rb", opener=_open_at_once) as file:
            is_regular = stat.S_ISREG(os.fstat(file.fileno()).st_mode)
            content = file.read(_MOST_BYTES + 1) if is_regular else b""
    except (OSError, ValueError) as error:
        raise PlanError(f"{what} cannot be read ({error}); {needed}") from error
    if not is_regular:
        raise PlanError(f"{what} cannot be read (it is a device or pipe, expected a file); {needed}")
    if len(content) > _MOST_BYTES:
        raise PlanError(f"{what} has more than {_MOST_BYTES} bytes, which no such file needs; {needed}")
    try:
        return content.decode("utf-8")
    except UnicodeDecodeError as error:
        # Without what was found, which may be megabytes.
        at = f"{error.reason} at byte {error.start}"
        raise PlanError(f"{what} is not text in UTF-8 ({at}); {needed}") from error


def _open_at_once(path: str, flags: int) -> int:
    # A named pipe would wait for a writer.
    return os.open(path, flags | os.O_NONBLOCK)
