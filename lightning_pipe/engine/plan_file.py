"""The file of a plan that a user names."""

from __future__ import annotations

from collections.abc import Iterable
from pathlib import Path

from lightning_pipe.engine.errors import PlanError

__all__ = ["read_plan_file"]


def read_plan_file(plan: object, names: Iterable[str], example: str) -> str:
    """The text of a plan's file.

    Args:
        plan: what the user gave, which is none of *names*; a path, if it is right.
        names: what he could have given instead.
        example: a plan that ``lightning-pipe plan show`` knows, to begin a file of one's own with.

    Raises:
        PlanError: it is no file, or no text in UTF-8.
    """
    shown = str(plan) if isinstance(plan, Path) else repr(plan)
    write_one = f"'lightning-pipe plan show {example} --format yaml'"
    if not (isinstance(plan, (str, Path)) and _is_file(plan)):
        raise PlanError(
            f"there is no plan {shown}: it is neither one of {', '.join(names)} nor a file; name one, or write one with"
            f" {write_one}"
        )
    try:
        return Path(plan).read_text(encoding="utf-8")
    except UnicodeDecodeError as error:
        raise PlanError(
            f"the plan {plan} is not text in UTF-8 ({error}); name a file written as by {write_one}"
        ) from error
    except OSError as error:
        raise PlanError(f"the plan {plan} cannot be read ({error}); name a file that can") from error


def _is_file(path: str | Path) -> bool:
    try:
        return Path(path).is_file()
    except (OSError, ValueError):  # no path at all: the text of a plan, say
        return False
