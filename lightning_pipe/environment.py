"""Detection of broken torchrec installations, with the pip commands that repair them.

The compiled part of torchrec is available as two distributions, ``fbgemm-gpu`` (CUDA) and ``fbgemm-gpu-cpu``, which
write the same files. If both are installed, the later one has overwritten the earlier one, and uninstalling either
removes the files of both. Since torchrec requires ``fbgemm-gpu`` on every machine, a plain ``pip install`` can break a
working environment, and the import then fails far from the cause. :func:`check_environment` reads the installed
versions, which is cheap because nothing is imported, and raises an error that describes the problem.
:func:`import_torchrec` also explains an import that fails, and :func:`warn_of_clash` only warns, for code that may not
need TorchRec. The versions that belong together are in ``stacks.toml``.
"""

from __future__ import annotations

import functools
import importlib
import importlib.metadata
import importlib.resources
import importlib.util
import re
import shutil
import tomllib
import warnings
from collections.abc import Callable
from dataclasses import dataclass, replace
from pathlib import Path
from types import ModuleType

from lightning_pipe.engine.common.errors import SetupError


@dataclass(frozen=True)
class Stack:
    """Versions that belong to one minor version of torch.

    Attributes:
        torchrec: minor version of torchrec; ``None`` if no fbgemm can be loaded with this torch.
        fbgemm: minor version of fbgemm, or ``None``.
        no_tables: reason why there is no torchrec, as a clause; ``None`` if there is one.
        needs: requirements of torchrec in addition to fbgemm, which ``pip install --no-deps torchrec`` skips.
        tested: exact versions of torch, torchrec and fbgemm that were tested.
    """

    torchrec: str | None
    fbgemm: str | None
    no_tables: str | None
    needs: tuple[str, ...]
    tested: dict[str, str]


@dataclass(frozen=True)
class Stacks:
    """Contents of ``stacks.toml``.

    Attributes:
        of_torch: one stack for each minor version of torch, oldest first.
        default: minor version of torch that this project is developed with, proposed if torch must be replaced.
        language_models: oldest minor version of torch for language models in stages.
        python: minor versions of Python, oldest first.
        bounds: versions of Lightning and transformers, as ``>=oldest,<next``, by distribution.
    """

    of_torch: dict[str, Stack]
    default: str
    language_models: str
    python: tuple[str, ...]
    bounds: dict[str, str]

    @property
    def pairs(self) -> dict[str, str]:
        """Minor version of torchrec and fbgemm by minor version of torch."""
        return {torch: stack.torchrec for torch, stack in self.of_torch.items() if stack.torchrec is not None}


@functools.cache
def stacks() -> Stacks:
    """Read ``stacks.toml`` at the first call."""
    table = tomllib.loads(importlib.resources.files("lightning_pipe").joinpath("stacks.toml").read_text("utf-8"))
    common = tuple(table["torchrec_needs"])
    return Stacks(
        of_torch={
            torch: Stack(
                torchrec=entry.get("torchrec"),
                fbgemm=entry.get("fbgemm"),
                no_tables=entry.get("no_tables"),
                needs=(*common, *entry.get("also_needs", ())),
                tested=entry["tested"],
            )
            for torch, entry in table["stacks"].items()
        },
        default=table["default"],
        language_models=table["language_models"],
        python=tuple(table["python"]),
        bounds={name: table[name] for name in ("lightning", "transformers")},
    )


@dataclass(frozen=True)
class Installed:
    """Versions of the distributions that must be compatible; ``None`` for a distribution that is not installed.

    The versions of torchrec and fbgemm are ``"unknown"`` if the module exists but belongs to no known distribution (a
    build from source or a nightly). Such installations are not checked.
    """

    torch: str | None
    torchrec: str | None
    fbgemm_gpu: str | None
    fbgemm_gpu_cpu: str | None

    @classmethod
    def read(
        cls,
        version: Callable[[str], str] = importlib.metadata.version,
        has_module: Callable[[str], bool] = lambda name: importlib.util.find_spec(name) is not None,
    ) -> Installed:
        """Read the versions from the metadata of the running environment, without imports."""

        def version_or_none(distribution: str) -> str | None:
            try:
                return version(distribution)
            except importlib.metadata.PackageNotFoundError:
                return None

        torchrec = version_or_none("torchrec")
        if torchrec is None and has_module("torchrec"):
            torchrec = "unknown"
        cuda, cpu = version_or_none("fbgemm-gpu"), version_or_none("fbgemm-gpu-cpu")
        if cuda is None and cpu is None and has_module("fbgemm_gpu"):
            cuda = "unknown"
        return cls(torch=version_or_none("torch"), torchrec=torchrec, fbgemm_gpu=cuda, fbgemm_gpu_cpu=cpu)

    def __str__(self) -> str:
        pairs = {
            "torch": self.torch,
            "torchrec": self.torchrec,
            "fbgemm-gpu": self.fbgemm_gpu,
            "fbgemm-gpu-cpu": self.fbgemm_gpu_cpu,
        }
        return ", ".join(f"{name} {found or '(not installed)'}" for name, found in pairs.items())


def has_nvidia_driver() -> bool:
    """Return True if an NVIDIA driver is installed. CUDA builds of fbgemm cannot be loaded without a driver."""
    return Path("/proc/driver/nvidia/version").exists() or shutil.which("nvidia-smi") is not None


def find_problem(installed: Installed) -> str | None:
    """Describe the problem with the installed versions in one sentence; ``None`` if no problem is known."""
    torch = _minor(installed.torch)
    torchrec = _minor(installed.torchrec)
    if installed.torchrec is None:
        stack = stacks().of_torch.get(torch or "")
        if stack is not None and stack.no_tables is not None:
            return _no_tables(installed.torch, stack.no_tables)
        return "The recsys strategies need torchrec, which is not installed."
    if installed.fbgemm_gpu is not None and installed.fbgemm_gpu_cpu is not None:
        return (
            f"fbgemm-gpu {installed.fbgemm_gpu} and fbgemm-gpu-cpu {installed.fbgemm_gpu_cpu} are both installed, but"
            " they write the same files and break each other. Only one of them may be installed."
        )
    if installed.fbgemm_gpu is None and installed.fbgemm_gpu_cpu is None:
        return f"torchrec {installed.torchrec} is installed without fbgemm, which contains its compiled operators."
    table = stacks()
    oldest = next(iter(table.of_torch))
    if torch is not None and _numbers(torch) < _numbers(oldest):
        return f"torch must be {oldest} or newer, got torch {installed.torch}."
    # Versions newer than the table are accepted: the import shows whether they are compatible.
    stack = table.of_torch.get(torch or "")
    newest = list(table.pairs.values())[-1]
    if stack is not None and stack.no_tables is not None and torchrec and _numbers(torchrec) <= _numbers(newest):
        return _no_tables(installed.torch, stack.no_tables)
    known = torch in table.pairs or torchrec in table.pairs.values()
    if torch is not None and torchrec is not None and known and table.pairs.get(torch) != torchrec:
        return f"torch {installed.torch} and torchrec {installed.torchrec} are not compatible: {_pairs()}."
    fbgemm = _minor(installed.fbgemm_gpu or installed.fbgemm_gpu_cpu)
    if torchrec is not None and fbgemm is not None and torchrec != fbgemm:
        return (
            f"torchrec {installed.torchrec} and fbgemm {installed.fbgemm_gpu or installed.fbgemm_gpu_cpu} are not"
            " compatible: both must have the same major and minor version."
        )
    return None


def check_environment(installed: Installed | None = None, gpu: bool | None = None) -> None:
    """Raise an error if torchrec or fbgemm is missing, or if torch, torchrec and fbgemm are not compatible.

    Reads package metadata only, so it can be called at every import.

    Args:
        installed: versions to check (default None: those of the running environment).
        gpu: True to propose the CUDA build, False to propose the CPU build (default None: the CUDA build if the machine
            has an NVIDIA driver and torch is not a CPU build).

    Raises:
        SetupError: If there is a problem, with the packages, the versions found and the pip commands that repair it.
    """
    installed = Installed.read() if installed is None else installed
    problem = find_problem(installed)
    if problem is not None:
        raise SetupError(_message(problem, installed, gpu))


def warn_of_clash(installed: Installed | None = None, gpu: bool | None = None) -> None:
    """Warn of the problems for which :func:`check_environment` raises an error, unless torchrec is not installed.

    Only a warning, because the parts of this package that do not need TorchRec work in a broken environment too.
    """
    installed = Installed.read() if installed is None else installed
    problem = find_problem(installed)
    if problem is not None and installed.torchrec is not None:
        warnings.warn(_message(problem, installed, gpu), stacklevel=3)


def import_torchrec(
    import_module: Callable[[str], ModuleType] = importlib.import_module,
    installed: Installed | None = None,
    gpu: bool | None = None,
) -> ModuleType:
    """Import torchrec after :func:`check_environment`.

    Raises:
        SetupError: As in :func:`check_environment`, or if the import fails, with the import error as its cause. The
            message contains the pip commands that repair the environment.
    """
    installed = Installed.read() if installed is None else installed
    check_environment(installed, gpu)
    try:
        # fbgemm first: torchrec catches some errors of its imports and would fail later in other places.
        import_module("fbgemm_gpu")
        return import_module("torchrec")
    except (ImportError, OSError, AttributeError) as error:
        raise SetupError(_explain_failed_import(error, installed, gpu)) from error


def require_torch(
    minimum: str,
    purpose: str,
    found: str | None = None,
    *,
    reason: str = "whose torch.distributed.pipelining they are built on",
) -> None:
    """Check that PyTorch is new enough for a feature.

    Args:
        minimum: oldest supported version, as ``major.minor``.
        purpose: name of the feature in the plural, as the subject of the message.
        found: version to check (default None: the installed version).
        reason: relative clause about the minimum version, which follows it in the message.

    Raises:
        SetupError: If the version is older than *minimum*.
    """
    found = importlib.metadata.version("torch") if found is None else found
    minor = _minor(found)
    if minor is not None and _numbers(minor) < _numbers(minimum):
        installed, default = Installed.read(), stacks().default
        commands = [f"pip install 'torch~={default}.0'"]
        if installed.torchrec is not None:  # which each version of torch needs in a version of its own
            commands += _mending_commands(replace(installed, torch=f"{default}.0"), _wants_gpu(installed, None))
        raise SetupError(
            f"{purpose} need torch {minimum} or newer, {reason}, but torch {found} is installed. Run:"
            f" {', '.join(commands)}"
        )


def require_release(package: str, purpose: str, found: str | None = None) -> None:
    """Check that Lightning or transformers is new enough. A release newer than those that were tested is accepted.

    Args:
        package: a distribution of :attr:`Stacks.bounds`.
        purpose: what needs it, in the plural, as the subject of the message.
        found: version to check (default None: the installed version; none is accepted).

    Raises:
        SetupError: If the version is older.
    """
    if found is None:
        try:
            found = importlib.metadata.version(package)
        except importlib.metadata.PackageNotFoundError:
            return
    minor, bounds = _minor(found), stacks().bounds[package]
    oldest = _minor(bounds.removeprefix(">="))
    if minor is not None and oldest is not None and _numbers(minor) < _numbers(oldest):
        raise SetupError(
            f"{purpose} need {package} {oldest} or newer, but {package} {found} is installed. Run: pip install"
            f" '{package}{bounds}'"
        )


def _explain_failed_import(error: BaseException, installed: Installed, gpu: bool | None) -> str:
    causes = []
    cause: BaseException | None = error
    while cause is not None:
        causes.append(f"{type(cause).__name__}: {cause}")
        cause = cause.__cause__
    reason = "; ".join(causes)
    cuda_build = _minor(installed.fbgemm_gpu) is not None and not str(installed.fbgemm_gpu).endswith("+cpu")
    if cuda_build and not _wants_gpu(installed, gpu):
        problem = (
            f"fbgemm-gpu {installed.fbgemm_gpu} is a CUDA build, which requires an NVIDIA driver and a CUDA build of"
            f" torch ({reason})."
        )
    else:
        problem = (
            f"torchrec cannot be imported although the versions are compatible ({reason}). The installation is"
            " incomplete."
        )
    return _message(problem, installed, gpu)


def _message(problem: str, installed: Installed, gpu: bool | None) -> str:
    commands = "\n".join(f"    {command}" for command in _mending_commands(installed, _wants_gpu(installed, gpu)))
    return f"{problem}\nFound: {installed}.\nRun these commands to repair the environment:\n{commands}"


def _mending_commands(installed: Installed, gpu: bool) -> list[str]:
    """Ordered pip commands that change ``installed`` into a compatible set of packages, keeping torch if possible."""
    torch = _minor(installed.torch)
    commands = []
    # Uninstalling either distribution removes files of the other, so both are uninstalled and one is reinstalled.
    present = [
        name
        for name, found in (("fbgemm-gpu", installed.fbgemm_gpu), ("fbgemm-gpu-cpu", installed.fbgemm_gpu_cpu))
        if found is not None
    ]
    if present:
        commands.append(f"pip uninstall -y {' '.join(present)}")
    table = stacks()
    if torch not in table.pairs:
        torch = table.default
        commands.append(f"pip install torch~={torch}.0")
    stack = table.of_torch[torch]
    if gpu:
        commands.append(f"pip install torchrec~={stack.torchrec}.0 fbgemm-gpu~={stack.fbgemm}.0")
    else:
        commands.append(f"pip install --no-deps torchrec~={stack.torchrec}.0 fbgemm-gpu-cpu~={stack.fbgemm}.0")
        commands.append(f"pip install {' '.join(stack.needs)}")
    return commands


def _wants_gpu(installed: Installed, gpu: bool | None) -> bool:
    if gpu is not None:
        return gpu
    return has_nvidia_driver() and not (installed.torch or "").endswith("+cpu")


def _no_tables(torch: str | None, reason: str) -> str:
    newest = list(stacks().pairs)[-1]
    return f"The recsys strategies need torch {newest} until a newer fbgemm exists, got torch {torch}: {reason}."


def _pairs() -> str:
    return ", ".join(f"torch {torch} needs torchrec {torchrec}" for torch, torchrec in stacks().pairs.items())


def _minor(version: str | None) -> str | None:
    """Minor version, ``"2.14.1+cpu"`` -> ``"2.14"``; ``None`` if it is unknown or has another form."""
    match = re.match(r"\d+\.\d+", version or "")
    return match.group() if match else None


def _numbers(minor: str) -> tuple[int, ...]:
    return tuple(int(part) for part in minor.split("."))
