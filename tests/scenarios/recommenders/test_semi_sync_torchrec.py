"""The semi-synchronous plan beside TorchRec's pipeline of that kind, which needs streams, or what can pass for them."""

from __future__ import annotations

from contextlib import nullcontext
from types import SimpleNamespace
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
needs_gpu = pytest.mark.skipif(not torch.cuda.is_available(), reason="no GPU")


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


class Order:
    """A stream or an event, where work runs in the order of its submission anyway."""

    device = torch.device("cpu")

    def __init__(self, *arguments: Any, **options: Any) -> None: ...

    def record(self, *streams: Any) -> None: ...

    def wait(self, *streams: Any) -> None: ...

    def wait_stream(self, stream: Any) -> None: ...


@pytest.fixture(params=["cpu", pytest.param("cuda", marks=needs_gpu)])
def device(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> torch.device:
    if request.param == "cpu":
        module = SimpleNamespace(
            Event=Order, Stream=Order, current_stream=Order, stream=lambda _: nullcontext(), synchronize=lambda *_: None
        )
        monkeypatch.setattr(torch, "get_device_module", lambda *_: module)
        monkeypatch.setattr(torch.Tensor, "record_stream", lambda *_: None)
    return torch.device(request.param, 0) if request.param == "cuda" else torch.device("cpu")


@pytest.mark.usefixtures("one_rank")
def test_it_trains_as_torchrecs_semi_synchronous_pipeline(device: torch.device) -> None:
    theirs = outputs_of(TrainPipelineSemiSync(*sharded(device), device, start_batch=0))
    pipeline = TrainPipeline(*sharded(device), device, "semi_sync", options={"rewrite": {"method": "direct"}})
    ours = outputs_of(pipeline)
    pipeline.close()
    assert len(ours) == STEPS
    if device.type == "cpu":
        assert all(map(torch.equal, ours, theirs))
    else:
        torch.testing.assert_close(ours, theirs, rtol=1e-6, atol=1e-6)  # sums on a device have no fixed order
