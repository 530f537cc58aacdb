"""The manifests for Kubernetes fit their schemas, each other, torchrun and this package's command."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any, cast

import pytest
from lightning.pytorch.callbacks import ModelCheckpoint, OnExceptionCheckpoint
from lightning.pytorch.cli import LightningCLI

from lightning_pipe.strategies import LLMPipelineStrategy, RecsysPipelineStrategy
from tests.scenarios.cluster.kubernetes import (
    FOLDER,
    ROOT,
    documents,
    job_container,
    job_pod,
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
