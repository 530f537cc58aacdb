"""The faults that `python scripts/faults.py` puts in fit the code as it is."""

from __future__ import annotations

from pathlib import Path

import pytest

from scripts.faults import FAULTS, Fault

ROOT = Path(__file__).resolve().parent.parent


@pytest.mark.parametrize("fault", FAULTS, ids=lambda fault: f"{fault.file}: {fault.original}")
def test_a_fault_replaces_code_that_is_there_once_and_has_a_test(fault: Fault) -> None:
    text = (ROOT / "lightning_pipe" / fault.file).read_text(encoding="utf-8")
    assert text.count(fault.original) == 1
    assert fault.faulty != fault.original
    file, _, name = fault.test.partition("::")
    assert f"def {name}{'(' if name else ''}" in (ROOT / "tests" / file).read_text(encoding="utf-8")
