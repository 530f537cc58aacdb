"""Who is a rank: in a Slurm allocation only what a job step has started; under torchrun what that has started."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from lightning.fabric.plugins.environments import LightningEnvironment, SLURMEnvironment, TorchElasticEnvironment
from lightning.pytorch.utilities.rank_zero import rank_zero_only

from lightning_pipe.engine import SetupError
from lightning_pipe.strategies import LLMPipelineStrategy
from lightning_pipe.strategies.cluster_environment import get_environment_without_srun, get_torchrun_nodes_and_devices
from tests.strategies.cases import Clicks, fit, recsys, trainer

# What sbatch and salloc set; a task of srun has the others too.
ALLOCATION = {
    "SLURM_JOB_ID": "12",
    "SLURM_JOB_NAME": "train",
    "SLURM_NTASKS": "4",
    "SLURM_NTASKS_PER_NODE": "2",
    "SLURM_NNODES": "2",
    "SLURM_NODELIST": "n[0-1]",
}
BATCH_SCRIPT = {**ALLOCATION, "SLURM_PROCID": "0", "SLURM_LOCALID": "0", "SLURM_NODEID": "0"}
# The number of a shell that salloc has started on a node.
INTERACTIVE = {**BATCH_SCRIPT, "SLURM_STEP_ID": str(0xFFFFFFFA)}
TASK = {**BATCH_SCRIPT, "SLURM_STEP_ID": "0"}
TORCHRUN = {"TORCHELASTIC_RUN_ID": "7", "GROUP_RANK": "0", "WORLD_SIZE": "2", "RANK": "0", "LOCAL_RANK": "0"}


def environment_of(trainer: Any) -> Any:
    return trainer.strategy.cluster_environment


@pytest.fixture
def slurm(monkeypatch: pytest.MonkeyPatch, request: pytest.FixtureRequest) -> None:
    for name, value in request.param.items():
        monkeypatch.setenv(name, value)


@pytest.mark.parametrize("slurm", [ALLOCATION, BATCH_SCRIPT, INTERACTIVE], indirect=True)
@pytest.mark.parametrize("strategy", [recsys, LLMPipelineStrategy])
def test_a_shell_or_a_batch_script_trains_on_its_own(slurm: None, strategy: Any) -> None:
    made = trainer(strategy(), devices=1)
    assert isinstance(environment_of(made), LightningEnvironment)
    assert made.world_size == 1


@pytest.mark.parametrize("slurm", [TASK], indirect=True)
def test_a_task_of_a_job_step_is_a_rank(slurm: None) -> None:
    assert get_environment_without_srun() is None
    made = trainer(recsys(), devices=2, num_nodes=2)
    assert isinstance(environment_of(made), SLURMEnvironment)
    assert made.world_size == 4


@pytest.mark.parametrize("slurm", [{**BATCH_SCRIPT, **TORCHRUN}], indirect=True)
def test_torchrun_in_a_batch_script_says_who_is_a_rank(slurm: None) -> None:
    assert get_environment_without_srun() is None
    assert isinstance(environment_of(trainer(recsys(), devices=2)), TorchElasticEnvironment)


@pytest.mark.parametrize("slurm", [{**BATCH_SCRIPT, "RAY_JOB_ID": "01000000"}], indirect=True)
def test_a_worker_of_a_ray_in_an_allocation_is_the_rank_that_its_plugin_says(slurm: None) -> None:
    assert get_environment_without_srun() is None
    plugin = LightningEnvironment()
    assert environment_of(trainer(recsys(), plugins=[plugin])) is plugin


@pytest.mark.parametrize("slurm", [BATCH_SCRIPT], indirect=True)
def test_several_nodes_need_a_job_step(slurm: None) -> None:
    with pytest.raises(SetupError, match=r"num_nodes is 2, .* no other node runs the script. Start it with srun"):
        fit(Clicks(), recsys(), num_nodes=2)


# What torchrun sets on the second of three nodes with two processes each.
ELASTIC = {
    **{"TORCHELASTIC_RUN_ID": "7", "GROUP_RANK": "1", "GROUP_WORLD_SIZE": "3", "LOCAL_WORLD_SIZE": "2"},
    **{"WORLD_SIZE": "6", "RANK": "3", "LOCAL_RANK": "1"},
}


@pytest.fixture
def torchrun(monkeypatch: pytest.MonkeyPatch, request: pytest.FixtureRequest) -> None:
    for name, value in {**ELASTIC, **request.param}.items():
        monkeypatch.setenv(name, value)
    monkeypatch.setattr(rank_zero_only, "rank", 0)  # a Trainer sets this process's rank, which is put back afterwards


@pytest.mark.parametrize("torchrun", [{}], indirect=True)
@pytest.mark.parametrize("options", [{}, {"devices": "auto"}, {"devices": 1, "num_nodes": 2}])
def test_nodes_and_devices_are_those_that_torchrun_has_started(torchrun: None, options: dict[str, Any]) -> None:
    made = trainer(recsys(), **options)
    assert (made.num_nodes, made.num_devices, made.world_size, made.global_rank) == (3, 2, 6, 3)
    strategy: Any = made.strategy
    assert strategy.distributed_sampler_kwargs == {"num_replicas": 6, "rank": 3}


@pytest.mark.parametrize("torchrun", [{"WORLD_SIZE": "5"}], indirect=True)
def test_nodes_with_other_numbers_of_processes_are_refused(torchrun: None) -> None:
    with pytest.raises(SetupError, match="started 5 processes on 3 nodes, 2 of them on this node; expected the same"):
        trainer(recsys())


def test_processes_without_a_gpu_each_are_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    for name, value in ELASTIC.items():
        monkeypatch.setenv(name, value)
    with pytest.raises(SetupError, match=r"2 processes on this node, and the Trainer has 1 device\(s\)"):
        get_torchrun_nodes_and_devices(TorchElasticEnvironment(), 1, [torch.device("cuda", 0)])
    gpus = [torch.device("cuda", number) for number in range(4)]
    assert get_torchrun_nodes_and_devices(TorchElasticEnvironment(), 1, gpus) == (3, gpus[:2])


@pytest.mark.parametrize("torchrun", [{}], indirect=True)
def test_other_environments_keep_the_trainers_numbers(torchrun: None) -> None:
    devices = [torch.device("cpu")] * 4
    assert get_torchrun_nodes_and_devices(SLURMEnvironment(), 2, devices) == (2, devices)
