"""What holds for every test of this folder: what Lightning sets up in a process is undone after the test."""

from __future__ import annotations

import os
from collections.abc import Iterator
from unittest import mock

import pytest
import torch.distributed as dist


@pytest.fixture(autouse=True)
def _a_process_as_it_was_found() -> Iterator[None]:
    # Lightning's launcher leaves LOCAL_RANK and the like, and the world is left to it.
    with mock.patch.dict(os.environ):
        yield
        if dist.is_initialized():
            dist.destroy_process_group()
