"""Runs the parts and writes the result of each as soon as it ends."""

from __future__ import annotations

import ctypes
import hashlib
import importlib.metadata
import importlib.util
import json
import os
import shutil
import signal
import subprocess
import time
import uuid
from collections.abc import Callable, Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Any

import torch

from benchmarks.table import MARK, end
from lightning_pipe.engine.common.atomic_file import atomic_write
from lightning_pipe.environment import import_torchrec, require_min_package_version
from scripts.gpu.comparison import compare
from scripts.gpu.parts import Command, Part

__all__ = ["BAD", "ROOT", "impossible", "machine", "read", "run_parts"]

ROOT = Path(__file__).resolve().parent.parent.parent
BAD = ("differed", "failed")
_LEAST = 10.0  # seconds that must be left for a part to begin
_PACKAGES = ("torch", "torchrec", "fbgemm-gpu", "fbgemm-gpu-cpu", "lightning", "triton", "transformers", "peft")


def machine() -> dict[str, Any]:
    """Versions, device and code that a result belongs to."""
    versions = {}
    for name in _PACKAGES:
        try:
            versions[name] = importlib.metadata.version(name)
        except importlib.metadata.PackageNotFoundError:
            continue
    if torch.cuda.is_available():
        versions["cuda"] = str(torch.version.cuda)
        versions["gpu"] = torch.cuda.get_device_name()
    git = subprocess.run(["git", "rev-parse", "HEAD"], cwd=ROOT, capture_output=True, text=True, check=False)
    code = hashlib.sha256()  # also differs for changes that are not committed
    for folder in ("lightning_pipe", "scripts", "benchmarks"):
        for path in sorted((ROOT / folder).rglob("*.py")):
            code.update(path.read_bytes())
    return {"versions": versions, "commit": git.stdout.strip() or "unknown", "code": code.hexdigest()[:12]}


def impossible(part: Part) -> str:
    """Reason why this machine cannot run *part*; empty if it can."""
    for need in part.needs:
        if need == "gpu":
            if not torch.cuda.is_available():
                return "needs a GPU"
        elif need in ("torchrec", "stages"):
            try:
                if need == "torchrec":
                    import_torchrec()
                else:
                    require_min_package_version("torch", "2.13", "language models in pipeline stages")
            except Exception as error:
                carry = ". Or carry wheels along, as docs/gpu.md says" if need == "stages" else ""
                return f"{str(error).splitlines()[0]}{carry}"
        elif need.startswith("package "):
            if importlib.util.find_spec(need.removeprefix("package ")) is None:
                return f"needs the {need}"
        elif shutil.which(need) is None:
            return f"needs {need} on PATH"
    return ""


def read(path: Path, kind: type = dict) -> Any:
    """Contents of a JSON file; None if there is none of this kind."""
    try:
        contents = json.loads(path.read_text(encoding="utf-8"))
    except (OSError, ValueError):
        return None
    return contents if isinstance(contents, kind) else None


def run_parts(
    chosen: Sequence[Part],
    out: Path,
    about: dict[str, Any],
    minutes: float,
    again: bool = False,
    tell: Callable[[str], None] = print,
) -> list[str]:
    """Run parts that have no result of the same code, versions and arguments, until the time is over.

    Args:
        chosen: parts in their order.
        out: folder of the results.
        about: properties that a result must share to be used again.
        minutes: time for all parts.
        again: True to run parts that have a result.
        tell: function that prints a line.

    Returns:
        Names of parts without a result, for lack of time.
    """
    out.mkdir(parents=True, exist_ok=True)
    deadline = time.monotonic() + 60 * minutes
    left: list[str] = []
    for part in chosen:
        path = out / f"{part.name}.json"
        key = {**about, "part": part.name, "commands": [command.line("") for command in part.commands]}
        previous = read(path)
        if previous is not None and not again and {**previous, **key, "status": previous.get("status")} == previous:
            tell(f"{part.name}: {previous['status']} (earlier result)")
            continue
        path.unlink(missing_ok=True)  # an interrupted run leaves no result of other code
        seconds = min(part.seconds, deadline - time.monotonic() - 2)
        if seconds < min(_LEAST, part.seconds):
            left.append(part.name)
            continue
        begun = time.monotonic()
        status, why, more = _run(part, out / part.name, seconds)
        if status == "late" and seconds < part.seconds:
            left.append(part.name)
            tell(f"{part.name}: stopped, since the time is over")
            continue
        status = "failed" if status == "late" else status
        elapsed = round(time.monotonic() - begun, 1)
        result = {**key, "status": status, "why": why, "seconds": elapsed, "look_at": part.look_at, **more}
        with atomic_write(path) as file:
            file.write_text(json.dumps({"shows": part.shows, **result}, indent=1) + "\n", encoding="utf-8")
        tell(f"{part.name}: {status}, {elapsed:.0f} s{f' ({why.splitlines()[0]})' if why else ''}")
    return left


def _run(part: Part, folder: Path, seconds: float) -> tuple[str, str, dict[str, Any]]:
    """Status, reason and measurements of *part*."""
    if reason := impossible(part):
        return "not possible", reason, {}
    shutil.rmtree(folder, ignore_errors=True)
    folder.mkdir(parents=True)
    deadline = time.monotonic() + seconds
    if part.possible is not None:
        code, text = _execute(part.possible, folder, "possible", min(60.0, seconds))
        if code != 0:
            return "not possible", text if code is not None else f"hangs: {text}", {}
    for number, command in enumerate(part.commands):
        code, text = _execute(command, folder, str(number), deadline - time.monotonic())
        if code is None:
            return "late", f"took more than {seconds:.0f} s\n{text}", {}
        if code:
            return "failed", f"exit status {code}\n{text}", {}
        if missing := [
            mark for mark in command.marks if mark not in (folder / f"{number}.log").read_text(errors="replace")
        ]:
            return "failed", f"the output has no {', '.join(map(repr, missing))}\n{text}", {}
    try:
        compared = [asdict(comparison) for rule in part.rules for comparison in compare(folder, rule)]
        peaks = _peaks(folder)
    except Exception as error:  # the other parts still run
        return "failed", f"what the programs saved cannot be compared: {type(error).__name__}: {error}", {}
    figures = read(folder / "figures.json", list) or []
    more = {"compared": compared, "figures": figures, "peaks": peaks}
    wrong = [comparison for comparison in compared if not comparison["right"]]
    if wrong:
        return "differed", f"{len(wrong)} of {len(compared)} comparisons", more
    if not (compared if part.rules else figures):
        return "failed", "nothing was compared or measured", more
    return "passed", "", more


def _peaks(folder: Path) -> dict[str, int]:
    """The caching allocator's peak of each way, in bytes."""
    path = folder / "values.pt"
    results = torch.load(path, weights_only=True) if path.exists() else {}
    return {way: result["peak"][0] for way, result in results.items() if result.get("peak")}


def _end_with_runner() -> None:
    """Let this process be killed when the runner is, which has then no time to end it (``prctl`` of Linux)."""
    ctypes.CDLL(None).prctl(1, signal.SIGKILL)  # PR_SET_PDEATHSIG


def _execute(command: Command, folder: Path, name: str, seconds: float) -> tuple[int | None, str]:
    """Exit status of *command*, None after a time limit, and the last lines of its output."""
    mark = uuid.uuid4().hex
    environment = {
        "CUBLAS_WORKSPACE_CONFIG": ":4096:8",  # for deterministic kernels
        "OMP_NUM_THREADS": "1",
        **os.environ,
        **command.environment,
        MARK: mark,
    }
    log = folder / f"{name}.log"
    with log.open("w") as output:
        process = subprocess.Popen(
            command.line(str(folder)),
            cwd=ROOT,
            env=environment,
            stdout=output,
            stderr=output,
            start_new_session=True,
            preexec_fn=_end_with_runner,
        )
        try:
            code: int | None = process.wait(max(0.0, seconds))
        except subprocess.TimeoutExpired:
            code = None
        finally:
            end(process, mark)
    lines = [line for line in log.read_text(errors="replace").splitlines() if line.strip()]
    # torchrun's report of a failure follows the ranks' own lines.
    relevant = [line for line in lines if "torch.distributed.elastic" not in line and "torch/distributed/" not in line]
    return code, "\n".join(relevant[-8:])
