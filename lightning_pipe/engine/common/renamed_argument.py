"""Old names of arguments, which are accepted with a warning for one version."""

from __future__ import annotations

import functools
import warnings
from collections.abc import Callable
from typing import ParamSpec, TypeVar

P = ParamSpec("P")
T = TypeVar("T")


def renamed_argument(old: str, new: str) -> Callable[[Callable[P, T]], Callable[P, T]]:
    """Decorator for a function whose keyword argument *old* is now called *new*.

    A call with *old* warns with a :class:`FutureWarning`, and passes the value as *new*.
    """

    def decorate(function: Callable[P, T]) -> Callable[P, T]:
        @functools.wraps(function)
        def renaming(*args: P.args, **kwargs: P.kwargs) -> T:
            if old in kwargs:
                if new in kwargs:
                    raise TypeError(f"{function.__qualname__}() got multiple values for argument {new!r}")
                warnings.warn(
                    f"{function.__qualname__}: the argument {old!r} is now called {new!r}. Use the new name.",
                    FutureWarning,
                    stacklevel=2,
                )
                kwargs[new] = kwargs.pop(old)
            return function(*args, **kwargs)

        return renaming

    return decorate
