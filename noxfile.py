"""The tests on other versions of PyTorch and Python: ``make test-matrix``, or one of ``nox --list``.

Each session makes an environment with uv, from the pinned list with another PyTorch and its TorchRec, runs the tests of
``make test``, and puts their counts into the table of ``docs/stacks.md``. The first needs some GB of downloads.
"""

from __future__ import annotations

import datetime
import re
import sys
import xml.etree.ElementTree as ElementTree
from collections.abc import Sequence
from pathlib import Path

import nox
from nox.command import CommandFailed

ROOT = Path(__file__).parent
sys.path.insert(0, str(ROOT))  # nox does not

from lightning_pipe.environment import stacks  # noqa: E402
from scripts import stacks as tables  # noqa: E402

nox.options.default_venv_backend = "uv"
STACKS = stacks()
# The default stack on every Python, and each other stack on one.
COMBINATIONS = [(STACKS.default, python) for python in STACKS.python] + [
    (torch, STACKS.python[0]) for torch in STACKS.of_torch if torch != STACKS.default
]
# Packages of the pinned list that these PyTorch versions, or their TorchRec, need in another version.
LOOSE = re.compile(r"^(setuptools|tensordict)==")
PARALLEL = ("-n", "2", "--dist", "loadfile")
# Of the environment that nox is in, which need not be activated.
UV = str(Path(sys.prefix) / "bin" / "uv")

# Tests of ``in_turn``: each private name of other projects, and what depends on them most.
CONTRACTS = ("tests/_compat", "tests/test_environment.py", "tests/llm/schedules")


@nox.session(python=False)
@nox.parametrize(("torch", "python"), COMBINATIONS, ids=[f"{torch}, {python}" for torch, python in COMBINATIONS])
def tests(session: nox.Session, torch: str, python: str) -> None:
    """Run the tests of ``make test`` on one combination, or pytest with the given arguments."""
    executable = _environment(session, torch, python)
    report = executable.parents[1] / "report.xml"
    report.unlink(missing_ok=True)
    _test(session, executable, f"--junitxml={report}", *(session.posargs or PARALLEL))
    counts = _counts(report)
    if counts is not None and not session.posargs:
        tables.add_result(torch, python, counts, datetime.datetime.now(datetime.UTC).date().isoformat())
        for path, text in tables.written().items():
            path.write_text(text, encoding="utf-8")
    if counts is None or counts["failed"]:
        session.error(f"tests failed on torch {torch} and Python {python}: see {report}")


@nox.session(python=False, default=False)
def in_turn(session: nox.Session) -> None:
    """Run the contract tests on one combination other than the default; the number of commits decides which."""
    others = [one for one in COMBINATIONS if one != (STACKS.default, STACKS.python[0])]
    commits = session.run("git", "rev-list", "--count", "HEAD", external=True, silent=True)
    torch, python = others[int(str(commits)) % len(others)]
    session.log(f"in turn: torch {torch}, Python {python}")
    try:
        executable = _environment(session, torch, python)
    except CommandFailed:
        session.warn(f"no tests with torch {torch} on Python {python}: the environment cannot be made on this machine")
    else:
        _test(session, executable, *PARALLEL, *CONTRACTS, success_codes=[0])


def _environment(session: nox.Session, torch: str, python: str) -> Path:
    """Make the environment of a combination if it does not exist, and return its Python."""
    folder = ROOT / ".nox" / f"torch-{torch}-python-{python}"
    executable, stack = folder / "bin" / "python", STACKS.of_torch[torch]
    pinned = [
        line.split(" ")[0] for line in (ROOT / "requirements/pinned.txt").read_text().splitlines() if "==" in line
    ]
    if torch != STACKS.default:
        pinned = [one.split("==")[0] if LOOSE.match(one) else one for one in pinned]
    if not executable.exists():
        # pyenv has versions that are not on the PATH.
        of_pyenv = sorted(Path.home().glob(f".pyenv/versions/{python}.*/bin/python"))
        session.run(UV, "venv", "--python", str(of_pyenv[-1]) if of_pyenv else python, str(folder), external=True)
    install = (UV, "pip", "install", "--python", str(executable))
    session.run(*install, f"torch=={stack.tested['torch']}", *pinned, external=True)
    if stack.torchrec is not None:
        pair = [f"torchrec=={stack.tested['torchrec']}", f"fbgemm-gpu-cpu=={stack.tested['fbgemm']}"]
        session.run(*install, "--no-deps", *pair, external=True)
        session.run(*install, *stack.needs, external=True)
    session.run(*install, "--no-deps", "--no-build-isolation", "--editable", str(ROOT), external=True)
    return executable


def _test(session: nox.Session, executable: Path, *arguments: str, success_codes: Sequence[int] = (0, 1)) -> None:
    command = (str(executable), "-m", "pytest", "-q", *arguments)
    session.run(*command, external=True, env={"OMP_NUM_THREADS": "1"}, success_codes=list(success_codes))


def _counts(report: Path) -> dict[str, int] | None:
    """Numbers of tests in pytest's report; None without a report."""
    if not report.exists():
        return None
    suites = list(ElementTree.parse(report).getroot().iter("testsuite"))
    total, failed, skipped = (
        sum(int(suite.get(key, 0)) for suite in suites for key in keys)
        for keys in (("tests",), ("failures", "errors"), ("skipped",))
    )
    return {"passed": total - failed - skipped, "failed": failed, "skipped": skipped}
