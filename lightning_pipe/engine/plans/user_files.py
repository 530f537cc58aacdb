"""Reading of files that a user names: plans, costs, profiles, schedules."""

from __future__ import annotations

import os
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from pathlib import Path

from lightning_pipe.engine.common.errors import PlanError
from lightning_pipe.engine.plans.spec import PlanSpec


@contextmanager
def open_plan_file(plan: object, names: Iterable[str], example: str) -> Iterator[PlanSpec]:
    """Read a plan from a file. A PlanError raised inside the block names the file."""
    write_one = f"'lightning-pipe plan show {example} --format yaml'"
    if not (isinstance(plan, (str, Path)) and os.path.exists(plan)):
        name = str(plan) if isinstance(plan, Path) else repr(plan)
        raise PlanError(
            f"there is no plan {name}: it is neither one of {', '.join(names)} nor a file; give one of these names, or"
            f" write a file with {write_one}"
        )
    text = read_text(plan, f"the plan {plan}", f"give a file in the format of {write_one}")
    with prefix_plan_errors(plan):
        yield PlanSpec.from_yaml(text)


@contextmanager
def prefix_plan_errors(path: str | Path) -> Iterator[None]:
    """Prefix the message of a PlanError raised inside the block with *path*."""
    try:
        yield
    except PlanError as error:
        raise PlanError(f"{path}: {error}") from error


def read_text(path: str | Path, subject: str, needed: str) -> str:
    """Read a text file; a PlanError names the *subject*, such as "the plan my.yaml", and what is *needed*."""
    try:
        if not os.path.isfile(path):
            raise OSError("it is not a file")  # reading a pipe would wait for its writer
        return Path(path).read_text("utf-8")
    except (OSError, ValueError) as error:
        raise PlanError(f"{subject} cannot be read ({error}); {needed}") from error
