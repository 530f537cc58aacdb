"""The manifests of ``examples/cluster``."""

from __future__ import annotations

import re
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


def variables(container: dict[str, Any]) -> dict[str, str]:
    """A container's environment; all values are literal."""
    return {one["name"]: one["value"] for one in container["env"]}


def expanded(word: str, environment: dict[str, str]) -> str:
    """A word of a command, as the kubelet expands it: ``$(NAME)`` stays if there is no such variable."""
    return re.sub(r"\$\(([A-Za-z_]\w*)\)", lambda found: environment.get(found[1], found[0]), word)
