"""Reading of files that a user names: plans, costs, profiles, schedules."""

from __future__ import annotations

import os
import stat
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from pathlib import Path

from lightning_pipe.engine.common.errors import PlanError
from lightning_pipe.engine.plans.spec import PlanSpec

_MOST_BYTES = 2**22  # a profile of ten thousand tasks; readers of YAML allow less


@contextmanager
def plan_file(plan: object, names: Iterable[str], example: str) -> Iterator[PlanSpec]:
    """Read a plan from a file. A PlanError raised inside the block names the file."""
    write_one = f"'lightning-pipe plan show {example} --format yaml'"
    if not (isinstance(plan, (str, Path)) and os.path.exists(plan)):
        given = str(plan) if isinstance(plan, Path) else repr(plan)
        raise PlanError(
            f"there is no plan {given}: it is neither one of {', '.join(names)} nor a file; give one of these names, or"
            f" write a file with {write_one}"
        )
    text = read_text(plan, f"the plan {plan}", f"give a file in the format of {write_one}")
    with named(plan):
        yield PlanSpec.from_yaml(text)


@contextmanager
def named(path: str | Path) -> Iterator[None]:
    """Prefix the message of a PlanError raised inside the block with *path*."""
    try:
        yield
    except PlanError as error:
        raise PlanError(f"{path}: {error}") from error


def read_text(path: str | Path, what: str, needed: str) -> str:
    """Read a regular UTF-8 text file of at most 4 MiB."""
    try:
        with open(path, "rb", opener=_open_at_once) as file:
            is_regular = stat.S_ISREG(os.fstat(file.fileno()).st_mode)
            content = file.read(_MOST_BYTES + 1) if is_regular else b""
    except (OSError, ValueError) as error:
        raise PlanError(f"{what} cannot be read ({error}); {needed}") from error
    if not is_regular:
        raise PlanError(f"{what} cannot be read (expected a file, got a device or pipe); {needed}")
    if len(content) > _MOST_BYTES:
        raise PlanError(f"{what} is too large: expected at most {_MOST_BYTES} bytes; {needed}")
    try:
        return content.decode("utf-8")
    except UnicodeDecodeError as error:
        # str(error) would contain the bytes found, which may be megabytes.
        at = f"{error.reason} at byte {error.start}"
        raise PlanError(f"{what} is not text in UTF-8 ({at}); {needed}") from error


def _open_at_once(path: str, flags: int) -> int:
    # O_NONBLOCK: opening a named pipe would otherwise wait for a writer.
    return os.open(path, flags | os.O_NONBLOCK)
