"""Training with lookups one batch stale, written out as a loop over batches; and the same by the pipeline."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from contextlib import ExitStack
from dataclasses import dataclass
from typing import Any
from unittest import mock

import torch
import torch.distributed as dist
from torch import Tensor
from torchrec.sparse.jagged_tensor import JaggedTensor, KeyedTensor

from lightning_pipe.recsys import ShardedModel, TrainPipeline
from tests.recsys.pipeline_cases import Case, Mixed, adam, grouped, mixed_batches, sharded, train, values_of
from tests.recsys.sharding_cases import ADAGRAD, CPU, ROW_WISE_ADAGRAD, SGD

BATCHES = 12

KINDS: dict[str, str | dict[str, str]] = {
    "table_wise": "table_wise",
    "row_wise": "row_wise",
    "of all kinds": {"people": "column_wise", "things": "row_wise", "tags": "data_parallel", "past": "table_wise"},
}
OPTIMIZERS = {"SGD": SGD, "Adagrad": ADAGRAD, "row-wise Adagrad": ROW_WISE_ADAGRAD}
TRAININGS = {
    f"{optimizer}, {kinds}": Case(Mixed, mixed_batches, KINDS[kinds], OPTIMIZERS[optimizer])
    for optimizer in OPTIMIZERS
    for kinds in KINDS
    # A row split by columns has several of its states.
    if not (optimizer == "row-wise Adagrad" and kinds == "of all kinds")
}

# Called after each batch with the model, the optimizer and how many are trained.
AfterBatch = Callable[[ShardedModel, torch.optim.Optimizer, int], None]


def constant(model: ShardedModel, optimizer: torch.optim.Optimizer, trained: int) -> None:
    """Learning rates stay as they are."""


def falling(model: ShardedModel, optimizer: torch.optim.Optimizer, trained: int) -> None:
    """They fall with every batch."""
    model.set_learning_rate_factor(0.8**trained)
    for group in optimizer.param_groups:
        group["lr"] = 0.05 * 0.9**trained


@dataclass
class Trained:
    losses: list[Tensor]
    values: dict[str, Tensor]


# ---------------------------------------------------------------------- the loop


def tensors_of(output: Any) -> list[Tensor]:
    return [output.values()] if isinstance(output, KeyedTensor) else [part.values() for part in output.values()]


def with_tensors(output: Any, tensors: Sequence[Tensor]) -> Any:
    if isinstance(output, KeyedTensor):
        return KeyedTensor(output.keys(), output.length_per_key(), tensors[0])
    return {
        key: JaggedTensor(tensor, lengths=part.lengths())
        for (key, part), tensor in zip(output.items(), tensors, strict=True)
    }


def features_of(name: str, batch: Any) -> Any:
    return batch.tags if name == "weighted" else batch.sparse


def looked_up(model: ShardedModel, batch: Any) -> dict[str, Any]:
    """What each sharded module gives for a batch, by name."""
    found = {}
    for name, module in model.sharded_modules.items():
        found[name] = module(features_of(name, batch)).wait()
    return found


def train_stale(
    model: ShardedModel,
    optimizer: torch.optim.Optimizer,
    data: Sequence[Any],
    fresh: Iterable[int] = (0,),
    after_batch: AfterBatch = constant,
) -> list[Tensor]:
    """Trains every batch on rows looked up before the batch before has written the tables.

    Args:
        model: sharded, and not rewritten.
        optimizer: of the dense parameters.
        data: on this rank.
        fresh: indices of batches that are looked up after it.
        after_batch: sets learning rates.

    Returns:
        The second of what the model returns, of each batch.
    """
    dense = [parameter for _, parameter in model.dense_parameters()]
    outputs = []
    ahead: dict[str, Any] = {}
    with torch.no_grad():
        ahead = looked_up(model, data[0])
    for index, batch in enumerate(data):
        rows, following = ahead, index + 1
        with torch.no_grad():
            if following < len(data) and following not in fresh:
                ahead = looked_up(model, data[following])
        cut = {
            name: [tensor.detach().clone().requires_grad_() for tensor in tensors_of(one)] for name, one in rows.items()
        }
        with ExitStack() as served:
            for name, module in model.sharded_modules.items():
                output = with_tensors(rows[name], cut[name])
                served.enter_context(mock.patch.object(module, "forward", lambda *_, output=output: output))
            optimizer.zero_grad()
            loss, output = model.module(batch)
        loss.backward()
        outputs.append(output)
        # The gradients of the stale rows go through a lookup with the present learning rate; its rows are not used.
        now = looked_up(model, batch)
        sources = [tensor for name in now for tensor in tensors_of(now[name])]
        gradients = [tensor.grad for name in now for tensor in cut[name]]  # none where nothing used it
        torch.autograd.backward(
            sources,
            [torch.zeros_like(one) if grad is None else grad for one, grad in zip(sources, gradients, strict=True)],
        )
        model.step_data_parallel_tables()
        for parameter in dense:
            assert parameter.grad is not None
            dist.all_reduce(parameter.grad)
            parameter.grad /= dist.get_world_size()
        optimizer.step()
        after_batch(model, optimizer, index + 1)
        with torch.no_grad():
            if following < len(data) and following in fresh:
                ahead = looked_up(model, data[following])
    return outputs


def by_hand(case: Case, fresh: Iterable[int] = (0,), after_batch: AfterBatch = constant) -> Trained:
    model = sharded(case)
    optimizer = adam(model)
    torch.manual_seed(13 + dist.get_rank())
    losses = train_stale(model, optimizer, case.data(BATCHES), fresh, after_batch)
    return Trained(losses, values_of(model, optimizer))


def by_pipeline(case: Case, plan: Any = "semi_sync", after_batch: AfterBatch = constant, **arguments: Any) -> Trained:
    model = sharded(case)
    optimizer = adam(model)
    torch.manual_seed(13 + dist.get_rank())
    pipeline = TrainPipeline(model, optimizer, CPU, plan, **grouped(arguments))
    feed, outputs = iter(case.data(BATCHES)), []
    for trained in range(1, BATCHES + 1):
        outputs.append(pipeline.progress(feed))
        after_batch(model, optimizer, trained)
    assert train(pipeline, feed)[0] == []
    pipeline.close()
    return Trained(outputs, values_of(model, optimizer))
