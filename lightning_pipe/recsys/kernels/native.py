"""The compiled library, where it was built: plain C functions, called through ctypes, which releases the interpreter.

Whatever it does has a slower way without it, in PyTorch or NumPy, that gives the same results. With
``LIGHTNING_PIPE_NATIVE=0`` in the environment the slower ways are taken.
"""

from __future__ import annotations

import ctypes
import importlib.machinery
import os
import warnings
from functools import cache
from pathlib import Path

__all__ = ["library"]

# As lp_version() in csrc/version.cpp: raised where a function changes.
_VERSION = 2


@cache
def library() -> ctypes.CDLL | None:
    """The library, or None where it was not built, is of another version, or is not wanted.

    Functions that return something else than a C int need their ``restype`` set by their caller.
    """
    if os.environ.get("LIGHTNING_PIPE_NATIVE") == "0":
        return None
    folder = Path(__file__).parent / "csrc"
    for suffix in importlib.machinery.EXTENSION_SUFFIXES:
        path = folder / f"_native{suffix}"
        if path.is_file():
            break
    else:
        return None
    try:
        found = ctypes.CDLL(str(path))
        found.lp_version.restype = ctypes.c_int64
        version = found.lp_version()
    except (OSError, AttributeError) as error:
        warnings.warn(
            f"the compiled library {path.name} cannot be loaded, slower ways are taken: {error}", stacklevel=2
        )
        return None
    if version != _VERSION:
        warnings.warn(
            f"the compiled library {path.name} is of version {version}, needed is {_VERSION}, slower ways are taken:"
            " install the package again",
            stacklevel=2,
        )
        return None
    return found
