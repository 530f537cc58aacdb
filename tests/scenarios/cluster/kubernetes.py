"""The manifests of ``examples/cluster``, and their pods as processes of this machine."""

from __future__ import annotations

import os
import re
import signal
import subprocess
import sys
import time
from collections.abc import Sequence
from contextlib import suppress
from pathlib import Path
from typing import Any

import lightning.pytorch as pl
import yaml
from lightning.pytorch.callbacks import Callback

from tests.patience import HANG

ROOT = Path(__file__).parents[3]
FOLDER = ROOT / "examples" / "cluster"
# The file in which a held rank writes its process, in its environment.
HELD = "LIGHTNING_PIPE_TEST_HELD"


def documents(name: str) -> dict[str, Any]:
    """The objects of a manifest by kind."""
    return {one["kind"]: one for one in yaml.safe_load_all((FOLDER / f"{name}.yaml").read_text(encoding="utf-8"))}


def job_pod() -> dict[str, Any]:
    """The spec of the Job's pods."""
    return dict(documents("kubernetes-job")["Job"]["spec"]["template"]["spec"])


def job_container() -> dict[str, Any]:
    (container,) = job_pod()["containers"]
    return dict(container)


def variables(container: dict[str, Any]) -> dict[str, str]:
    """A container's environment; all values are literal."""
    return {one["name"]: one["value"] for one in container["env"]}


def expanded(word: str, environment: dict[str, str]) -> str:
    """A word of a command, as the kubelet expands it: ``$(NAME)`` stays if there is no such variable."""
    return re.sub(r"\$\(([A-Za-z_]\w*)\)", lambda found: environment.get(found[1], found[0]), word)


class HeldAt(Callback):
    """Holds a rank after a batch until it has received SIGTERM, so that training is not over before.

    Args:
        batch: index of the batch.
    """

    def __init__(self, batch: int) -> None:
        self.batch = batch

    def on_train_batch_end(
        self, trainer: pl.Trainer, module: pl.LightningModule, outputs: Any, batch: Any, batch_idx: int
    ) -> None:
        if batch_idx != self.batch or HELD not in os.environ:
            return
        Path(os.environ[HELD]).write_text(f"{os.getpid()}\n")
        end = time.monotonic() + HANG
        while not trainer._signal_connector.told:  # type: ignore[attr-defined]
            assert time.monotonic() < end, "no SIGTERM came"
            time.sleep(0.01)  # a handler of the signal runs in this thread


class Pod:
    """A pod of the Job: the command of its container, in a folder like the image's with the shared volume.

    Args:
        index: the pod's completion index.
        folder: of the run; ``logs`` in it is the volume.
        port: the first pod's, in place of the one in the manifest.
        more: arguments after those of the manifest.
        held: whether `HeldAt` holds this pod.
        config: in place of the one in the manifest.
    """

    def __init__(
        self, index: int, folder: Path, port: int, config: Path, more: Sequence[str] = (), held: bool = False
    ) -> None:
        container = job_container()
        self.output, self._held = folder / f"output.{index}", folder / f"held.{index}"
        self._held.unlink(missing_ok=True)
        workspace = folder / f"workspace.{index}"
        workspace.mkdir(exist_ok=True)
        for name, target in (("examples", ROOT / "examples"), ("logs", folder / "logs")):
            target.mkdir(exist_ok=True)
            with suppress(FileExistsError):
                (workspace / name).symlink_to(target)
        of_the_pod = {**variables(container), "JOB_COMPLETION_INDEX": str(index)}
        words = [expanded(word, of_the_pod) for word in [*container["command"], *container["args"]]]
        # All pods have this machine's name, on which the port may be in use.
        words = [re.sub(r"^(--master-addr=).*", r"\g<1>127.0.0.1", word) for word in words]
        words = [re.sub(r"^(--master-port=).*", rf"\g<1>{port}", word) for word in words]
        words = [re.sub(r"^(--config=).*", rf"\g<1>{config}", word) for word in words]
        own = environment() | of_the_pod | ({HELD: str(self._held)} if held else {})
        with self.output.open("ab") as output:
            self.process = subprocess.Popen(
                [*words, *more],
                cwd=workspace,
                env=own | {"OMP_NUM_THREADS": "1"},
                stdout=output,
                stderr=subprocess.STDOUT,
                start_new_session=True,
            )

    def until_held(self) -> None:
        """Wait until `HeldAt` holds this pod."""
        end = time.monotonic() + HANG
        while not (self._held.exists() and self._held.read_text().endswith("\n")):
            assert self.process.poll() is None, f"the pod has ended:\n{self.output.read_text()}"
            assert time.monotonic() < end, f"the pod does not train:\n{self.output.read_text()}"
            time.sleep(0.05)

    def delete(self) -> None:
        """What the kubelet does first with a deleted pod; `ended` waits as it does."""
        self.process.terminate()

    def lose(self) -> None:
        """End all processes of a held pod, as when its node is lost."""
        self.process.kill()
        os.kill(int(self._held.read_text()), signal.SIGKILL)

    def ended(self) -> int:
        """The exit code, by which the Job decides whether the index has succeeded."""
        return self.process.wait(HANG)

    def end(self) -> None:
        self.process.terminate()
        with suppress(subprocess.TimeoutExpired):
            self.process.wait(60)
        with suppress(ProcessLookupError):
            os.killpg(self.process.pid, signal.SIGKILL)


def without_profile(folder: Path) -> Path:
    """The configuration of the manifest, in a file in *folder*, without its profile of the tasks.

    Training after a profile differs in the last bits from training without one, and from run to run.
    """
    (given,) = [word.removeprefix("--config=") for word in job_container()["args"] if word.startswith("--config=")]
    configuration = yaml.safe_load((ROOT / given).read_text(encoding="utf-8"))
    trainer = configuration["trainer"]
    trainer["callbacks"] = [one for one in trainer["callbacks"] if not one["class_path"].endswith("PipelineProfiler")]
    file = folder / "config.yaml"
    file.write_text(yaml.safe_dump(configuration), encoding="utf-8")
    return file


def environment() -> dict[str, str]:
    """Of a process that trains here."""
    commands = os.pathsep.join([str(Path(sys.executable).parent), os.environ["PATH"]])
    return {**os.environ, "PATH": commands, "PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": "1", "GLOO_SOCKET_IFNAME": "lo"}
