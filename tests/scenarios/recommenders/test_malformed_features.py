"""A keyed jagged tensor whose lengths do not fit is an InputError on every rank, and no rank waits or ends.

Without the check, TorchRec and FBGEMM read and write other memory: wrong losses, or the end of the process.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch.distributed as dist
from torch.utils.data import DataLoader

from lightning_pipe.recsys import TrainPipeline
from tests.distributed import run_ranks
from tests.engine.device_tensors import watched
from tests.recsys.dynamic import dynamic_cases
from tests.recsys.malformed import MALFORMED, one_weight_less
from tests.recsys.pipeline_cases import CASES, CPU, adam, grouped, sharded, train
from tests.recsys.stream_cases import CUDA, built_for_gpu, place
from tests.strategies.cases import Clicks, Managed, Rows, collate, recsys, trainer

PLANS = ("serial", "base", "prefetch")
STEPS = 5
STATIC = {
    "pooled": "pooled, table_wise",
    "rows": "pooled, row_wise",
    "weighted": "weighted",
    "varying": "batch size per feature",
    "several modules": "everything",
}


def message(call: Callable[..., Any], *arguments: Any) -> str:
    """Class and text of the error of a call."""
    try:
        call(*arguments)
    except Exception as error:
        return f"{type(error).__name__}: {error}"
    return "no error"


def spoilt(data: list[Any], at: int, name: str) -> list[Any]:
    """The batches; on the last rank, the one at this place is malformed."""
    if dist.get_rank() == dist.get_world_size() - 1:
        field = "tags" if name == "one weight less" and hasattr(data[at], "tags") else "sparse"
        spoil = one_weight_less if name == "one weight less" else MALFORMED[name][0]
        data[at] = dataclasses.replace(data[at], **{field: spoil(getattr(data[at], field))})
    return data


def faults_of(kind: str) -> list[str]:
    return [*MALFORMED, "one weight less"] if kind in ("weighted", "several modules") else [*MALFORMED]


def trained(rank: int, world_size: int) -> dict[str, tuple[str, str]]:
    """The expected text and the error, of training and of evaluation, by module, plan, fault and place."""
    found = {}
    for number, (kind, case) in enumerate((kind, CASES[name]) for kind, name in STATIC.items()):
        for index, name in enumerate(faults_of(kind)):
            plan, at = PLANS[(number + index) % len(PLANS)], (0, 2)[index // 2 % 2]
            model, data = sharded(case), case.data(STEPS)
            checks = {"validate_ids": name == "a negative length"}
            pipeline = TrainPipeline(model, adam(model), CPU, plan, **grouped({"checks": checks}))
            if (number + index) % 2:
                train(pipeline, data)
                text = message(list, pipeline.evaluate(iter(spoilt(case.data(STEPS), at, name))))
            else:
                text = message(train, pipeline, spoilt(data, at, name))
            pipeline.close()
            expected = "weights; expected a weight" if name == "one weight less" else MALFORMED[name][2]
            found[f"{kind}, {plan}, {name}, {at}"] = expected, text
    return found


@pytest.mark.parametrize("world_size", [1, 2])
def test_it_is_an_error_on_every_rank_that_names_module_and_keys(world_size: int) -> None:
    for found in run_ranks(trained, world_size):
        for case, (expected, text) in found.items():
            assert text.startswith("InputError: "), (case, text)
            assert expected in text, (case, text)
            assert "the features ['" in text, (case, text)
            assert "of sharded module '" in text, (case, text)
            assert text.startswith("InputError: rank 1: ") == (world_size == 2), (case, text)


def of_maps(rank: int, world_size: int, folder: Path) -> dict[str, tuple[str, str]]:
    """The same for tables that map ids to rows on the rank of the rows: dynamic ones, and managed collision."""
    found = {}
    for index, (name, (_, checked, expected)) in enumerate(MALFORMED.items()):
        plan, at = PLANS[index % len(PLANS)], (0, 2)[index % 2]
        model = dynamic_cases.shard(dynamic_cases.Model(folder / name))
        data = spoilt([dynamic_cases.batch(step, rank) for step in range(STEPS)], at, name)
        pipeline = TrainPipeline(model, adam(model), CPU, plan, **grouped({"checks": {"validate_ids": checked}}))
        text = message(train, pipeline, data)
        pipeline.close()
        model.close()
        found[f"dynamic, {name}"] = expected, text

        def collated(rows: list[Any], name: str = name) -> Any:
            return spoilt([collate(rows)], 0, name)[0]

        for runs in ("fit", "validate"):
            used = trainer(recsys(plan, checks={"validate_ids": checked}), max_epochs=1)
            loader = DataLoader(Rows(8 * world_size), 4, collate_fn=collated)
            text = message(getattr(used, runs), Clicks(Managed), loader)
            found[f"managed, {runs}, {name}"] = expected, text
    return found


def test_tables_that_map_ids_refuse_it_too(tmp_path: Path) -> None:
    for found in run_ranks(of_maps, 2, tmp_path):
        for case, (expected, text) in found.items():
            assert text.startswith("InputError: "), (case, text)
            assert expected in text, (case, text)


def before_the_copy(rank: int, world_size: int) -> list[tuple[str, str, list[str]]]:
    """The same on a watched device, whose copies of the features are not read; and which host waits there were."""
    found = []
    for name in ("one length less", "one id more", "shifted sums"):
        model, data = sharded(CASES["pooled, row_wise"]), spoilt(CASES["pooled, row_wise"].data(STEPS), 2, name)
        with built_for_gpu(), watched() as accelerator:
            place(accelerator, model, [])
            pipeline = TrainPipeline(model, adam(model), CUDA, "base")
            text = message(train, pipeline, accelerator.on_host(data))
            pipeline.close()
            waits = [
                sync.site.function
                for sync in accelerator.syncs
                if "recsys.modules.feature_checks" in sync.site.function
            ]
        found.append((MALFORMED[name][2], text, waits))
    return found


def test_features_for_a_gpu_are_refused_on_the_host_without_a_wait() -> None:
    for found in run_ranks(before_the_copy, 2):
        for expected, text, waits in found:
            assert text.startswith("InputError: rank 1: "), text
            assert expected in text
            assert waits == []
