"""The tasks' names in PyTorch's profiler and in NVTX, beside the operators and kernels that they show themselves.

PyTorch's profiler notes nothing of threads that were there before it began, which a pipeline's workers are, unless it
is asked for all of them::

    everywhere = torch._C._profiler._ExperimentalConfig(profile_all_threads=True)
    with torch.profiler.profile(experimental_config=everywhere) as profiler: ...

NVTX ranges are there while ``torch.autograd.profiler.emit_nvtx()`` is entered, and while a trace is on.
"""

from __future__ import annotations

from contextlib import AbstractContextManager, ExitStack, nullcontext
from typing import Any

import torch

from lightning_pipe._compat.torch import is_profiler_at_work

_NOTHING = nullcontext()


def task_range(name: str, traced: bool) -> AbstractContextManager[Any]:
    """What to enter around a task called *name*; it costs as good as nothing where no profiler is at work.

    Args:
        name: the range's name.
        traced: whether a trace is on.
    """
    # Of the process: PyTorch's own question is answered per thread, and with no in workers.
    profiled = is_profiler_at_work()
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
