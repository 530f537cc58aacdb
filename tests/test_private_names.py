"""Private names of other projects are used in ``_compat`` alone, but for a list that may only become shorter."""

from __future__ import annotations

from functools import cache
from pathlib import Path

from scripts.private_names import private_names

LISTED = Path(__file__).with_name("private_names.txt")
FIX = "python -m scripts.private_names > tests/private_names.txt"


def listed() -> dict[tuple[str, str], int]:
    lines = [line.split() for line in LISTED.read_text(encoding="utf-8").splitlines()]
    return {(path, name): int(count) for path, name, count in lines}


@cache
def found() -> dict[tuple[str, str], int]:
    return {(path, name): count for path, names in private_names().items() for name, count in names.items()}


def test_no_private_name_of_another_project_is_used_that_is_not_listed() -> None:
    allowed = listed()
    new = sorted(use for use, count in found().items() if count > allowed.get(use, 0))
    assert not new, (
        f"these files use private names; find a public way, or wrap the name in lightning_pipe/_compat: {new}"
    )


def test_what_is_used_no_more_is_not_listed() -> None:
    used = found()
    gone = sorted(use for use, count in listed().items() if count > used.get(use, 0))
    assert not gone, f"these uses are gone; shorten the list with {FIX}: {gone}"


def test_every_way_to_use_a_private_name_is_found(tmp_path: Path) -> None:
    (tmp_path / "_compat").mkdir()
    (tmp_path / "_compat" / "torch.py").write_text("from torch import _C\n")
    (tmp_path / "part.py").write_text(
        "import torch._dynamo\n"
        "from torch.utils._pytree import _is_leaf\n"
        "from collections import _other\n"
        "class Own:\n"
        "    def _method(self, group):\n"
        "        self._field = group._get_backend\n"
        "        super()._method()\n"
        "        return self._field, getattr(group, '_devices', None), group._replace, self._method\n"
    )
    assert private_names(tmp_path) == {
        "part.py": {"_dynamo": 1, "_pytree": 1, "_is_leaf": 1, "_get_backend": 1, "_method": 1, "_devices": 1}
    }
