"""On a real Ray of this machine: a run whose worker is killed ends with the bits of torchrun."""

from __future__ import annotations

import csv
import os
import shutil
import signal
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from contextlib import suppress
from dataclasses import dataclass
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import pytest
import torch

from lightning_pipe.strategies import export_checkpoint
from tests.patience import HANG

ROOT = Path(__file__).parents[3]
EXAMPLES = ROOT / "examples"

needs_ray = pytest.mark.skipif(find_spec("ray") is None, reason="Ray is not installed (pip install 'ray[train,tune]')")


CONFIG = {"model": "recommender"}
# Number of the batch after which the worker is lost; two checkpoints precede it.
KILLED_AFTER = 117


@dataclass(frozen=True)
class Run:
    """Results of a training."""

    losses: list[float]
    validation: dict[str, float]
    state: dict[str, torch.Tensor]


def state_of(checkpoint: Path, folder: Path) -> dict[str, torch.Tensor]:
    export_checkpoint(checkpoint, folder / "whole.ckpt")
    found: dict[str, torch.Tensor] = torch.load(folder / "whole.ckpt", weights_only=True)["state_dict"]
    return found


def validation(metrics: dict[str, Any]) -> dict[str, float]:
    return {name: value for name, value in metrics.items() if name.startswith("val")}


def torchrun(folder: Path) -> Run:
    config = EXAMPLES / "recsys_movielens" / "prefetch.yaml"
    # The profiler among the callbacks replays tasks, after which the last bits differ.
    given = ["--config", str(config), "--trainer.max_epochs=1", "--trainer.callbacks=null"]
    command = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node=2"]
    folder.mkdir()
    subprocess.run(
        [*command, "-m", "lightning_pipe.cli", "fit", *given, "--trainer.log_every_n_steps=1"],
        cwd=folder,
        env={**os.environ, "PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": "1"},
        check=True,
        capture_output=True,
        timeout=HANG,
    )
    (file,), (checkpoint,) = folder.rglob("metrics.csv"), folder.rglob("*.ckpt")
    rows = list(csv.DictReader(file.open()))
    last = {name: float(value) for row in rows for name, value in row.items() if value}
    losses = [float(row["train/loss"]) for row in rows if row["train/loss"]]
    return Run(losses, validation(last), state_of(checkpoint, folder))


@pytest.fixture(scope="module")
def cluster() -> Iterator[None]:
    import ray

    paths = [str(ROOT), *filter(None, [os.environ.get("PYTHONPATH")])]
    os.environ |= {
        "PYTHONPATH": os.pathsep.join(paths),
        "OMP_NUM_THREADS": "1",
        "GLOO_SOCKET_IFNAME": "lo",
        "RAY_USAGE_STATS_ENABLED": "0",
        "RAY_ACCEL_ENV_VAR_OVERRIDE_ON_ZERO": "0",
        # Ray would kill workers if other processes of the machine use its memory.
        "RAY_memory_monitor_refresh_ms": "0",
        # Workers import torch, which takes minutes on a busy machine: with its defaults, Ray would restart them.
        "RAY_TRAIN_WORKER_GROUP_START_TIMEOUT_S": str(HANG),
        "RAY_TRAIN_WORKER_HEALTH_CHECK_TIMEOUT_S": str(HANG),
        "RAY_worker_register_timeout_seconds": str(int(HANG)),
        "RAY_health_check_failure_threshold": "1000",
    }
    # The paths of Ray's sockets in it must be short.
    folder = tempfile.mkdtemp(prefix="ray", dir="/tmp")
    os.environ["LIGHTNING_PIPE_TEST_RAY"] = folder
    try:
        # One for each worker, and one for a trial of Ray Tune.
        ray.init(num_cpus=3, include_dashboard=False, object_store_memory=2**27, _temp_dir=folder)
        yield
    finally:
        ray.shutdown()
        # Workers end some time after Ray's daemons, after an interrupt even minutes.
        for process in processes(f"LIGHTNING_PIPE_TEST_RAY={folder}"):
            with suppress(ProcessLookupError):
                os.kill(process, signal.SIGKILL)
        shutil.rmtree(folder, ignore_errors=True)


def processes(variable: str) -> list[int]:
    """Processes that were started with an environment variable."""
    found = []
    for environment in Path("/proc").glob("[0-9]*/environ"):
        with suppress(OSError):  # it has ended, or is another user's
            if variable.encode() in environment.read_bytes().split(b"\0"):
                found.append(int(environment.parent.name))
    return found


def batches(folder: Path, rank: int) -> list[tuple[int, float]]:
    """Number in the epoch and loss of each batch that a rank has trained, over all starts of its worker."""
    rows = [line.split() for line in (folder / f"losses.{rank}").read_text().splitlines()]
    return [(int(number), float(loss)) for number, loss in rows]


@needs_ray
@pytest.mark.exhaustive
def test_training_continues_after_a_killed_worker_to_the_bits_of_torchrun(cluster: None, tmp_path: Path) -> None:
    from examples.cluster.ray_train import DEFAULTS, train
    from tests.scenarios.cluster.ray_program import Killed, Losses

    expected = torchrun(tmp_path / "torchrun")
    config = {**CONFIG, "callbacks": [Losses(tmp_path), Killed(tmp_path, KILLED_AFTER)]}
    result = train(config, str(tmp_path), "run")

    every: Any = DEFAULTS["save_every"]
    saved = KILLED_AFTER // every * every
    for rank in range(2):
        trained = batches(tmp_path, rank)
        numbers = [number for number, _ in trained]
        restart = next(place for place in range(1, len(numbers)) if numbers[place] <= numbers[place - 1])
        # Each batch once up to the loss of the worker, and once from the last checkpoint on.
        assert restart in (KILLED_AFTER, KILLED_AFTER + 1)
        assert numbers == [*range(restart), *range(saved, len(expected.losses))]
        # The restored state has no effect of the batches after the checkpoint.
        assert trained[saved:restart] == trained[restart : 2 * restart - saved]
        if rank == 0:
            assert trained == [(number, expected.losses[number]) for number in numbers]

    assert result.metrics is not None
    assert result.checkpoint is not None
    assert validation(result.metrics) == expected.validation
    assert validation(result.metrics)
    state = state_of(Path(result.checkpoint.path, "checkpoint.ckpt"), tmp_path)
    assert state.keys() == expected.state.keys()
    assert [name for name, value in state.items() if not torch.equal(value, expected.state[name])] == []
    # Ray has removed the checkpoints that it was not to keep.
    assert len(list((tmp_path / "run").glob("checkpoint_*/"))) == 2


TOLD = {
    "no plugin": "SetupError: the trainer finds its ranks with LightningEnvironment, expected RayLightningEnvironment",
    "one device": "SetupError: the trainer has devices=1 and num_nodes=1, but Ray has started 2 workers, 2 of them on"
    " this node. Use devices=2, num_nodes=1",
    "one device on a rank": "SetupError: rank 1: the trainer has devices=1",
    "two nodes": "SetupError: the trainer has devices=1 and num_nodes=2",
    "another project's strategy": "RuntimeError: Invalid strategy class",
    "one process": "SetupError: Ray has started 2 workers, but InProcessPipelineStrategy trains in one process",
    "no step": "SetupError: every_n_train_steps is 0; expected None or at least 1",
    "in the background": "SetupError: async_checkpoints is True",
    "a store": "SetupError: the run is stored at",
    "unseen by a rank": "SetupError: rank 1: the run is stored at '/no/such/folder/",
    "right": "accepted",
    "right for the default plan": "accepted",
    "right for stages": "accepted",
    "right to report": "accepted",
}


@needs_ray
@pytest.mark.exhaustive
def test_a_trainer_that_does_not_fit_rays_workers_is_an_error_on_every_rank(cluster: None, tmp_path: Path) -> None:
    from ray.train import RunConfig, ScalingConfig
    from ray.train.torch import TorchTrainer

    from tests.scenarios.cluster.ray_program import wrong_trainers

    TorchTrainer(
        wrong_trainers,
        train_loop_config={"folder": str(tmp_path)},
        scaling_config=ScalingConfig(num_workers=2),
        run_config=RunConfig(name="wrong", storage_path=str(tmp_path)),
    ).fit()
    for rank in range(2):
        told = dict(line.split(": ", 1) for line in (tmp_path / f"told.{rank}").read_text().splitlines())
        assert told.keys() == TOLD.keys()
        assert {name: text for name, text in told.items() if not text.startswith(TOLD[name])} == {}


def told(program: str) -> str:
    done = subprocess.run([sys.executable, "-c", program], cwd=ROOT, capture_output=True, text=True, timeout=HANG)
    assert done.returncode == 0, done.stderr
    return done.stdout


@pytest.mark.exhaustive
def test_without_ray_the_module_says_what_to_install() -> None:
    program = """
import sys
sys.modules["ray"] = None
from lightning_pipe.engine import SetupError
try:
    import lightning_pipe.ray
except SetupError as error:
    print(error)
"""
    assert "pip install 'lightning-pipe[ray]'" in told(program)
