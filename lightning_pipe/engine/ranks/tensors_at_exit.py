"""Tensors of Gloo's threads while the interpreter exits.

A thread of a Gloo group releases the tensors of a collective some time after the collective has completed. If it holds
the last C++ reference to a tensor with a Python object, it needs the GIL. A thread that waits for the GIL when the
interpreter begins to finalize is ended by CPython 3.11 to 3.13 inside a function of C++ that must not throw, which ends
the process with "terminate called without an active exception" and signal 6: torchrun reports a successful run as
failed. ``destroy_process_group`` prevents this only if nothing refers to the group any longer, since only the group's
destructor waits for its threads; TorchRec's modules, meshes and users' variables do refer to it.
"""

from __future__ import annotations

import atexit
import gc
from functools import cache

from torch import Tensor

from lightning_pipe._compat.torch import leak_cpp_references


@cache
def keep_tensors_alive_at_exit() -> None:
    """Keep all tensors alive from the interpreter's exit on, so that Gloo's threads never hold the last reference."""
    atexit.register(_leak_tensor_references)


def _leak_tensor_references() -> None:
    gc.unfreeze()  # gc.get_objects() omits frozen objects
    # isinstance() would import the lazy modules among these objects.
    leak_cpp_references([entry for entry in gc.get_objects() if issubclass(type(entry), Tensor)])
