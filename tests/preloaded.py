"""What a server of ranks has imported before it forks the first: all that tests of several processes use.

A process with threads must not be forked: a lock that another thread holds is never released in the copy.
"""

from __future__ import annotations

import gc
import importlib
import os
import warnings
from pathlib import Path

from tests.stack import lacking

MODULES = (
    "lightning_pipe.strategies.recommender.strategy",
    "lightning_pipe.strategies.language_model.strategy",
    "lightning_pipe.strategies.pipeline",
    "lightning_pipe.strategies.in_process",
    "lightning_pipe.callbacks",
    "transformers.models.llama.modeling_llama",
    "torch.distributed.fsdp",
    "torch._dynamo",
    "hypothesis",
    "pytest",
    "tests.scenarios.fuzzing.test_store_files",
)


def threads() -> int:
    """How many threads this process has, those of native libraries included."""
    tasks = Path("/proc/self/task")
    return len(os.listdir(tasks)) if tasks.exists() else 1


with warnings.catch_warnings():
    warnings.simplefilter("ignore")
    for name in MODULES:
        if lacking(name) is None:
            importlib.import_module(name)
if threads() > 1:
    raise RuntimeError(f"an import of {', '.join(MODULES)} has started threads: expected 1, got {threads()}")
# A collection in a rank would otherwise visit, and so copy, the memory of everything imported here.
gc.collect()
gc.freeze()
