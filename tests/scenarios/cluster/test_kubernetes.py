"""The manifests for Kubernetes fit their schemas, each other, torchrun and this package's command."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any, cast

import pytest
from lightning.pytorch.callbacks import ModelCheckpoint, OnExceptionCheckpoint
from lightning.pytorch.cli import LightningCLI
from torch.distributed.run import get_args_parser

from lightning_pipe.strategies import LLMPipelineStrategy, RecsysPipelineStrategy
from tests.scenarios.cluster.kubernetes import (
    FOLDER,
    ROOT,
    documents,
    expanded,
    job_container,
    job_pod,
    variables,
)

MANIFESTS = ("kubernetes-volume", "kubernetes-job", "kubernetes-trainjob")
SCHEMAS = {
    "Service": "io_k8s_api_core_v1_service.IoK8sApiCoreV1Service",
    "PersistentVolumeClaim": "io_k8s_api_core_v1_persistent_volume_claim.IoK8sApiCoreV1PersistentVolumeClaim",
    "Job": "io_k8s_api_batch_v1_job.IoK8sApiBatchV1Job",
    "TrainJob": "trainer_v1alpha1_train_job.TrainerV1alpha1TrainJob",
}


def read_by_schema(document: dict[str, Any]) -> Any:
    """A manifest's object as the published schema reads it, without fields that the schema does not have."""
    module, name = SCHEMAS[document["kind"]].split(".")
    found = pytest.importorskip(f"kubeflow_trainer_api.models.{module}", reason="needs kubeflow-trainer-api")
    return getattr(found, name).from_dict(document).to_dict()


@pytest.mark.parametrize("name", MANIFESTS)
def test_each_object_has_only_fields_and_types_of_its_published_schema(name: str) -> None:
    for document in documents(name).values():
        assert read_by_schema(document) == document


# ---------------------------------------------------------------------- meaning


def options(words: list[str]) -> dict[str, str]:
    return dict(word.removeprefix("--").split("=", 1) for word in words if "=" in word)


def test_the_pods_of_the_job_find_the_first_one() -> None:
    service, job = (documents("kubernetes-job")[kind] for kind in ("Service", "Job"))
    assert service["spec"]["clusterIP"] == "None"
    assert service["spec"]["selector"] == {"batch.kubernetes.io/job-name": job["metadata"]["name"]}
    assert job_pod()["subdomain"] == service["metadata"]["name"]
    launch = options(job_container()["command"])
    assert launch["master-addr"] == f"{job['metadata']['name']}-0.{service['metadata']['name']}"
    assert launch["node-rank"] == "$(JOB_COMPLETION_INDEX)"
    assert expanded(launch["node-rank"], {"JOB_COMPLETION_INDEX": "1"}) == "1"
    assert int(launch["nnodes"]) == job["spec"]["completions"] == job["spec"]["parallelism"]


def test_the_job_restarts_a_pod_after_its_predecessor_has_ended_and_needs_all() -> None:
    spec = documents("kubernetes-job")["Job"]["spec"]
    # What the API server demands of each other, beyond the schema.
    assert spec["completionMode"] == "Indexed"
    assert spec["template"]["spec"]["restartPolicy"] == "Never"
    assert spec["podReplacementPolicy"] == "Failed"
    assert spec["backoffLimitPerIndex"] > 0
    assert spec["maxFailedIndexes"] == 0
    (rule,) = spec["podFailurePolicy"]["rules"]
    assert (rule["action"], rule["onPodConditions"]) == ("Ignore", [{"type": "DisruptionTarget", "status": "True"}])


def train_job() -> tuple[dict[str, Any], dict[str, Any]]:
    """The trainer of the TrainJob, and its patch of the runtime's pods."""
    spec = documents("kubernetes-trainjob")["TrainJob"]["spec"]
    (patch,) = spec["runtimePatches"]
    (node,) = patch["trainingRuntimeSpec"]["template"]["spec"]["replicatedJobs"]
    assert node["name"] == "node"
    return spec["trainer"], node["template"]["spec"]["template"]["spec"]


def test_both_jobs_train_the_same_in_the_same_pods() -> None:
    trainer, patch = train_job()
    container, pod = job_container(), job_pod()
    assert trainer["command"] == container["command"][:1] == ["torchrun"]
    assert trainer["args"] == container["args"]
    assert trainer["image"] == container["image"]
    assert trainer["env"] == container["env"]
    assert trainer["resourcesPerNode"] == container["resources"]
    assert patch["containers"] == [{"name": "node", "volumeMounts": container["volumeMounts"]}]
    for key in ("terminationGracePeriodSeconds", "securityContext", "volumes"):
        assert patch[key] == pod[key]


def test_torchrun_reads_what_both_jobs_tell_it(monkeypatch: pytest.MonkeyPatch) -> None:
    container, (trainer, _) = job_container(), train_job()
    words = [expanded(word, {"JOB_COMPLETION_INDEX": "1"}) for word in [*container["command"][1:], *container["args"]]]
    told = get_args_parser().parse_args(words)
    # Set by the operator, whose web hook refuses a TrainJob that sets one.
    by_operator = {"NNODES": "2", "NPROC_PER_NODE": "1", "NODE_RANK": "1", "MASTER_PORT": "29500"}
    by_operator["MASTER_ADDR"] = "lightning-pipe-0.lightning-pipe"
    assert not {name for name in variables(trainer) if name.startswith("PET_")}
    assert (str(trainer["numNodes"]), str(trainer["numProcPerNode"])) == ("2", "1")
    for name, value in by_operator.items():
        monkeypatch.setenv(f"PET_{name}", value)
    assert vars(get_args_parser().parse_args(trainer["args"])) == vars(told)
    assert (told.nnodes, told.nproc_per_node, told.node_rank, told.master_port) == ("2", "1", 1, 29500)
    assert (told.module, told.training_script, told.max_restarts) == (True, "lightning_pipe.cli", 0)


def test_torchrun_leaves_its_processes_nearly_the_whole_grace_period(monkeypatch: pytest.MonkeyPatch) -> None:
    from torch.distributed.launcher.api import LaunchConfig

    for name, value in variables(job_container()).items():
        monkeypatch.setenv(name, value)
    config: Any = LaunchConfig(min_nodes=1, max_nodes=1, nproc_per_node=1)
    if not hasattr(config, "shutdown_timeout"):
        pytest.skip("this torch waits 30 s")
    assert 30 < config.shutdown_timeout < job_pod()["terminationGracePeriodSeconds"]


def test_the_volume_is_shared_and_lies_where_the_configurations_write() -> None:
    claim = documents("kubernetes-volume")["PersistentVolumeClaim"]
    assert claim["spec"]["accessModes"] == ["ReadWriteMany"]
    logs = next(one for one in job_pod()["volumes"] if one["name"] == "logs")
    assert logs["persistentVolumeClaim"]["claimName"] == claim["metadata"]["name"]
    mounts = {one["name"]: one["mountPath"] for one in job_container()["volumeMounts"]}
    image = (FOLDER / "Dockerfile").read_text(encoding="utf-8")
    assert mounts["logs"] == f"{re.findall('^WORKDIR (.*)', image, re.MULTILINE)[-1]}/logs"
    given = options(job_container()["args"])
    assert given["trainer.default_root_dir"] == given["trainer.callbacks.dirpath"]
    assert given["trainer.default_root_dir"].startswith("logs/")


def built(words: list[str]) -> LightningCLI:
    """Model, data and trainer of the arguments of the command ``fit``, whose own one is left out."""
    return LightningCLI(
        subclass_mode_model=True,
        subclass_mode_data=True,
        run=False,
        args=[word for word in words if not word.startswith("--ckpt_path=")],
    )


def of_language_model() -> list[str]:
    """Arguments of ``fit`` for a language model, as the comment in the manifest says."""
    text = (FOLDER / "kubernetes-job.yaml").read_text(encoding="utf-8")
    (instead,) = re.findall(r"^# +(--config=.*),$", text, re.MULTILINE)
    words: list[str] = job_container()["args"][3:]
    place = next(place for place, word in enumerate(words) if word.startswith("--config="))
    return [*words[:place], *instead.split(", "), *words[place + 1 :]]


@pytest.mark.parametrize("kind", ["recsys", "llm"])
def test_the_arguments_build_a_trainer_for_two_machines_that_saves_on_sigterm_and_meanwhile(
    kind: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("sys.argv", ["lightning-pipe"])  # LightningCLI warns of arguments beside its own
    monkeypatch.chdir(ROOT)  # as the image has the examples in the folder of work
    assert job_container()["args"][:3] == ["-m", "lightning_pipe.cli", "fit"]
    words = job_container()["args"][3:] if kind == "recsys" else of_language_model()
    trainer: Any = built(words).trainer
    strategy = RecsysPipelineStrategy if kind == "recsys" else LLMPipelineStrategy
    assert isinstance(trainer.strategy, strategy)
    assert (trainer.num_nodes, trainer.num_devices) == (2, 1)
    folder = options(words)["trainer.default_root_dir"]
    assert [
        Path(callback.ckpt_path) for callback in trainer.callbacks if isinstance(callback, OnExceptionCheckpoint)
    ] == [Path(folder) / "on_exception.ckpt"]
    (periodic,) = [
        callback for callback in trainer.callbacks if isinstance(callback, ModelCheckpoint) and callback.save_last
    ]
    assert (periodic._every_n_train_steps, periodic.save_top_k) == (100, 0)
    assert Path(cast(str, periodic.dirpath)) == ROOT / folder


def test_files_that_the_comments_name_are_there() -> None:
    for file in [*FOLDER.glob("kubernetes-*.yaml"), FOLDER / "Dockerfile", ROOT / "docs" / "cluster.md"]:
        for named in re.findall(r"\bexamples/[\w./-]*\w", file.read_text(encoding="utf-8")):
            assert (ROOT / named).exists(), f"{file.name} names {named}"
