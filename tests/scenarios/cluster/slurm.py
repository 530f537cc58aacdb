"""A Slurm on this machine: a controller and two nodes, each a daemon of Debian's ``slurm-wlm`` and ``munge``."""

from __future__ import annotations

import os
import secrets
import shutil
import socket
import subprocess
import sys
import time
from collections.abc import Callable, Sequence
from pathlib import Path

from tests.patience import HANG

ROOT = Path(__file__).parents[3]
NEEDS = ("munged", "slurmctld", "slurmd", "srun", "sbatch")
NODES = 2
_CONFIG = """\
ClusterName=tests
SlurmctldHost={host}(127.0.0.1)
SlurmctldPort={port}
AuthType=auth/munge
AuthInfo=socket={folder}/munge.socket
SlurmUser=root
StateSaveLocation={folder}/state
SlurmdSpoolDir={folder}/spool.%n
SlurmctldPidFile={folder}/slurmctld.pid
SlurmdPidFile={folder}/slurmd.%n.pid
SlurmctldLogFile={folder}/slurmctld.log
SlurmdLogFile={folder}/slurmd.%n.log
ProctrackType=proctrack/linuxproc
TaskPlugin=task/none
SwitchType=switch/none
MpiDefault=none
ReturnToService=2
SchedulerParameters=sched_interval=1
SelectType=select/cons_tres
SelectTypeParameters=CR_Core
SlurmdParameters=config_overrides
KillWait={wait}
PartitionName=main Nodes=ALL Default=YES State=UP
"""


def why_not() -> str:
    """Why there can be no Slurm here; empty if there can."""
    missing = [name for name in NEEDS if shutil.which(name) is None]
    if missing:
        return f"Slurm is not installed (apt-get install slurm-wlm munge): no {', '.join(missing)}"
    return "" if os.geteuid() == 0 else "Slurm's daemons need root"


class Slurm:
    """The daemons, and the commands that use them."""

    def __init__(self, folder: Path) -> None:
        self._folder = folder
        self._daemons: list[subprocess.Popen[bytes]] = []
        # Of the machine's own Slurm, if the tests run in one of its jobs.
        others = {name: value for name, value in os.environ.items() if not name.startswith("SLURM")}
        self.environment = {
            **others,
            "SLURM_CONF": str(folder / "slurm.conf"),
            "PYTHONPATH": str(ROOT),
            "OMP_NUM_THREADS": "1",
            "GLOO_SOCKET_IFNAME": "lo",
            # The nodes' names are Slurm's own.
            "MASTER_ADDR": "127.0.0.1",
            "PATH": os.pathsep.join([str(Path(sys.executable).parent), os.environ["PATH"]]),
        }

    def start(self) -> None:
        folder, host = self._folder, socket.gethostname()
        key = folder / "munge.key"
        key.write_bytes(secrets.token_bytes(64))
        key.chmod(0o600)
        (folder / "state").mkdir()
        nodes = "".join(
            f"NodeName=n{node} NodeHostname={host} NodeAddr=127.0.0.1 Port={_port()} CPUs=2 State=UNKNOWN\n"
            for node in range(NODES)
        )
        text = _CONFIG.format(folder=folder, host=host, port=_port(), wait=int(HANG))
        (folder / "slurm.conf").write_text(nodes + text)
        self._daemon(
            "munged",
            "--foreground",
            "--force",
            f"--key-file={key}",
            *(f"--{name}-file={folder}/munge.{name}" for name in ("pid", "log", "seed")),
            f"--socket={folder}/munge.socket",
        )
        self._until(lambda: (folder / "munge.socket").exists(), "munged has no socket")
        self._daemon("slurmctld", "-D", "-i")
        for node in range(NODES):
            self._daemon("slurmd", "-D", "-N", f"n{node}")
        idle = f"{NODES} idle"
        self._until(lambda: self._said("sinfo", "-h", "-o", "%D %t").strip() == idle, "the nodes do not come up")

    def run(self, *command: str) -> str:
        """What a command of Slurm prints."""
        done = subprocess.run(command, env=self.environment, capture_output=True, text=True, timeout=HANG, check=False)
        assert done.returncode == 0, f"{' '.join(command)} failed:\n{done.stdout}{done.stderr}\n{self.logs()}"
        return done.stdout

    def submit(self, script: Path, output: Path, *arguments: str, folder: Path = ROOT) -> str:
        """Submit a batch script that runs in *folder*, and return the number of its job."""
        options = ("--parsable", f"--chdir={folder}", f"--output={output}", "--open-mode=append", "--requeue")
        return self.run("sbatch", *options, str(script), *arguments).strip()

    def state(self, job: str) -> str:
        """``RUNNING``, ``PENDING``, ``COMPLETED`` or another state of a job."""
        shown = self.run("scontrol", "show", "job", job)
        return next(word for word in shown.split() if word.startswith("JobState=")).removeprefix("JobState=")

    def start_now(self, job: str) -> None:
        """Let a requeued job begin, which Slurm delays by minutes."""
        self.run("scontrol", "update", f"JobId={job}", "StartTime=now")

    def until(self, holds: Callable[[], bool], what: str, output: Path) -> None:
        """Wait for something that a job does, whose *output* an error shows."""
        self._until(holds, what, lambda: output.read_text() if output.exists() else "no output")

    def logs(self) -> str:
        return "\n".join(f"{log.name}:\n{log.read_text()[-2000:]}" for log in sorted(self._folder.glob("slurm*.log")))

    def stop(self) -> None:
        for daemon in reversed(self._daemons):
            daemon.terminate()
        for daemon in self._daemons:
            try:
                daemon.wait(30)
            except subprocess.TimeoutExpired:
                daemon.kill()

    def _until(self, holds: Callable[[], bool], what: str, told: Callable[[], str] | None = None) -> None:
        end = time.monotonic() + 2 * HANG
        while not holds():
            assert time.monotonic() < end, f"{what}:\n{told() if told else ''}\n{self.logs()}"
            time.sleep(0.05)

    def _said(self, *command: str) -> str:
        return subprocess.run(command, env=self.environment, capture_output=True, text=True, check=False).stdout

    def _daemon(self, *command: str) -> None:
        with (self._folder / f"{command[0]}.{len(self._daemons)}.out").open("wb") as output:
            self._daemons.append(
                subprocess.Popen(command, env=self.environment, stdout=output, stderr=subprocess.STDOUT)
            )


def _port() -> int:
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        return int(free.getsockname()[1])


def losses(folder: Path, ranks: Sequence[int] = range(NODES)) -> list[list[float]]:
    """Of each rank, the losses of all batches that it has trained, over all starts of the job."""
    files = [folder / f"losses.{rank}" for rank in ranks]
    return [[float(line) for line in file.read_text().split()] if file.exists() else [] for file in files]
