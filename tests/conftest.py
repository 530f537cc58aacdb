"""What holds for every test: one thread a process, and no thread left behind."""

from __future__ import annotations

import os
import threading
from collections.abc import Iterator

import pytest

from tests.distributed import threads_left

# Read when the libraries are loaded, which the tests do after this. Results must not depend on the number of cores.
os.environ["OMP_NUM_THREADS"] = "1"
os.environ["TOKENIZERS_PARALLELISM"] = "false"


@pytest.fixture(autouse=True)
def _no_thread_is_left_behind() -> Iterator[None]:
    before = threading.enumerate()
    yield
    left = threads_left(before)
    assert not left, f"the test left threads behind: {', '.join(left)}"
