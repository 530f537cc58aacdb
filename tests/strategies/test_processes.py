"""In a Slurm allocation a script is a rank only if a job step has started it."""

from __future__ import annotations

from typing import Any

import pytest
from lightning.fabric.plugins.environments import LightningEnvironment, SLURMEnvironment, TorchElasticEnvironment

from lightning_pipe.engine import SetupError
from lightning_pipe.strategies import LLMPipelineStrategy
from lightning_pipe.strategies.processes import own_processes
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


@pytest.mark.parametrize("slurm", [BATCH_SCRIPT], indirect=True)
def test_a_batch_script_trains(slurm: None) -> None:
    used = fit(Clicks(), recsys(), max_steps=2)
    assert used.global_step == 2


@pytest.mark.parametrize("slurm", [TASK], indirect=True)
def test_a_task_of_a_job_step_is_a_rank(slurm: None) -> None:
    assert own_processes() is None
    made = trainer(recsys(), devices=2, num_nodes=2)
    assert isinstance(environment_of(made), SLURMEnvironment)
    assert made.world_size == 4


@pytest.mark.parametrize("slurm", [{**BATCH_SCRIPT, **TORCHRUN}], indirect=True)
def test_torchrun_in_a_batch_script_says_who_is_a_rank(slurm: None) -> None:
    assert own_processes() is None
    assert isinstance(environment_of(trainer(recsys(), devices=2)), TorchElasticEnvironment)


@pytest.mark.parametrize("slurm", [{**BATCH_SCRIPT, "RAY_JOB_ID": "01000000"}], indirect=True)
def test_a_worker_of_a_ray_in_an_allocation_is_the_rank_that_its_plugin_says(slurm: None) -> None:
    assert own_processes() is None
    plugin = LightningEnvironment()
    assert environment_of(trainer(recsys(), plugins=[plugin])) is plugin


def test_outside_of_slurm_the_choice_is_lightnings() -> None:
    assert own_processes() is None


@pytest.mark.parametrize("slurm", [BATCH_SCRIPT], indirect=True)
def test_several_nodes_need_a_job_step(slurm: None) -> None:
    with pytest.raises(SetupError, match=r"num_nodes is 2, .* no other node runs the script. Start it with srun"):
        fit(Clicks(), recsys(), num_nodes=2)
