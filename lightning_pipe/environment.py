"""Detection of broken torchrec installations, with the pip commands that repair them.

The compiled part of torchrec is available as two distributions, ``fbgemm-gpu`` (CUDA) and ``fbgemm-gpu-cpu``, which
write the same files. If both are installed, the later one has overwritten the earlier one, and uninstalling either
removes the files of both. Since torchrec requires ``fbgemm-gpu`` on every machine, a plain ``pip install`` can break a
working environment, and the import then fails far from the cause. :func:`check_environment` reads the installed
versions, which is cheap because nothing is imported, and raises an error that describes the problem.
:func:`import_torchrec` also explains an import that fails, and :func:`warn_of_clash` only warns, for code that may not
need TorchRec.
"""

from __future__ import annotations

import importlib
import importlib.metadata
import importlib.util
import re
import shutil
import warnings
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from types import ModuleType

from lightning_pipe.engine.common.errors import SetupError

__all__ = ["Installed", "check_environment", "find_problem", "import_torchrec", "warn_of_clash"]

# torch -> torchrec and fbgemm, by minor version, from fbgemm's compatibility table. Pairs newer than the last entry are
# accepted, because the import shows whether they are compatible.
TORCHREC_OF_TORCH = {"2.11": "1.6", "2.12": "1.7", "2.13": "1.8", "2.14": "1.9"}
OLDEST_TORCH = "2.11"
# Proposed if the installed torch must be replaced; this project is developed with it.
PREFERRED_TORCH = "2.13"

# Requirements of torchrec in addition to fbgemm (iopath: up to 1.6), which `--no-deps` skips.
TORCHREC_REQUIREMENTS = "torchmetrics==1.0.3 tensordict pyre-extensions tqdm iopath"


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
        return "The recsys strategies need torchrec, which is not installed."
    if installed.fbgemm_gpu is not None and installed.fbgemm_gpu_cpu is not None:
        return (
            f"fbgemm-gpu {installed.fbgemm_gpu} and fbgemm-gpu-cpu {installed.fbgemm_gpu_cpu} are both installed, but"
            " they write the same files and break each other. Only one of them may be installed."
        )
    if installed.fbgemm_gpu is None and installed.fbgemm_gpu_cpu is None:
        return f"torchrec {installed.torchrec} is installed without fbgemm, which contains its compiled operators."
    if torch is not None and _numbers(torch) < _numbers(OLDEST_TORCH):
        return f"torch must be {OLDEST_TORCH} or newer, got torch {installed.torch}."
    known = torch in TORCHREC_OF_TORCH or torchrec in TORCHREC_OF_TORCH.values()
    if torch is not None and torchrec is not None and known and TORCHREC_OF_TORCH.get(torch) != torchrec:
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
        raise SetupError(
            f"{purpose} need torch {minimum} or newer, {reason}, but torch {found} is installed. Run: pip install"
            f" 'torch>={minimum}'"
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
    if torch not in TORCHREC_OF_TORCH:
        torch = PREFERRED_TORCH
        commands.append(f"pip install torch~={torch}.0")
    release = f"{TORCHREC_OF_TORCH[torch]}.0"
    if gpu:
        commands.append(f"pip install torchrec~={release} fbgemm-gpu~={release}")
    else:
        commands.append(f"pip install --no-deps torchrec~={release} fbgemm-gpu-cpu~={release}")
        commands.append(f"pip install {TORCHREC_REQUIREMENTS}")
    return commands


def _wants_gpu(installed: Installed, gpu: bool | None) -> bool:
    if gpu is not None:
        return gpu
    return has_nvidia_driver() and not (installed.torch or "").endswith("+cpu")


def _pairs() -> str:
    return ", ".join(f"torch {torch} needs torchrec {torchrec}" for torch, torchrec in TORCHREC_OF_TORCH.items())


def _minor(version: str | None) -> str | None:
    """Minor version, ``"2.13.0+cpu"`` -> ``"2.13"``; ``None`` if it is unknown or has another form."""
    match = re.match(r"\d+\.\d+", version or "")
    return match.group() if match else None


def _numbers(minor: str) -> tuple[int, ...]:
    return tuple(int(part) for part in minor.split("."))
