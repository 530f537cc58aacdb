"""Tells a user with a broken torchrec installation which packages clash and how to mend it.

torchrec's compiled half comes as two distributions, ``fbgemm-gpu`` (CUDA) and ``fbgemm-gpu-cpu``, which write the
same files: with both installed, whichever came last has overwritten the other, and removing one removes the files
of both. torchrec itself requires ``fbgemm-gpu`` whatever the machine, so an innocent ``pip install`` is enough to
break a working environment, and the import then fails far from the cause. This module reads the installed versions
(cheap: no import) and says what is wrong; :func:`import_torchrec` does the same for an import that fails, and
:func:`warn_of_clash` where TorchRec may not be wanted at all.
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

# torch -> torchrec and fbgemm, by minor version: fbgemm's own compatibility table. A pair newer than the last line is
# let through: its own import tells whether it fits.
TORCHREC_OF_TORCH = {"2.11": "1.6", "2.12": "1.7", "2.13": "1.8", "2.14": "1.9"}
OLDEST_TORCH = "2.11"
# Proposed where the torch that is there cannot stay: the one this project is developed with.
PREFERRED_TORCH = "2.13"

# What torchrec requires beside fbgemm (iopath: up to 1.6); named because `--no-deps` leaves it out.
TORCHREC_REQUIREMENTS = "torchmetrics==1.0.3 tensordict pyre-extensions tqdm iopath"


@dataclass(frozen=True)
class Installed:
    """Versions of the distributions that must fit together; ``None`` for one that is not installed.

    ``torchrec`` and ``fbgemm`` are ``"unknown"`` where the module is there under no distribution known here (a build
    from source, a nightly): such an installation is not judged.
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
        """Read the versions from the metadata of the running environment, importing nothing."""

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
    """Whether this machine shows an NVIDIA driver: without one, CUDA builds of fbgemm cannot be loaded."""
    return Path("/proc/driver/nvidia/version").exists() or shutil.which("nvidia-smi") is not None


def find_problem(installed: Installed) -> str | None:
    """Say in one sentence what is wrong with a set of installed versions, or ``None`` where nothing is known to be."""
    torch = _minor(installed.torch)
    torchrec = _minor(installed.torchrec)
    if installed.torchrec is None:
        return "torchrec is not installed, and the recsys strategies need it."
    if installed.fbgemm_gpu is not None and installed.fbgemm_gpu_cpu is not None:
        return (
            f"fbgemm-gpu {installed.fbgemm_gpu} and fbgemm-gpu-cpu {installed.fbgemm_gpu_cpu} are both installed:"
            " they write the same files, so each breaks the other. Exactly one may be there."
        )
    if installed.fbgemm_gpu is None and installed.fbgemm_gpu_cpu is None:
        return f"torchrec {installed.torchrec} is installed without fbgemm, its compiled half."
    if torch is not None and _numbers(torch) < _numbers(OLDEST_TORCH):
        return f"torch {installed.torch} is too old: torch {OLDEST_TORCH} or newer is needed."
    known = torch in TORCHREC_OF_TORCH or torchrec in TORCHREC_OF_TORCH.values()
    if torch is not None and torchrec is not None and known and TORCHREC_OF_TORCH.get(torch) != torchrec:
        return f"torch {installed.torch} and torchrec {installed.torchrec} do not fit: {_pairs()}."
    fbgemm = _minor(installed.fbgemm_gpu or installed.fbgemm_gpu_cpu)
    if torchrec is not None and fbgemm is not None and torchrec != fbgemm:
        return (
            f"torchrec {installed.torchrec} and fbgemm {installed.fbgemm_gpu or installed.fbgemm_gpu_cpu} do not fit:"
            " both must have the same major and minor version."
        )
    return None


def check_environment(installed: Installed | None = None, gpu: bool | None = None) -> None:
    """Raise if torchrec, fbgemm and torch are missing, clash, or do not fit each other.

    Reads package metadata only, so it can be called at every import.

    Args:
        installed: the versions to judge; by default those of the running environment.
        gpu: whether to propose the CUDA build; by default, whether the machine has an NVIDIA driver and torch is not
            a CPU build.

    Raises:
        SetupError: naming the packages, the versions found, and the pip commands that mend it.
    """
    installed = Installed.read() if installed is None else installed
    problem = find_problem(installed)
    if problem is not None:
        raise SetupError(_message(problem, installed, gpu))


def warn_of_clash(installed: Installed | None = None, gpu: bool | None = None) -> None:
    """Warn of what :func:`check_environment` refuses; say nothing where torchrec is not installed.

    What needs no TorchRec works in a broken environment too, so its import only warns.
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
    """Import torchrec, after :func:`check_environment`, or raise an error that says how to mend the environment.

    Raises:
        SetupError: as in :func:`check_environment`, or with the failed import as its cause.
    """
    installed = Installed.read() if installed is None else installed
    check_environment(installed, gpu)
    try:
        # fbgemm first: torchrec guards some of its imports, and would fail later and elsewhere.
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
    """Check that PyTorch is new enough for something.

    Args:
        minimum: ``major.minor``.
        purpose: what needs it, as a message begins.
        found: the version; the installed one where None.
        reason: what is different there, behind the version.

    Raises:
        SetupError: it is older.
    """
    found = importlib.metadata.version("torch") if found is None else found
    minor = _minor(found)
    if minor is not None and _numbers(minor) < _numbers(minimum):
        raise SetupError(
            f"{purpose} need torch {minimum} or newer, {reason}; torch {found} is installed: pip install"
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
            f"fbgemm-gpu {installed.fbgemm_gpu} is a CUDA build, which cannot be loaded without an NVIDIA driver and"
            f" a CUDA build of torch ({reason})."
        )
    else:
        problem = f"torchrec cannot be imported although the versions fit ({reason}). Its files are incomplete."
    return _message(problem, installed, gpu)


def _message(problem: str, installed: Installed, gpu: bool | None) -> str:
    commands = "\n".join(f"    {command}" for command in _mending_commands(installed, _wants_gpu(installed, gpu)))
    return f"{problem}\nFound: {installed}.\nThese commands mend it:\n{commands}"


def _mending_commands(installed: Installed, gpu: bool) -> list[str]:
    """The pip commands, in order, that lead from ``installed`` to a set that fits, keeping torch where it can."""
    torch = _minor(installed.torch)
    commands = []
    # Removing one of the two takes files of the other with it: both go, and the right one comes back.
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
    """``"2.13.0+cpu"`` -> ``"2.13"``; ``None`` for a version that is not known or not of that form."""
    match = re.match(r"\d+\.\d+", version or "")
    return match.group() if match else None


def _numbers(minor: str) -> tuple[int, ...]:
    return tuple(int(part) for part in minor.split("."))
