"""Running a user's files in this process as if it had been started in their folder."""

from __future__ import annotations

import os
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import torch.distributed as dist


@contextmanager
def running_in(folder: Path) -> Iterator[Path]:
    """Make *folder* the current one, and undo afterwards what importing and training its files leaves behind.

    That is their modules, what Lightning writes into the environment (the seed, the first process's address), the
    process group, and the path of imports. The command line is empty meanwhile: Lightning's CLI warns of arguments
    beside those it is given.
    """
    before, environment, modules = os.getcwd(), dict(os.environ), set(sys.modules)
    arguments, path = sys.argv, sys.path
    sys.argv, sys.path = ["lightning-pipe"], [entry for entry in path if entry not in ("", str(folder))]
    os.chdir(folder)
    try:
        yield folder
    finally:
        os.chdir(before)
        os.environ.clear()
        os.environ.update(environment)
        sys.argv, sys.path = arguments, path
        for name in set(sys.modules) - modules:
            file = getattr(sys.modules[name], "__file__", None)
            if file is not None and Path(file).is_relative_to(folder):
                del sys.modules[name]
        if dist.is_initialized():
            dist.destroy_process_group()
