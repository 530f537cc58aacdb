"""The image for Kubernetes: what its Dockerfile installs, and that this trains."""

from __future__ import annotations

import itertools
import os
import re
import shlex
import subprocess
import sys
import tomllib
from pathlib import Path
from typing import Any

import pytest
from packaging.requirements import Requirement
from packaging.utils import canonicalize_name

from tests.patience import HANG
from tests.scenarios.cluster.dockerfile import DOCKERFILE, ROOT, base, build, copy, ignored, stages
from tests.scenarios.cluster.kubernetes import environment, job_pod


def recorded(folder: Path, **arguments: str) -> list[list[str]]:
    """The arguments of each call of pip in the build stage, whose Python and pip do nothing."""
    commands = folder / "opt" / "venv" / "bin"
    commands.mkdir(parents=True)
    for name in ("python", "pip"):
        (commands / name).write_text(f'#!/bin/sh\nfor word in {name} "$@"; do echo "$word"; done >> {folder}/calls\n')
        (commands / name).chmod(0o755)
    build(folder, arguments, base(commands))
    calls: list[list[str]] = []
    for word in (folder / "calls").read_text().splitlines():
        if word in ("python", "pip"):
            calls.append([])
        calls[-1].append(word)
    return [call[1:] for call in calls if call[0] == "pip"]


def constraints(call: list[str], folder: Path) -> dict[str, str]:
    """Versions by name that the constraints of a call demand."""
    found: dict[str, str] = {}
    for option, file in itertools.pairwise(call):
        if option == "-c":
            for line in (folder / "source" / file).read_text().splitlines():
                if line and not line.startswith("#"):
                    one = Requirement(line)
                    (version,) = [bound.version for bound in one.specifier]
                    assert found.setdefault(canonicalize_name(one.name), version) == version
    return found


@pytest.mark.parametrize(("kind", "fbgemm"), [("cpu", "fbgemm-gpu-cpu"), ("gpu", "fbgemm-gpu")])
def test_it_installs_the_project_with_the_versions_of_the_tests(tmp_path: Path, kind: str, fbgemm: str) -> None:
    first, *others = recorded(tmp_path, BUILD=kind)
    versions = constraints(first, tmp_path)
    pinned = re.findall(r"^([\w.-]+)==(\S+)", (ROOT / "requirements/pinned.txt").read_text(), re.MULTILINE)
    assert {canonicalize_name(name): version for name, version in pinned}.items() <= versions.items()
    assert {"torch", "torchrec", "lightning", fbgemm} <= versions.keys()
    (extras,) = [re.findall(r"[\w-]+", word) for word in first if word.startswith(".[")]
    project: dict[str, Any] = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    assert set(extras) <= project["optional-dependencies"].keys()
    if kind == "cpu":  # as docs/stacks.md says
        (alone,) = others
        assert alone[:2] == ["install", "--no-deps"]
        assert alone[-1] == "torchrec"
        assert constraints(alone, tmp_path)["torchrec"] == versions["torchrec"]
    assert ("recsys" in extras) == (kind == "gpu") == (not others)


def test_a_build_of_another_kind_says_what_it_expects(tmp_path: Path) -> None:
    with pytest.raises(subprocess.CalledProcessError) as error:
        recorded(tmp_path, BUILD="tpu")
    assert "BUILD is 'tpu', expected cpu or gpu" in error.value.stderr


def test_it_gets_what_it_copies_and_neither_environments_nor_logs_nor_libraries(tmp_path: Path) -> None:
    for path in (".venv/bin/python", ".git/config", "logs/a.ckpt", "lightning_pipe/a.so", "examples/__pycache__/a.pyc"):
        assert ignored(path), path
    copied = [rest.split()[:-1] for instruction, rest in stages()[1] if instruction == "COPY" and "--from" not in rest]
    assert copied == [["examples"]]
    copy(["examples"], tmp_path)
    assert (tmp_path / "recsys_movielens" / "two_nodes.yaml").exists()


def test_it_runs_as_the_user_of_the_manifests_who_may_write_logs() -> None:
    instructions = stages()[1]
    (user,) = [rest for instruction, rest in instructions if instruction == "USER"]
    assert int(user) == job_pod()["securityContext"]["runAsUser"] != 0
    (made,) = [rest for instruction, rest in instructions if instruction == "RUN"]
    name = shlex.split(made.split("&&")[0])[-1]
    assert f"--uid {user} {name}" in made
    assert f"install -d -o {name} /workspace/logs" in made


@pytest.mark.exhaustive
def test_the_command_of_its_comment_puts_the_movielens_data_where_the_example_looks(tmp_path: Path) -> None:
    (command,) = re.findall(r"^# +RUN (python .*)$", DOCKERFILE.read_text(encoding="utf-8"), re.MULTILINE)
    variables = environment() | {"XDG_CACHE_HOME": str(tmp_path)}
    subprocess.run(shlex.split(command), cwd=ROOT, env=variables, check=True, timeout=HANG)
    check = "from examples.recsys_movielens.files import *; print(len(read(cache_folder()).stars))"
    done = subprocess.run(
        [sys.executable, "-c", check], cwd=ROOT, env=variables, check=True, text=True, capture_output=True, timeout=HANG
    )
    assert done.stdout == "100000\n"


@pytest.mark.long
def test_what_its_commands_install_in_an_empty_environment_trains(tmp_path: Path) -> None:
    commands = tmp_path / "bin"
    commands.mkdir()
    (commands / "python").symlink_to(os.path.realpath(sys.executable))
    build(tmp_path, {"TORCH_INDEX": os.environ.get("TORCH_INDEX", "")}, base(commands))
    work = tmp_path / "workspace"
    copy(["examples"], work / "examples")
    words = ["fit", "--config", "examples/recsys_movielens/prefetch.yaml", "--trainer.max_epochs", "1"]
    run = subprocess.run(
        [str(tmp_path / "opt/venv/bin/lightning-pipe"), *words],
        cwd=work,
        env=base(tmp_path / "opt/venv/bin"),
        check=False,
        text=True,
        capture_output=True,
        timeout=HANG,
    )
    assert run.returncode == 0, run.stdout + run.stderr
