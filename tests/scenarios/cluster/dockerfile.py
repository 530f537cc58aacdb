"""The Dockerfile of ``examples/cluster``, whose build stage runs here without a container."""

from __future__ import annotations

import fnmatch
import os
import re
import shutil
import subprocess
from collections.abc import Mapping
from pathlib import Path

from tests.patience import HANG

ROOT = Path(__file__).parents[3]
DOCKERFILE = ROOT / "examples" / "cluster" / "Dockerfile"


def stages() -> list[list[tuple[str, str]]]:
    """The instructions of each stage with what follows them, without the arguments before the first stage."""
    lines = [line for line in DOCKERFILE.read_text(encoding="utf-8").splitlines() if not re.match(r"\s*#", line)]
    found: list[list[tuple[str, str]]] = []
    for line in "\n".join(lines).replace("\\\n", "").splitlines():
        instruction, _, rest = line.strip().partition(" ")
        if instruction == "FROM":
            found.append([])
        if instruction and found:
            found[-1].append((instruction, rest.strip()))
    return found


def ignored(path: str) -> bool:
    """Whether a file of the project, by its path in it, is left out of what the build gets."""
    out = False
    for line in DOCKERFILE.with_name("Dockerfile.dockerignore").read_text(encoding="utf-8").splitlines():
        if not line or line.startswith("#"):
            continue
        pattern = line.removeprefix("!")
        # A pattern fits a path or a folder that the path is in; "**/" is any number of folders.
        parts = path.split("/")
        above = ["/".join(parts[: count + 1]) for count in range(len(parts))]
        names = parts if pattern.startswith("**/") else above
        # In these, "*" stands for all names of the top level.
        if any(fnmatch.fnmatchcase(name, pattern.removeprefix("**/")) for name in names):
            out = not line.startswith("!")
    return out


def copy(sources: list[str], target: Path) -> None:
    """What ``COPY`` does: files keep their names, and the contents of a folder go into the target."""
    for source in sources:
        path = ROOT / source
        files = [path] if path.is_file() else [one for one in path.rglob("*") if one.is_file()]
        kept = [one for one in files if not ignored(str(one.relative_to(ROOT)))]
        assert kept, f"COPY {source}: there is no such file, or all are ignored"
        for one in kept:
            to = target / (one.name if path.is_file() else one.relative_to(path))
            to.parent.mkdir(parents=True, exist_ok=True)
            shutil.copy(one, to)


def build(folder: Path, arguments: Mapping[str, str], environment: Mapping[str, str]) -> str:
    """Run the build stage with *folder* in place of ``/``, and return what the last command wrote.

    Args:
        folder: for the folders of the image.
        arguments: of the build.
        environment: of the base image.

    Raises:
        CalledProcessError: a command failed.
    """
    variables, place, output = dict(environment), folder, ""
    for instruction, rest in stages()[0]:
        here = rest.replace("/opt/venv", f"{folder}/opt/venv")
        if instruction == "ARG":
            name, _, default = rest.partition("=")
            variables[name] = arguments.get(name, default)
        elif instruction == "ENV":
            for name, value in re.findall(r"(\w+)=(\S*)", here):
                variables[name] = re.sub(r"\$\{?(\w+)\}?", lambda found: variables.get(found[1], ""), value)
        elif instruction == "WORKDIR":
            place = folder / rest.lstrip("/")
            place.mkdir(parents=True, exist_ok=True)
        elif instruction == "COPY":
            *sources, target = rest.split()
            copy(sources, place / target)
        elif instruction == "RUN":
            output = subprocess.run(
                ["/bin/sh", "-c", here],
                cwd=place,
                env=variables,
                check=True,
                text=True,
                capture_output=True,
                timeout=HANG,
            ).stdout
        else:
            assert instruction == "FROM", f"{instruction} is not known here"
    return output


def base(commands: Path) -> dict[str, str]:
    """The environment of a base image, with *commands* first in its path, and without what Python's tools set here."""
    names = ("HOME", "LANG", "PIP_CERT", "PIP_FIND_LINKS")
    return {name: os.environ[name] for name in names if name in os.environ} | {
        "PATH": f"{commands}{os.pathsep}/usr/bin{os.pathsep}/bin"
    }
