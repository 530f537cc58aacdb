"""Trains on a cluster of Ray, or without one on this machine:

    python -m examples.cluster.ray_train --storage /shared/folder
    python -m examples.cluster.ray_train --storage /shared/folder --model language --strategy llm_1f1b_pipeline
    python -m examples.cluster.ray_train --storage /shared/folder --tune serial,prefetch

A checkpoint is written after each epoch and every --save-every steps. If a worker is lost, Ray restarts all workers, up
to three times, and training continues from the latest checkpoint to the same values. The example needs
``pip install '.[ray,examples]'``, torchrec or the extra ``hf`` for the model, and a folder that all nodes share.
"""

from __future__ import annotations

import argparse
from typing import Any

import lightning.pytorch as pl
import ray.train
import ray.tune
from ray.train.torch import TorchTrainer
from ray.tune.integration.ray_train import TuneReportCallback

from lightning_pipe.ray import RayLightningEnvironment, ReportToRay, get_resume_checkpoint_path, prepare_trainer

DEFAULTS = {
    "model": "recommender",
    "strategy": "recsys_prefetch_pipeline",
    "epochs": 1,
    "save_every": 50,
    "nodes": 1,
}


def recommender() -> tuple[pl.LightningModule, pl.LightningDataModule]:
    from examples.recsys_movielens.data import MovieLensData
    from examples.recsys_movielens.model import MovieLensDLRM

    return MovieLensDLRM(learning_rate=0.0005, table_learning_rate=0.005), MovieLensData(batch_size=256)


def language_model() -> tuple[pl.LightningModule, pl.LightningDataModule]:
    from examples.llm_text.data import PythonText
    from lightning_pipe.strategies import HFCausalLM

    sizes = {"hidden_size": 128, "intermediate_size": 344, "num_hidden_layers": 4, "num_attention_heads": 4}
    config = {"model_type": "llama", "vocab_size": 256, "max_position_embeddings": 256, "tie_word_embeddings": False}
    return HFCausalLM(config={**config, **sizes}, learning_rate=0.002), PythonText(batch_size=16, length=256)


MODELS = {"recommender": recommender, "language": language_model}


def train_worker(config: dict[str, Any]) -> None:
    """Train in one of Ray's workers.

    Args:
        config: values in place of those of ``DEFAULTS``; ``callbacks`` and ``trainer`` are further callbacks and
            arguments of the trainer.
    """
    config = {**DEFAULTS, "callbacks": [], "trainer": {}, **config}
    workers = ray.train.get_context().get_world_size()
    pl.seed_everything(1)
    module, data = MODELS[config["model"]]()
    trainer = pl.Trainer(
        accelerator="auto",
        devices=workers // config["nodes"],
        num_nodes=config["nodes"],
        strategy=config["strategy"],
        plugins=[RayLightningEnvironment()],
        callbacks=[*config["callbacks"], ReportToRay(every_n_train_steps=config["save_every"])],
        max_epochs=config["epochs"],
        logger=False,
        enable_progress_bar=False,
        **config["trainer"],
    )
    prepare_trainer(trainer).fit(module, data, ckpt_path=get_resume_checkpoint_path())


def train(
    config: dict[str, Any], storage: str, name: str, workers: int = 2, gpu: bool = False, **options: Any
) -> ray.train.Result:
    """Train on Ray's workers, and return the metrics and the checkpoint of the last report.

    Args:
        config: see :func:`train_worker`.
        storage: folder that all nodes share.
        name: name of the run, which is its folder in *storage*. A name that exists continues that run.
        workers: number of workers (default 2).
        gpu: True to give each worker a GPU (default False).
        options: arguments of ``RunConfig``.
    """
    run = ray.train.RunConfig(
        name=name,
        storage_path=storage,
        failure_config=ray.train.FailureConfig(max_failures=3),
        checkpoint_config=ray.train.CheckpointConfig(num_to_keep=2),
        **options,
    )
    scaling = ray.train.ScalingConfig(num_workers=workers, use_gpu=gpu)
    return TorchTrainer(train_worker, train_loop_config=config, scaling_config=scaling, run_config=run).fit()


def tune(plans: list[str], config: dict[str, Any], storage: str, workers: int = 2) -> ray.tune.ResultGrid:
    """Train once under each plan, one run after the other. Ray needs a CPU more than for the workers."""
    if not ray.is_initialized():
        ray.init()
    if (available := ray.cluster_resources().get("CPU", 0)) < workers + 1:  # Ray would wait for them for ever
        raise SystemExit(
            f"{workers} workers and a trial need {workers + 1} CPUs, but the cluster has {available:g}. Use fewer"
        )

    def trial(choice: dict[str, Any]) -> None:
        strategy = choice["strategy"]
        train({**config, **choice}, storage, f"tune_{strategy}", workers, callbacks=[TuneReportCallback()])

    space = {"strategy": ray.tune.grid_search([f"recsys_{plan}_pipeline" for plan in plans])}
    tuner = ray.tune.Tuner(
        trial,
        param_space=space,
        tune_config=ray.tune.TuneConfig(max_concurrent_trials=1),
        run_config=ray.tune.RunConfig(name="tune", storage_path=storage),
    )
    return tuner.fit()


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--storage", required=True, help="folder that all nodes share")
    parser.add_argument("--name", default="lightning_pipe", help="name of the run; an existing run is continued")
    parser.add_argument("--model", choices=list(MODELS), default=DEFAULTS["model"])
    parser.add_argument("--strategy", default=DEFAULTS["strategy"])
    parser.add_argument("--epochs", type=int, default=DEFAULTS["epochs"])
    parser.add_argument("--save-every", type=int, default=DEFAULTS["save_every"], help="steps between checkpoints")
    parser.add_argument("--nodes", type=int, default=DEFAULTS["nodes"])
    parser.add_argument("--workers", type=int, default=2, help="number of workers on all nodes together")
    parser.add_argument("--gpu", action="store_true", help="give each worker a GPU")
    parser.add_argument("--tune", help="plans of the recommender, separated by commas, to train one after the other")
    options = parser.parse_args()
    config = {key: getattr(options, key) for key in DEFAULTS}
    if options.tune:
        print(tune(options.tune.split(","), config, options.storage, options.workers).get_dataframe())
    else:
        print(train(config, options.storage, options.name, options.workers, options.gpu).metrics)


if __name__ == "__main__":
    main()
