"""Features of the recommenders' strategy together: what each promises alone holds beside the others."""

from __future__ import annotations

from typing import Any

import pytest
import torch
import torch.distributed as dist
from lightning.pytorch.plugins import MixedPrecision
from torch.utils.data import DistributedSampler

from tests.distributed import run_ranks
from tests.strategies.cases import IDS, Clicks, Memory, Pooled, Rows, Sequenced, difference, fit, recsys, state_of
from tests.strategies.cases import loader as rows_of

KINDS = {"past": "row_wise", "people": "column_wise"}
MEMORY = {"free_features_early": True}
BF16 = {"forward": "bf16", "backward": "bf16"}


def under(plan: str, module: Any, data: Any, kinds: Any, trainer: dict[str, Any], **options: Any) -> dict[str, Any]:
    logger = Memory()
    if trainer.get("precision") == "16-mixed":
        trainer = {"plugins": [MixedPrecision("16-mixed", "cpu", torch.amp.GradScaler("cpu"))]}
    used = fit(module, recsys(plan, kinds, **options), data, rows_of(8), logger=logger, max_epochs=1, **trainer)
    return {"state": state_of(used), "losses": module.losses, "lines": logger.lines}


# ---------------------------------------------------------------------- plans that train the same

TOGETHER: dict[str, tuple[dict[str, Any], dict[str, Any]]] = {
    "in half precision": ({"balancer": True, **MEMORY}, {"precision": "16-mixed"}),
    "all at once": (
        {
            "sync_every": 2,
            "balancer": {"exchange": "all_gather"},
            "quantized_comms": BF16,
            "ids_on_wire": "int32",
            "validate_ids": True,
            "detect_nan": True,
            **MEMORY,
        },
        {"precision": "bf16-mixed", "accumulate_grad_batches": 2},
    ),
}


def together(rank: int, world_size: int) -> dict[str, Any]:
    found: dict[str, Any] = {}
    for name, (options, trainer) in TOGETHER.items():
        plans = ["serial", "prefetch", "auto" if "sync_every" in options else "fused_sparse_dist"]
        results = []
        for plan in plans:
            quick = {"exploration": {"iterations": 1, "rounds": 1, "found": 1, "extra_rounds": 0}}
            data = rows_of(21 * world_size + 1)  # the last batch is a short one
            more = {**options, "replicas": 2, **(quick if plan == "auto" else {})}
            results.append(under(plan, Clicks(Sequenced), data, KINDS, trainer, **more))
        serial = results[0]
        found[name] = [
            (difference(other["state"], serial["state"]), other["losses"] == serial["losses"])
            for other in results[1:]
            if other["lines"] == serial["lines"]
        ]
        found[f"{name}, finite"] = all(bool(value.isfinite().all()) for value in serial["state"].values())
    return found


@pytest.mark.exhaustive
def test_replicas_train_to_the_same_bits_beside_all_else() -> None:
    for found in run_ranks(together, 4):
        for name in TOGETHER:
            assert found[name] == [([], True)] * 2, name
            assert found[f"{name}, finite"], name


# ---------------------------------------------------------------------- stale lookups


class Apart(Rows):
    """Rows of which two that are trained one after the other, on any rank, have no id in common."""

    def __getitem__(self, index: int) -> dict[str, Any]:
        row = super().__getitem__(index)
        step = index // (4 * dist.get_world_size())
        half = IDS // 2
        row["sparse"] = {key: ids % half + (step % 2) * half for key, ids in row["sparse"].items()}
        return row


def apart(rank: int, world_size: int) -> dict[str, Any]:
    kinds = {"people": "table_wise", "things": "column_wise"}
    found: dict[str, Any] = {}
    cases: dict[str, tuple[dict[str, Any], dict[str, Any]]] = {
        "accumulated": (MEMORY, {"accumulate_grad_batches": 3}),
        "replicated": ({"replicas": 2, "balancer": True}, {"accumulate_grad_batches": 2}),
    }
    rows = Apart(28 * world_size)
    data = rows_of(dataset=rows, sampler=DistributedSampler(rows, shuffle=False))
    for name, (options, trainer) in cases.items():
        stale, serial = (
            under(plan, Clicks(Pooled), data, kinds, trainer, **options) for plan in ("semi_sync", "serial")
        )
        found[name] = difference(stale["state"], serial["state"]), stale["losses"] == serial["losses"]
    return found


def test_stale_lookups_change_nothing_where_batches_have_no_rows_in_common() -> None:
    for found in run_ranks(apart, 4):
        assert found == dict.fromkeys(found, ([], True))
