"""The fixture of the tests of single modules."""

from __future__ import annotations

from tests.pipe.conftest import _one_thread

__all__ = ["_one_thread"]
