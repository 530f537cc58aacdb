"""A script moved from TorchRec's DistributedModelParallel trains the same numbers with the same arguments."""

from __future__ import annotations

from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed._shard.sharded_tensor import ShardedTensor
from torchrec import optim as torchrec_optim
from torchrec.distributed import DistributedModelParallel
from torchrec.distributed.embeddingbag import EmbeddingBagCollectionSharder
from torchrec.distributed.planner import EmbeddingShardingPlanner, ParameterConstraints, Topology

from lightning_pipe.recsys import TrainPipeline
from tests.distributed import run_ranks
from tests.strategies.cases import Batch, Clicks, Dlrm, fit, loader, recsys

TABLES = ("people", "things")
# What scripts give, which leave out what they are content with.
OPTIMIZERS: dict[str, tuple[Any, dict[str, float]]] = {
    "row-wise Adagrad": (torchrec_optim.RowWiseAdagrad, {"lr": 0.1}),
    "Adagrad": (torch.optim.Adagrad, {"lr": 0.1}),
    "no argument": (torch.optim.SGD, {}),
    "the kernel's names": (torchrec_optim.RowWiseAdagrad, {"learning_rate": 0.1, "eps": 1e-4}),
}


class _Ported(Clicks):
    """As a script has it: tables with an optimizer in TorchRec's way."""

    def __init__(self, optimizer: str) -> None:
        optimizer_class, arguments = OPTIMIZERS[optimizer]
        super().__init__(Dlrm, in_backward={"class_path": optimizer_class, "init_args": arguments})


class _WithLoss(nn.Module):
    """What a pipeline trains."""

    def __init__(self, module: Clicks) -> None:
        super().__init__()
        self.network = module.network

    def forward(self, batch: Batch) -> tuple[Tensor, Tensor]:
        loss = nn.functional.binary_cross_entropy_with_logits(self.network(batch), batch.label)
        return loss, loss.detach()


def _fill(model: nn.Module, values: dict[str, Tensor]) -> None:
    """Give the tables the values that they had before TorchRec sharded them, and drew new ones."""
    with torch.no_grad():
        for name, value in model.state_dict().items():
            for part in value.local_shards() if isinstance(value, ShardedTensor) else ():
                offset, size = part.metadata.shard_offsets[0], part.metadata.shard_sizes[0]
                part.tensor.copy_(values[name][offset : offset + size])


def _torchrecs_model(optimizer: str) -> tuple[nn.Module, torch.optim.Optimizer]:
    module = _WithLoss(_Ported(optimizer))
    values = {name: value.clone() for name, value in module.state_dict().items()}
    planner = EmbeddingShardingPlanner(
        topology=Topology(2, "cpu"),
        constraints={name: ParameterConstraints(sharding_types=["table_wise"]) for name in TABLES},
    )
    sharders: Any = [EmbeddingBagCollectionSharder()]
    plan = planner.collective_plan(module, sharders, dist.group.WORLD)
    model = DistributedModelParallel(module, device=torch.device("cpu"), plan=plan, sharders=sharders)
    _fill(model, values)
    dense = [parameter for parameter in model.parameters() if not hasattr(parameter, "_in_backward_optimizers")]
    return model, torch.optim.Adam(dense, lr=0.05)


def _by_hand(optimizer: str) -> list[float]:
    model, dense = _torchrecs_model(optimizer)
    losses = []
    for batch in loader(in_order=True):
        dense.zero_grad()
        loss, _ = model(batch)
        loss.backward()
        dense.step()
        losses.append(float(loss))
    return losses


def _through_pipeline(optimizer: str) -> list[float]:
    pipeline: Any = TrainPipeline(*_torchrecs_model(optimizer), torch.device("cpu"))
    batches, losses = iter(loader(in_order=True)), []
    try:
        while True:
            losses.append(float(pipeline.progress(batches)))
    except StopIteration:
        return losses
    finally:
        pipeline.close()


def _losses(rank: int, world: int) -> dict[str, dict[str, list[float]]]:
    return {optimizer: _losses_with(optimizer) for optimizer in OPTIMIZERS}


def _losses_with(optimizer: str) -> dict[str, list[float]]:
    module = _Ported(optimizer)
    fit(
        module,
        recsys("prefetch", dict.fromkeys(TABLES, "table_wise"), optimizer=None),
        loader(in_order=True),
        max_epochs=1,
    )
    return {
        "TorchRec": _by_hand(optimizer),
        "TrainPipeline": _through_pipeline(optimizer),
        "strategy": module.losses,
    }


def test_arguments_that_a_script_leaves_out_are_torchrecs() -> None:
    for of_rank in run_ranks(_losses, 2):
        for optimizer, found in of_rank.items():
            assert len(found["TorchRec"]) == 3, optimizer
            assert found["TrainPipeline"] == found["TorchRec"], optimizer
            assert found["strategy"] == found["TorchRec"], optimizer


def test_one_line_names_them_with_both_values(caplog: pytest.LogCaptureFixture) -> None:
    with caplog.at_level("INFO"):
        fit(_Ported("row-wise Adagrad"), recsys(optimizer=None), max_steps=1, max_epochs=-1)
    (line,) = [record.getMessage() for record in caplog.records if "did not set" in record.getMessage()]
    assert "torchrec.optim.RowWiseAdagrad of 2 table(s) with eps=1e-08 (the class's default is 1e-10)" in line
