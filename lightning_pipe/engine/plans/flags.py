"""Arguments that are either on or off.

Tested in ``tests/scenarios/recommenders/test_recsys_input.py``.
"""

from __future__ import annotations

from lightning_pipe.engine.plans.errors import SetupError

__all__ = ["check_flags"]


def check_flags(**flags: object) -> None:
    """Checks that each is True or False: the text "false", from a file that nobody parsed, would count as True.

    Raises:
        SetupError: names the first that is not, and its value.
    """
    for name, value in flags.items():
        if not isinstance(value, bool):
            raise SetupError(f"{name} is {value!r}; needed is True or False")
