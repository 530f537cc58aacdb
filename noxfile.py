"""The tests on the other supported versions of PyTorch: ``nox -s "tests(2.13)" -- tests/_compat``.

A session makes an environment from the pinned list, with another PyTorch and the TorchRec that fits it, and passes its
arguments to pytest. ``nox -s "tests(2.14)" --force-python 3.13`` tries another Python. The downloads are some GB.
"""

from __future__ import annotations

import re
from pathlib import Path

import nox

# Exact versions of torch, torchrec and fbgemm by minor version of torch.
STACKS = {
    "2.14": ("2.14.1", "1.9.2", "1.9.0"),
    "2.13": ("2.13.0", "1.8.0", "1.8.0"),
    "2.11": ("2.11.0", "1.6.1", "1.6.0"),
}
# Requirements of TorchRec, which is installed without the CUDA build of fbgemm. Only TorchRec 1.6 imports iopath.
NEEDS = ("torchmetrics==1.0.3", "tensordict", "pyre-extensions", "tqdm", "iopath")
# Packages of the pinned lists that another PyTorch or TorchRec needs in another version.
LOOSE = ("setuptools", "tensordict")


@nox.session(venv_backend="uv")
@nox.parametrize("minor", list(STACKS), ids=list(STACKS))
def tests(session: nox.Session, minor: str) -> None:
    """Run pytest with the given arguments on one version of PyTorch."""
    torch, torchrec, fbgemm = STACKS[minor]
    lists = "".join(Path(f"requirements/{name}.txt").read_text(encoding="utf-8") for name in ("train", "test"))
    pinned = re.findall(r"^(\S+)==(\S+)", lists, re.MULTILINE)
    packages = [name if name in LOOSE else f"{name}=={version}" for name, version in pinned]
    session.install(f"torch=={torch}", *packages, *NEEDS)
    session.install("--no-deps", f"torchrec=={torchrec}", f"fbgemm-gpu-cpu=={fbgemm}")
    session.install("--no-deps", "--no-build-isolation", "--editable", ".")
    session.run("python", "-m", "pytest", "-q", *session.posargs, env={"OMP_NUM_THREADS": "1"})
