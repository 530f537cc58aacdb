"""On a real Slurm: a job that is stopped by its signal goes on exactly, whenever the signal comes."""

from __future__ import annotations

import random
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch

from tests.patience import HANG
from tests.scenarios.cluster.metrics import last_metrics
from tests.scenarios.cluster.slurm import ROOT, Slurm, losses, why_not
from tests.strategies.cases import difference

SCRIPT = """\
#!/bin/bash
#SBATCH --nodes=2
#SBATCH --ntasks-per-node=1
srun --kill-on-bad-exit=0 python -m tests.scenarios.cluster.slurm_program "$@"
"""

BUSY = ("PENDING", "RUNNING", "COMPLETING")

pytestmark = [
    pytest.mark.exhaustive,
    pytest.mark.skipif(bool(why_not()), reason=why_not()),
]


@pytest.fixture(scope="module")
def slurm(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Slurm]:
    made = Slurm(tmp_path_factory.mktemp("slurm"))
    try:
        made.start()
        yield made
    finally:
        made.stop()


def submitted(slurm: Slurm, folder: Path, kind: str, epochs: int) -> str:
    folder.mkdir()
    script = folder / "job.sbatch"
    script.write_text(SCRIPT)
    return slurm.submit(script, folder / "output", kind, str(folder), str(epochs))


def ended_well(slurm: Slurm, folder: Path, job: str) -> None:
    slurm.until(lambda: slurm.state(job) not in BUSY, "the job goes on", folder / "output")
    assert slurm.state(job) == "COMPLETED", (folder / "output").read_text()


def preempted(slurm: Slurm, folder: Path, kind: str, times: int, epochs: int) -> str:
    """A job that got the signal so many times, each time after a random number of batches."""
    job, draws = submitted(slurm, folder, kind, epochs), random.Random(7)
    output = folder / "output"
    for time in range(1, times + 1):
        enough = len(losses(folder)[0]) + draws.randint(1, 5)
        slurm.until(lambda enough=enough: len(losses(folder)[0]) >= enough, "no batch is trained", output)  # type: ignore[misc]
        slurm.run("scancel", "--signal=USR1", job)
        slurm.until(lambda time=time: output.read_text().count("the job is requeued") >= time, "not requeued", output)  # type: ignore[misc]
        slurm.until(lambda: slurm.state(job) == "PENDING", "the job does not end", output)
        slurm.start_now(job)
    return job


def test_a_preempted_job_goes_on_to_the_bit(slurm: Slurm, tmp_path: Path) -> None:
    kind, times = "recsys", 2
    epochs = 6 + 2 * times  # of six batches; a preemption takes up to five, and those until all ranks know of it
    whole = submitted(slurm, tmp_path / "whole", kind, epochs)
    ended_well(slurm, tmp_path / "whole", whole)
    job = preempted(slurm, tmp_path / "stopped", kind, times, epochs)
    ended_well(slurm, tmp_path / "stopped", job)
    assert losses(tmp_path / "stopped") == losses(tmp_path / "whole")
    for rank in range(2):
        of_both = [torch.load(tmp_path / name / f"state.{rank}") for name in ("stopped", "whole")]
        assert difference(*of_both) == []


def test_the_example_is_stopped_and_ends_with_the_figures_of_one_machine(slurm: Slurm, tmp_path: Path) -> None:
    there, here = tmp_path / "slurm", tmp_path / "torchrun"
    for folder in (there, here):
        folder.mkdir()
    config = ["--config", str(ROOT / "examples" / "recsys_movielens" / "two_nodes.yaml"), "--trainer.max_epochs", "1"]
    options = ["--standalone", "--nproc-per-node=2"]
    command = [sys.executable, "-m", "torch.distributed.run", *options, "-m", "lightning_pipe.cli", "fit", *config]
    one = [*command, "--trainer.num_nodes", "1", "--trainer.devices", "2"]
    subprocess.run(one, cwd=here, env=slurm.environment, check=True, capture_output=True, timeout=2 * HANG)

    output = there / "output"
    job = slurm.submit(ROOT / "examples" / "cluster" / "slurm.sbatch", output, *config[1:], folder=there)
    slurm.until(lambda: bool(last_metrics(there)), "no batch is trained", output)
    slurm.run("scancel", "--signal=USR1", job)
    slurm.until(lambda: slurm.state(job) == "PENDING", "the job does not end", output)
    assert [path.name for path in there.glob(f"logs/slurm-{job}/*.ckpt")] == ["hpc_ckpt_1.ckpt"]
    slurm.start_now(job)
    slurm.until(lambda: slurm.state(job) not in BUSY, "the job goes on", output)
    # Metrics sum in as many threads as Lightning gives a process, which are fewer if a machine has several.
    assert last_metrics(there) == pytest.approx(last_metrics(here), rel=1e-5)
