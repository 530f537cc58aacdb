"""The semi-synchronous plan beside TorchRec's own pipeline of that kind, which needs a device with streams."""

from __future__ import annotations

from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torchrec.distributed import DistributedModelParallel
from torchrec.distributed.embeddingbag import EmbeddingBagCollectionSharder
from torchrec.distributed.sharding_plan import construct_module_sharding_plan, table_wise
from torchrec.distributed.train_pipeline.train_pipelines import TrainPipelineSemiSync
from torchrec.distributed.types import ShardingEnv, ShardingPlan
from torchrec.optim.apply_optimizer_in_backward import apply_optimizer_in_backward
from torchrec.optim.keyed import KeyedOptimizerWrapper
from torchrec.optim.optimizers import in_backward_optimizer_filter
from torchrec.streamable import Pipelineable

from lightning_pipe.recsys import TrainPipeline
from tests.recsys.pipeline_cases import Paired
from tests.recsys.rewrite_cases import Bags, Batch, batches

STEPS = 12


class StreamedBatch(Batch, Pipelineable):
    """What TorchRec asks of a batch."""

    def to(self, device: torch.device, non_blocking: bool = False) -> StreamedBatch:
        return StreamedBatch(*(part.to(device, non_blocking=non_blocking) for part in self._parts()))

    def record_stream(self, stream: torch.Stream) -> None:
        for part in self._parts():
            part.record_stream(stream)

    def _parts(self) -> tuple[Any, Any, Any]:
        return self.dense, self.sparse, self.label


def sharded(device: torch.device) -> tuple[DistributedModelParallel, Any]:
    model: nn.Module = Paired(Bags())
    plans: dict[str, Any] = {}
    sharder: Any = EmbeddingBagCollectionSharder()
    for name, module in model.named_modules():
        if isinstance(module, sharder.module_type):
            for parameter in module.parameters():
                apply_optimizer_in_backward(torch.optim.SGD, [parameter], {"lr": 0.5})
            kinds = {config.name: table_wise(rank=0) for config in module.embedding_bag_configs()}
            plans[name] = construct_module_sharding_plan(module, kinds, sharder, 1, 1, device.type)
    assert dist.group.WORLD is not None
    wrapped = DistributedModelParallel(
        model, ShardingEnv.from_process_group(dist.group.WORLD), device, ShardingPlan(plans), [sharder]
    )
    dense = dict(in_backward_optimizer_filter(wrapped.named_parameters()))
    return wrapped, KeyedOptimizerWrapper(dense, lambda parameters: torch.optim.SGD(parameters, lr=0.1))


def outputs_of(pipeline: Any) -> list[torch.Tensor]:
    feed = iter([StreamedBatch(one.dense, one.sparse, one.label) for one in batches(STEPS)])
    found = []
    while True:
        try:
            found.append(pipeline.progress(feed).cpu())
        except StopIteration:
            return found


@pytest.mark.skipif(not torch.cuda.is_available(), reason="TorchRec's TrainPipelineSemiSync needs CUDA streams")
@pytest.mark.usefixtures("one_rank")
def test_it_trains_as_torchrecs_semi_synchronous_pipeline() -> None:
    device = torch.device("cuda", 0)
    theirs = outputs_of(TrainPipelineSemiSync(*sharded(device), device, start_batch=0))
    pipeline = TrainPipeline(*sharded(device), device, "semi_sync", options={"rewrite": {"method": "direct"}})
    ours = outputs_of(pipeline)
    pipeline.close()
    assert len(ours) == STEPS
    torch.testing.assert_close(ours, theirs, rtol=1e-6, atol=1e-6)  # sums on a device have no fixed order


@pytest.mark.usefixtures("one_rank")
def test_without_such_a_device_the_same_training_runs_here() -> None:
    pipeline = TrainPipeline(
        *sharded(torch.device("cpu")), torch.device("cpu"), "semi_sync", options={"rewrite": {"method": "direct"}}
    )
    assert len(outputs_of(pipeline)) == STEPS
    pipeline.close()
