"""Check of the installed versions of torch, torchrec and fbgemm, whose mistakes are common and hard to recognize.

The compiled part of torchrec is available as two distributions, ``fbgemm-gpu`` (CUDA) and ``fbgemm-gpu-cpu``, which
write the same files. Since torchrec requires ``fbgemm-gpu`` on every machine, a plain ``pip install`` can break a
working environment, and the import then fails far from the cause.
"""

from __future__ import annotations

import importlib
import importlib.metadata
import re
from types import ModuleType

from lightning_pipe.engine.common.errors import SetupError

# Minor version of torchrec and fbgemm for each minor version of torch that is tested. docs/stacks.md lists the same.
TORCHREC = {"2.14": "1.9", "2.13": "1.8", "2.11": "1.6"}

_PACKAGES = ("torch", "torchrec", "fbgemm-gpu", "fbgemm-gpu-cpu")


def version_problem() -> str | None:
    """Sentences about torchrec or fbgemm of versions that do not fit torch; None if none is known.

    Reads package metadata only, so that it is cheap. An installation without metadata, and a torch that is not in the
    table, are not judged.
    """
    versions = {name: _get_installed_version(name) for name in _PACKAGES}
    expected = TORCHREC.get(_parse_minor_version(versions["torch"]) or "")
    minors = [_parse_minor_version(versions[name]) for name in _PACKAGES[1:] if versions[name] is not None]
    if versions["fbgemm-gpu"] and versions["fbgemm-gpu-cpu"]:
        problem = "fbgemm-gpu and fbgemm-gpu-cpu are both installed, but they write the same files"
    elif expected and any(minor != expected for minor in minors):
        problem = "torch, torchrec and fbgemm do not fit together"
    else:
        return None
    return f"{problem}. {_format_version_advice()}"


def import_torchrec() -> ModuleType:
    """Import torchrec after a check of the versions."""
    if (problem := version_problem()) is not None:
        raise SetupError(problem)
    try:
        # fbgemm first: torchrec catches some errors of its imports and would fail later in other places.
        importlib.import_module("fbgemm_gpu")
        return importlib.import_module("torchrec")
    except (ImportError, OSError, AttributeError) as error:
        cause = error.__cause__ or error
        raise SetupError(
            "The recsys strategies need torchrec and fbgemm, which cannot be imported"
            f" ({type(cause).__name__}: {cause}). {_format_version_advice()}"
        ) from error


def describe_versions() -> str:
    """Names and versions of the installed ones of torch, torchrec and fbgemm, separated by commas."""
    return ", ".join(f"{name} {version}" for name in _PACKAGES if (version := _get_installed_version(name)) is not None)


def require_min_package_version(package: str, minimum: str, purpose: str) -> None:
    """Check that a package is new enough for a feature. A package without metadata is not judged.

    Args:
        package: name of the distribution.
        minimum: oldest supported version, as ``major.minor``.
        purpose: name of the feature in the plural, as the subject of the message.

    Raises:
        SetupError: If the version is older than *minimum*.
    """
    version = _get_installed_version(package)
    minor = _parse_minor_version(version)
    if minor is not None and _parse_version_tuple(minor) < _parse_version_tuple(minimum):
        raise SetupError(
            f"{purpose} need {package} {minimum} or newer, but {package} {version} is installed. Run: pip install"
            f" '{package}~={minimum}.0'"
        )


def _format_version_advice() -> str:
    fits = ", ".join(f"torch {torch} with torchrec and fbgemm {torchrec}" for torch, torchrec in TORCHREC.items())
    versions = ", ".join(f"{name} {_get_installed_version(name) or '(not installed)'}" for name in _PACKAGES)
    return (
        f"Found: {versions}. These versions fit together: {fits}. Uninstall fbgemm-gpu and fbgemm-gpu-cpu, then install"
        " one of them: fbgemm-gpu-cpu on a machine without an NVIDIA driver, with torchrec by --no-deps. The page"
        " docs/stacks.md has the commands."
    )


def _get_installed_version(package: str) -> str | None:
    try:
        return importlib.metadata.version(package)
    except importlib.metadata.PackageNotFoundError:
        return None


def _parse_minor_version(version: str | None) -> str | None:
    """``"2.14.1+cpu"`` -> ``"2.14"``; None if it is unknown or has another form."""
    match = re.match(r"\d+\.\d+", version or "")
    return match.group() if match else None


def _parse_version_tuple(minor: str) -> tuple[int, ...]:
    return tuple(map(int, minor.split(".")))
