"""Invented histories that can be learned, and training on them from the example's YAML, in one process or on ranks."""

from __future__ import annotations

import hashlib
from pathlib import Path
from typing import Any

import numpy as np
import torch.distributed as dist

from examples.recsys_movielens import files
from lightning_pipe.cli.training import PipelineCLI
from tests.recsys.dynamic.dynamic_cases import rows_of

CONFIG = Path(__file__).parents[2] / "examples" / "recsys_sequences" / "prefetch.yaml"
DYNAMIC = CONFIG.with_name("dynamic.yaml")
USERS, ITEMS, SHORTEST, LONGEST = 61, 80, 6, 40


def write_cycles(folder: Path) -> None:
    """Files like MovieLens-100K's, of users who walk along one cycle of all items: what comes next is known, and no
    item is rated more often than others by much. Some take two steps in a second.
    """
    draw = np.random.default_rng(0)
    cycle = draw.permutation(ITEMS) + 1
    rows = []
    for user in range(1, USERS + 1):
        first, length = int(draw.integers(ITEMS)), int(draw.integers(SHORTEST, LONGEST + 1))
        for step in range(length):
            second = 880_000_000 + user * 100 + step - (step % 4 == 1)
            rows.append(f"{user}\t{cycle[(first + step) % ITEMS]}\t{draw.integers(1, 6)}\t{second}")
    contents = {
        "ml-100k.inter": ["user_id:token\titem_id:token\trating:float\ttimestamp:float", *rows],
        "ml-100k.user": [
            "user_id:token\tage:token\tgender:token\toccupation:token\tzip_code:token",
            *(f"{user}\t30\tF\tartist\t00000" for user in range(1, USERS + 1)),
        ],
        "ml-100k.item": [
            "item_id:token\tmovie_title:token_seq\trelease_year:token\tclass:token_seq",
            *(f"{item}\tTitle {item}\t1990\tDrama" for item in range(1, ITEMS + 1)),
        ],
    }
    folder.mkdir(parents=True, exist_ok=True)
    for name, lines in contents.items():
        (folder / name).write_text("\n".join(lines) + "\n", encoding="utf-8")


def hashes_of(folder: Path) -> dict[str, str]:
    """What ``files.SHA256`` has to be for the files in *folder*."""
    return {name: hashlib.sha256((folder / name).read_bytes()).hexdigest() for name in files.SHA256}


def command_line(folder: Path, config: Path = CONFIG, /, **options: Any) -> PipelineCLI:
    """Model, data and trainer of the example's YAML, with the data in *folder*, quiet, over the ranks there are."""
    quiet = {
        "trainer.devices": dist.get_world_size() if dist.is_initialized() else 1,
        "trainer.logger": "false",
        "trainer.callbacks": "null",
        "trainer.enable_checkpointing": "false",
        "trainer.enable_progress_bar": "false",
        "trainer.enable_model_summary": "false",
        "data.init_args.data_dir": folder,
        "data.init_args.batch_size": 8,
        "data.init_args.negatives": 16,
        "model.init_args.width": 16,
        "model.init_args.item_rows": 1024,
    }
    arguments = [f"--{key}={value}" for key, value in {**quiet, **options}.items()]
    return PipelineCLI(
        subclass_mode_model=True,
        subclass_mode_data=True,
        run=False,
        save_config_callback=None,
        args=["--config", str(config), *arguments],
    )


def dynamic_plans(rank: int, world_size: int, folder: str, store: str) -> dict[str, Any]:
    """Trains an epoch of the YAML with dynamic tables and balanced batches under each of two plans.

    Returns:
        Of each plan the metrics, this rank's rows, and the imbalance before and after.
    """
    files.SHA256 = hashes_of(Path(folder))
    found: dict[str, Any] = {}
    for plan in ("serial", "prefetch"):
        options: dict[str, Any] = {"trainer.max_epochs": 1, "trainer.check_val_every_n_epoch": 1}
        options |= {"model.init_args.store": f"{store}/{plan}", "trainer.strategy.init_args.plan": plan}
        cli = command_line(Path(folder), DYNAMIC, **options)
        cli.trainer.fit(cli.model, cli.datamodule)
        strategy: Any = cli.trainer.strategy
        report = strategy.balance_report
        found[plan] = {
            "scores": {name: value.item() for name, value in cli.trainer.callback_metrics.items()},
            "rows": rows_of(strategy.sharded_model),
            "imbalance": (report.mean_before, report.mean_after),
        }
        strategy.sharded_model.close()
    return found
