"""The compiled library, if it was built: plain C functions, called through ctypes, which releases the GIL.

Each function has a slower equivalent in PyTorch or NumPy with the same results, which is used without the library or
with ``LIGHTNING_PIPE_NATIVE=0`` in the environment.
"""

from __future__ import annotations

import ctypes
import importlib.machinery
import os
import warnings
from functools import cache
from pathlib import Path

# Must equal lp_version() in csrc/version.cpp; incremented whenever a function changes.
_VERSION = 4


@cache
def load_native_library() -> ctypes.CDLL | None:
    """Return the library, or None if it was not built, has another version, or is disabled.

    Callers must set ``restype`` of functions that do not return a C int.
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
        loaded = ctypes.CDLL(str(path))
        loaded.lp_version.restype = ctypes.c_int64
        version = loaded.lp_version()
    except (OSError, AttributeError) as error:
        warnings.warn(
            f"the compiled library {path.name} cannot be loaded: {error}. Slower functions are used; to avoid them,"
            " install the package again.",
            stacklevel=2,
        )
        return None
    if version != _VERSION:
        warnings.warn(
            f"the compiled library {path.name} must have version {_VERSION}, got {version}. Slower functions are used;"
            " to avoid them, install the package again.",
            stacklevel=2,
        )
        return None
    return loaded
