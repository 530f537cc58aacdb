"""The image for Kubernetes: what its Dockerfile names is there, and it runs as the user of the manifests."""

from __future__ import annotations

import re
import shlex
import tomllib
from typing import Any

from tests.scenarios.cluster.kubernetes import FOLDER, ROOT, job_pod

TEXT = (FOLDER / "Dockerfile").read_text(encoding="utf-8")


def test_requirements_and_extras_that_it_installs_are_there() -> None:
    files = re.findall(r"requirements/[\w.-]+\.txt", TEXT)
    assert files
    assert all((ROOT / file).exists() for file in files)
    project: dict[str, Any] = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    extras = re.findall(r"[\w-]+", " ".join(re.findall(r"\.\[([\w,-]+)\]", TEXT)))
    assert extras
    assert set(extras) <= project["optional-dependencies"].keys()


def test_it_runs_as_the_user_of_the_manifests_who_may_write_logs() -> None:
    (user,) = re.findall(r"^USER (\d+)$", TEXT, re.MULTILINE)
    assert int(user) == job_pod()["securityContext"]["runAsUser"] != 0
    (made,) = re.findall(r"^RUN (.*--uid .*)$", TEXT.replace("\\\n", ""), re.MULTILINE)
    name = shlex.split(made.split("&&")[0])[-1]
    assert f"--uid {user} {name}" in made
    assert f"install -d -o {name} /workspace/logs" in made
