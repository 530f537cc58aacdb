"""What a run logged, over all of its starts."""

from __future__ import annotations

import csv
from pathlib import Path


def last_metrics(folder: Path) -> dict[str, float]:
    """The last value of each metric that a run logged, over all of its starts."""
    found: dict[str, float] = {}
    for file in sorted(folder.glob("logs/*/version_*/metrics.csv"), key=lambda path: int(path.parent.name[8:])):
        for row in csv.DictReader(file.open()):
            found |= {name: float(value) for name, value in row.items() if value}
    return {name: value for name, value in found.items() if not name.startswith(("own/", "exposed/"))}  # times
