"""The progress of training that is stored with the rows of a module."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest

from lightning_pipe.engine.common.errors import SetupError
from lightning_pipe.recsys.dynamic.tables.row_tables import RowTables
from tests.recsys.dynamic.small_table import Table


@pytest.mark.parametrize(
    "progress", [{"step": "soon"}, {"step": "-1"}, {"step": "9" * 40}, {"seed": "x"}, {"optimizer_steps": "1"}, [1]]
)
def test_progress_that_is_none_is_refused_with_what_was_found(progress: Any) -> None:
    table = Table()
    alone: Any = SimpleNamespace(size=lambda: 1, rank=lambda: 0)
    tables = RowTables({"t": table.cache}, ["t"], store=table.shared, group=alone, description={})
    with pytest.raises(SetupError, match=r"the rows of t were written with the progress .*; expected step, seed and"):
        tables._restore_training_progress(progress)
    tables._restore_training_progress({"step": "7", "seed": "-3", "optimizer_steps": ""})
    assert tables.step == 7
