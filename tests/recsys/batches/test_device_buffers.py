"""Copies into memory of batches that nobody holds: when it is used again, when it is not, and that values are right.

Copies from the CPU to the CPU take the place of copies to a device, unless there is one.
"""

from __future__ import annotations

import gc
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torchrec.sparse.jagged_tensor import KeyedJaggedTensor

from lightning_pipe.engine.runtime.record_use import record_use
from lightning_pipe.recsys.batches.device_buffers import DeviceBuffers
from tests.recsys.batch_memory_cases import Copying, copied, copying
from tests.recsys.pipeline_cases import CASES, PLANS, STEPS, outcome, sharded, train
from tests.recsys.rewrite_cases import batches
from tests.recsys.sharding_cases import CPU
from tests.recsys.train_pipeline_cases import POOLED, pipeline_of

GPU = pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")


def copy_of(value: Any) -> Any:
    return copied(value, CPU)


def address(tensor: torch.Tensor) -> int:
    return tensor.untyped_storage().data_ptr()


def filled(start: int, count: int = 6) -> torch.Tensor:
    return torch.arange(start, start + count)


def test_memory_that_nobody_holds_is_used_again() -> None:
    buffers = DeviceBuffers(CPU)
    move = buffers.filled_by(copy_of)
    first = address(move(filled(0)))
    second = move(filled(7))
    assert address(second) == first
    assert second.tolist() == [7, 8, 9, 10, 11, 12]
    assert (buffers.made, buffers.reused) == (1, 1)


class Saved(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, weight: torch.Tensor, values: torch.Tensor) -> torch.Tensor:
        ctx.save_for_backward(values)
        return weight * values.sum()

    @staticmethod
    def backward(ctx: Any, *gradients: torch.Tensor) -> Any:
        return gradients[0] * ctx.saved_tensors[0].sum(), None


def in_graph(tensor: torch.Tensor) -> Any:
    return Saved.apply(torch.ones((), requires_grad=True), tensor)


def in_a_cycle(tensor: torch.Tensor) -> Any:
    holder: list[Any] = [tensor]
    holder.append(holder)
    return lambda: holder[0]


# How a part of a batch can be held, and the values that the holder sees.
HOLDERS: dict[str, tuple[Callable[[torch.Tensor], Any], Callable[[Any], list[int]]]] = {
    "the tensor": (lambda tensor: tensor, lambda held: held.tolist()),
    "a view": (lambda tensor: tensor[:], lambda held: held.tolist()),
    "the base of a view": (lambda tensor: tensor[1:]._base, lambda held: held.tolist()),
    "a detached tensor": (lambda tensor: tensor.detach(), lambda held: held.tolist()),
    "parts": (lambda tensor: tensor.split(2)[2], lambda held: [0, 1, 2, 3, *held.tolist()]),
    "NumPy": (lambda tensor: tensor.numpy(), lambda held: held.tolist()),
    "bytes of NumPy's": (lambda tensor: memoryview(tensor.numpy().data), lambda held: held.tolist()),
    "DLPack": (lambda tensor: torch.from_dlpack(tensor), lambda held: held.tolist()),
    "the storage": (
        lambda tensor: tensor.untyped_storage(),
        lambda held: torch.empty(0, dtype=torch.int64).set_(held, 0, (6,), (1,)).tolist(),
    ),
    "the typed storage": (lambda tensor: tensor.storage(), lambda held: held.tolist()[:6]),
    "a graph": (in_graph, lambda held: [int(held.grad_fn.saved_tensors[0][place]) for place in range(6)]),
    "a cycle": (in_a_cycle, lambda held: held().tolist()),
}


@pytest.mark.parametrize("holder", HOLDERS)
@pytest.mark.filterwarnings("ignore:TypedStorage is deprecated")
def test_what_is_held_is_never_written_to_and_used_again_once_it_is_let_go_of(holder: str) -> None:
    hold, values_of = HOLDERS[holder]
    buffers = DeviceBuffers(CPU)
    move = buffers.filled_by(copy_of)
    held = hold(move(filled(0)))
    for start in range(10, 50, 10):
        assert move(filled(start)).tolist() == filled(start).tolist()
    assert values_of(held) == [0, 1, 2, 3, 4, 5]
    assert buffers.made == 2
    del held
    gc.collect()
    one, other = move(filled(60)), move(filled(70))
    assert (one.tolist(), other.tolist()) == (filled(60).tolist(), filled(70).tolist())
    assert buffers.made == 2


def test_a_batch_that_is_in_flight_keeps_its_memory() -> None:
    buffers = DeviceBuffers(CPU)
    move = buffers.filled_by(copy_of)
    flying = [move(filled(0)), move(filled(10))]
    for start in range(20, 100, 10):
        flying.append(move(filled(start)))
        assert [part.tolist() for part in flying] == [filled(start - back).tolist() for back in (20, 10, 0)]
        del flying[0]
    assert buffers.made == 3


def test_parts_have_memory_of_their_own_whatever_their_size() -> None:
    buffers = DeviceBuffers(CPU)
    move = buffers.filled_by(lambda batch: [copy_of(part) for part in batch])
    for start in range(4):
        ids, label = move([filled(start, 1000), torch.full((4,), float(start))])
        assert ids.tolist() == filled(start, 1000).tolist()
        assert label.tolist() == [start] * 4
        del ids, label
    assert (buffers.made, buffers.reused) == (2, 6)


def test_a_part_that_grows_gets_more_memory_in_place_of_what_it_had() -> None:
    buffers = DeviceBuffers(CPU)
    move = buffers.filled_by(copy_of)
    for count in (100, 3000, 50, 2999, 3100, 9000, 1):
        moved = move(filled(count, count))
        assert moved.tolist() == filled(count, count).tolist()
        assert moved.untyped_storage().nbytes() >= count * 8
        del moved
    assert buffers.made == 3  # 3100 fit into what an eighth more than 3000 takes
    assert [len(kept) for kept in buffers._buffers.values()] == [1]


def test_batches_that_are_kept_for_ever_do_not_pile_up_here() -> None:
    buffers = DeviceBuffers(CPU, most_kept=3)
    move = buffers.filled_by(copy_of)
    kept = [move(filled(start)) for start in range(20)]
    assert [part[0].item() for part in kept] == list(range(20))
    assert [len(held) for held in buffers._buffers.values()] == [3]


@pytest.mark.parametrize("dtype", [torch.int32, torch.float64, torch.bool, torch.uint8, torch.bfloat16])
@pytest.mark.parametrize("shape", [(5,), (2, 3), (3, 1, 2), ()])
def test_shapes_and_dtypes_are_those_of_the_source(dtype: torch.dtype, shape: tuple[int, ...]) -> None:
    move = DeviceBuffers(CPU).filled_by(copy_of)
    for value in (0, 1):
        source = torch.full(shape, value, dtype=dtype)
        moved = move(source)
        assert torch.equal(moved, source)
        assert (moved.dtype, moved.stride(), moved.is_contiguous()) == (dtype, source.stride(), True)
        del moved


def test_what_is_no_plain_copy_is_left_to_pytorch() -> None:
    buffers = DeviceBuffers(CPU)
    transposed = torch.arange(6).view(2, 3).t()
    for source, change in (
        (transposed, {}),
        (torch.arange(3), {"dtype": torch.float32}),
        (torch.empty(0), {}),
        (torch.eye(2).to_sparse(), {}),
    ):
        moved = buffers.filled_by(lambda part: part.to(CPU, copy=True, **change))(source)  # noqa: B023
        assert torch.equal(moved.to_dense(), source.to(moved.dtype).to_dense())
        assert moved.stride() == source.stride() if source.layout is torch.strided else moved.is_sparse
    assert buffers.made == 0


def test_a_lazily_conjugated_part_has_its_values() -> None:
    source = torch.view_as_complex(torch.rand(3, 2)).conj()
    assert torch.equal(DeviceBuffers(CPU).filled_by(copy_of)(source), source)


def test_gradients_flow_through_a_copy() -> None:
    weight = torch.ones(3, requires_grad=True)
    buffers = DeviceBuffers(CPU)
    (buffers.filled_by(copy_of)(weight) * torch.arange(3.0)).sum().backward()
    assert weight.grad is not None
    assert weight.grad.tolist() == [0, 1, 2]
    assert buffers.made == 1


def test_memory_that_its_holder_shrank_or_shared_is_not_used_again() -> None:
    buffers = DeviceBuffers(CPU)
    move = buffers.filled_by(copy_of)
    move(filled(0)).untyped_storage().resize_(0)
    assert move(filled(1)).tolist() == filled(1).tolist()
    move(filled(2)).share_memory_()
    assert move(filled(3)).tolist() == filled(3).tolist()
    assert buffers.made == 3


def test_cleared_buffers_leave_what_is_held() -> None:
    buffers = DeviceBuffers(CPU)
    move = buffers.filled_by(copy_of)
    held = move(filled(0))
    buffers.clear()
    assert move(filled(9)).tolist() == filled(9).tolist()
    assert held.tolist() == filled(0).tolist()


def test_a_batch_that_is_on_the_device_already_is_not_copied() -> None:
    buffers = DeviceBuffers(CPU)
    source = filled(0)
    assert buffers.filled_by(lambda part: part.to(CPU))(source) is source
    assert buffers.made == 0


# In a pipeline.


@pytest.mark.parametrize("plan", PLANS)
@pytest.mark.parametrize("case", ["everything", "weighted"])
def test_every_plan_trains_as_the_serial_one_without_buffers_to_the_bit(one_rank: Any, case: str, plan: str) -> None:
    expected = outcome(copying(CASES[case]), "serial")
    assert outcome(copying(CASES[case]), plan, memory={"copy_in_place": True}).same(expected)


def test_a_pipeline_stops_asking_for_memory_and_kept_batches_stay(one_rank: Any) -> None:
    model = sharded(POOLED)
    data = batches(4 * STEPS)
    kept: list[Any] = []

    def step(batch: Any) -> Any:
        if len(kept) < 2:
            kept.append((batch.dense, batch.sparse.values()[:], batch.label.numpy()))
        return model.module(batch)

    with pipeline_of(model, "prefetch", custom_model_fwd=step, memory={"copy_in_place": True}) as pipeline:
        train(pipeline, [Copying(batch) for batch in data[:STEPS]])
        assert pipeline.device_buffers is not None
        made = pipeline.device_buffers.made
        train(pipeline, [Copying(batch) for batch in data[STEPS:]])
        more = pipeline.device_buffers.made - made
        reused = pipeline.device_buffers.reused
    assert more == 0
    assert reused > 3 * STEPS * 4
    for (dense, values, label), batch in zip(kept, data, strict=False):
        assert torch.equal(dense, batch.dense)
        assert torch.equal(values, batch.sparse.values())
        assert label.tolist() == batch.label.tolist()


# On a device with streams.


@GPU
def test_a_device_is_not_overwritten_while_a_stream_reads_it() -> None:
    device = torch.device("cuda", torch.cuda.current_device())
    buffers = DeviceBuffers(device)
    move = buffers.filled_by(lambda part: part.to(device, non_blocking=True))
    copies = torch.cuda.Stream(device)
    sums = []
    for start in range(40):
        with torch.cuda.stream(copies):
            moved = move(torch.full((1 << 16,), float(start)).pin_memory())
        torch.cuda.current_stream(device).wait_stream(copies)
        record_use(moved)
        busy = torch.rand(1024, 1024, device=device)
        for _ in range(20):
            busy = busy @ busy / 512
        sums.append((moved + busy[0, 0] * 0).nan_to_num().mean())
        del moved
    assert [float(one) for one in sums] == [float(start) for start in range(40)]
    assert buffers.made <= 3


@GPU
def test_jagged_batches_are_moved_into_buffers_on_a_device() -> None:
    device = torch.device("cuda", torch.cuda.current_device())
    buffers = DeviceBuffers(device)
    move = buffers.filled_by(lambda features: features.to(device, non_blocking=True))
    for batch in batches(12):
        moved: KeyedJaggedTensor = move(batch.sparse)
        assert torch.equal(moved.values().cpu(), batch.sparse.values())
        assert torch.equal(moved.lengths().cpu(), batch.sparse.lengths())
        del moved
    assert buffers.reused > buffers.made
