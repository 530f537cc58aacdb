"""Files that follow from the table of tested versions, ``lightning_pipe/stacks.toml``.

``python -m scripts.stacks`` writes ``requirements/constraints/`` and the tables of ``docs/stacks.md``. With ``--check``
it writes nothing, and ends with status 1 if a file differs.
"""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import Any

from lightning_pipe.environment import Stack, stacks

ROOT = Path(__file__).parent.parent
RESULTS = ROOT / "docs" / "stacks_results.json"
PAGE = ROOT / "docs" / "stacks.md"
CONSTRAINTS = ROOT / "requirements" / "constraints"


def constraints(torch: str, stack: Stack, build: str) -> str:
    """Text of a constraints file of one stack.

    Args:
        torch: minor version of torch.
        stack: the stack.
        build: ``cpu`` or ``gpu``, which decides the distribution of fbgemm.
    """
    lines = [
        f"# Versions of the tests with torch {torch}, which run on a CPU. Written by: python -m scripts.stacks",
        f"torch=={stack.tested['torch']}",
    ]
    if stack.torchrec is not None:
        fbgemm = "fbgemm-gpu-cpu" if build == "cpu" else "fbgemm-gpu"
        lines += [f"torchrec=={stack.tested['torchrec']}", f"{fbgemm}=={stack.tested['fbgemm']}", "torchmetrics==1.0.3"]
    return "\n".join(lines) + "\n"


def table_of_versions() -> str:
    """Table of the versions that belong together."""
    rows = ["| torch | torchrec | fbgemm | tested |", "| --- | --- | --- | --- |"]
    for torch, stack in stacks().of_torch.items():
        exact = ", ".join(f"{name} {version}" for name, version in stack.tested.items())
        rows.append(f"| {torch} | {stack.torchrec or 'none'} | {stack.fbgemm or 'none'} | {exact} |")
    return "\n".join(rows)


def table_of_results(results: list[dict[str, Any]]) -> str:
    """Table of runs of the tests, newest versions first."""
    rows = ["| torch | Python | passed | failed | skipped | date |", "| --- | --- | --- | --- | --- | --- |"]
    for row in sorted(results, key=lambda row: (row["torch"], row["python"]), reverse=True):
        counts = " | ".join(f"{row[key]:,}" for key in ("passed", "failed", "skipped"))
        rows.append(f"| {row['torch']} | {row['python']} | {counts} | {row['date']} |")
    return "\n".join(rows)


def written() -> dict[Path, str]:
    """All files and what they should contain."""
    files = {
        CONSTRAINTS / f"torch-{torch}-{build}.txt": constraints(torch, stack, build)
        for torch, stack in stacks().of_torch.items()
        for build in ("cpu", "gpu")
    }
    text = PAGE.read_text(encoding="utf-8")
    tables = {
        "versions": table_of_versions(),
        "results": table_of_results(json.loads(RESULTS.read_text(encoding="utf-8"))),
    }
    for name, table in tables.items():
        begin, end = f"<!-- {name} -->", f"<!-- end of {name} -->"
        before, rest = text.split(begin)
        text = f"{before}{begin}\n{table}\n{end}{rest.split(end, 1)[1]}"
    return files | {PAGE: text}


def add_result(torch: str, python: str, counts: dict[str, int], date: str) -> None:
    """Put the counts of a run of the tests in place of those of an earlier run on the same versions."""
    rows = json.loads(RESULTS.read_text(encoding="utf-8")) if RESULTS.exists() else []
    rows = [row for row in rows if (row["torch"], row["python"]) != (torch, python)]
    rows.append({"torch": torch, "python": python, **counts, "date": date})
    RESULTS.write_text(json.dumps(rows, indent=1) + "\n", encoding="utf-8")


def main(arguments: list[str]) -> int:
    """Write the files, or compare them."""
    different = [
        path for path, text in written().items() if not path.exists() or path.read_text(encoding="utf-8") != text
    ]
    if "--check" in arguments:
        for path in different:
            print(f"{path.relative_to(ROOT)} does not follow from stacks.toml. Run python -m scripts.stacks")
        return 1 if different else 0
    CONSTRAINTS.mkdir(exist_ok=True)
    for path in different:
        path.write_text(written()[path], encoding="utf-8")
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
