"""Predicted step times: sizes of a known batch, and what a disk and a link cost under each plan."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torchrec.modules.embedding_configs import EmbeddingBagConfig, EmbeddingConfig
from torchrec.sparse.jagged_tensor import KeyedJaggedTensor

from lightning_pipe.engine.planning.network import Collective
from lightning_pipe.engine.profiling.profile import THIS_MACHINE
from lightning_pipe.recsys.plans.recsys_plans import recsys_plan
from lightning_pipe.recsys.tasks.step_predictions import DISK, LINK, StepSizes, compute_step_sizes, predict_step_times
from lightning_pipe.recsys.tasks.task_list import recsys_tasks

CPU = torch.device("cpu")


def test_sizes_are_those_of_the_ids_outputs_and_dense_parameters_of_a_batch() -> None:
    bags = EmbeddingBagConfig(name="a", embedding_dim=4, num_embeddings=9, feature_names=["f", "g"])
    sequences = EmbeddingConfig(name="b", embedding_dim=8, num_embeddings=9, feature_names=["h"])
    dense = [("w", torch.nn.Parameter(torch.zeros(5)))]
    tables = {config.name: SimpleNamespace(config=config) for config in (bags, sequences)}
    sharded: Any = SimpleNamespace(tables=tables, dense_parameters=lambda: dense)
    # Two rows: f has 1 + 2 ids, g has 1 + 0, h has 3 + 0; of table a, four ids in three rows.
    lengths = torch.tensor([1, 2, 1, 0, 3, 0])
    kjt = KeyedJaggedTensor(["f", "g", "h"], torch.tensor([1, 1, 2, 3, 5, 5, 5]), lengths=lengths)
    sizes = compute_step_sizes(sharded, {"ids": kjt, "x": torch.zeros(2, 3)})
    assert sizes is not None
    assert sizes.rows == 3 + 1
    outputs = Collective("all_to_all", 4 * (2 * 2 * 4 + 3 * 8))
    assert sizes.messages["EmbInputDistWait"] == Collective("all_to_all", 8 * 7 + 8 * 6)
    assert (sizes.messages["EmbForward"], sizes.messages["EmbBackward"]) == (outputs, outputs)
    assert sizes.messages["DenseBackward"] == Collective("all_reduce", 20)
    assert compute_step_sizes(sharded, {"x": torch.zeros(2)}) is None


TIMES = {
    "H2DAndShuffle": 0.0,
    "EmbInputDistStart": 0.0,
    "EmbInputDistWait": 0.0,
    "EmbPrefetch": 0.0,
    "EmbForward": 0.010,
    "DenseForward": 0.010,
    "LossPostprocess": 0.0,
    "DenseBackward": 0.020,
    "EmbBackward": 0.010,
    "FinalizeGrads": 0.0,
    "OptimStep": 0.0,
}


def predicted(sizes: StepSizes | None, on_disk: bool = False) -> dict[str, dict[str, float]]:
    plan = recsys_plan("base", recsys_tasks())
    return predict_step_times(plan, TIMES, sizes, ranks=1, device=CPU, on_disk=on_disk)


def test_prefetch_hides_reads_of_a_disk_up_to_the_time_of_the_backward_and_base_hides_none() -> None:
    # 100 µs a read, 8 at the same time: 2,400 rows take 30 ms, as long as the backward. Training takes 50 ms.
    times = predicted(StepSizes({}, 2400))
    assert times[THIS_MACHINE] == pytest.approx({"serial": 0.050, "base": 0.050, "prefetch": 0.050})
    assert times[DISK] == pytest.approx({"serial": 0.080, "base": 0.080, "prefetch": 0.050})
    # 3,200 rows take 40 ms and are read after the forward pass, which takes 20 ms.
    assert predicted(StepSizes({}, 3200))[DISK] == pytest.approx({"serial": 0.090, "base": 0.090, "prefetch": 0.060})


def test_a_link_costs_the_exchange_of_embeddings_under_every_exact_plan_and_that_of_ids_only_under_serial() -> None:
    # Half of 2.5 MB leaves a rank, which takes 10 ms at 1 Gbit/s.
    exchange = Collective("all_to_all", 2_500_000)
    times = predicted(StepSizes({"EmbInputDistWait": exchange}, 0))[LINK]
    assert times["serial"] == pytest.approx(0.060, rel=0.01)
    assert times["base"] == pytest.approx(0.050, rel=0.01)
    times = predicted(StepSizes({"EmbForward": exchange}, 0))[LINK]
    assert times["serial"] == pytest.approx(0.060, rel=0.01)
    assert times["base"] == pytest.approx(0.060, rel=0.01)


def test_other_machines_are_not_predicted_without_sizes_nor_a_disk_for_rows_that_are_on_one() -> None:
    assert set(predicted(None)) == {THIS_MACHINE}
    assert set(predicted(StepSizes({}, 1), on_disk=True)) == {THIS_MACHINE, LINK}
