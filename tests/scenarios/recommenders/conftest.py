"""The fixtures of the tests of single modules."""

from __future__ import annotations

from tests.recsys.conftest import one_rank
from tests.recsys.dynamic.conftest import ranks, way

__all__ = ["one_rank", "ranks", "way"]
