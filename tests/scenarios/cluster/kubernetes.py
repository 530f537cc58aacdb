"""The manifests of ``examples/cluster``."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import yaml

ROOT = Path(__file__).parents[3]
FOLDER = ROOT / "examples" / "cluster"


def documents(name: str) -> dict[str, Any]:
    """The objects of a manifest by kind."""
    return {one["kind"]: one for one in yaml.safe_load_all((FOLDER / f"{name}.yaml").read_text(encoding="utf-8"))}


def job_pod() -> dict[str, Any]:
    """The spec of the Job's pods."""
    return dict(documents("kubernetes-job")["Job"]["spec"]["template"]["spec"])


def job_container() -> dict[str, Any]:
    (container,) = job_pod()["containers"]
    return dict(container)
