"""Named ranges of tasks for PyTorch's profiler and NVTX, in addition to operators and kernels.

PyTorch's profiler ignores threads that started before it, such as the workers of a pipeline, unless it is configured to
profile all threads::

    everywhere = torch._C._profiler._ExperimentalConfig(profile_all_threads=True)
    with torch.profiler.profile(experimental_config=everywhere) as profiler: ...

NVTX ranges are emitted while ``torch.autograd.profiler.emit_nvtx()`` is entered and while a trace is on.
"""

from __future__ import annotations

from contextlib import AbstractContextManager, ExitStack, nullcontext
from typing import Any

import torch

from lightning_pipe._compat.torch import is_profiler_enabled

_NOTHING = nullcontext()


def profiler_range(name: str, traced: bool) -> AbstractContextManager[Any]:
    """Context manager for the range of a task. Its cost is negligible without a profiler or trace."""
    # Checked for the whole process: PyTorch's own check is per thread and returns False in workers.
    profiled = is_profiler_enabled()
    if not profiled and not traced:
        return _NOTHING
    marks = torch.cuda.is_initialized()  # type: ignore[no-untyped-call]
    if not marks:
        return torch.profiler.record_function(name) if profiled else _NOTHING
    stack = ExitStack()
    stack.enter_context(torch.cuda.nvtx.range(name))
    if profiled:
        stack.enter_context(torch.profiler.record_function(name))
    return stack
