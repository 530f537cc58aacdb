"""Dense gradients are averaged as DistributedDataParallel does, in buckets that every rank launches in one order."""

from __future__ import annotations

import copy
import gc
import traceback
import weakref
from collections.abc import Callable, Iterator
from contextlib import contextmanager, nullcontext
from functools import partial
from typing import Any, cast
from unittest import mock

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel

from lightning_pipe.engine.common.errors import SetupError
from lightning_pipe.recsys.dense import dense_reduction
from lightning_pipe.recsys.dense.dense_reduction import DenseGradientReducer
from tests.distributed import run_ranks
from tests.engine.device_tensors import watched
from tests.engine.fake_device import FakeDevice, FakeStream

WIDTH = 6
# Less than one layer has: each parameter is a bucket of its own, but for small biases.
TINY = 4 * WIDTH * WIDTH // 2

Gradients = dict[str, torch.Tensor | None]
Case = Callable[[int, dist.ProcessGroup], Any]


class Chain(nn.Module):
    """Layers of which each call uses some, in the order given."""

    def __init__(self, dtype: torch.dtype = torch.float32) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.layers = nn.ModuleList(nn.Linear(WIDTH, WIDTH, dtype=dtype) for _ in range(5))

    def forward(self, value: torch.Tensor, uses: list[int]) -> torch.Tensor:
        for index in uses:
            value = torch.tanh(self.layers[index](value))
        return value.square().sum()


EVERYTHING = [0, 1, 2, 3, 4]


def batch(rank: int, step: int) -> torch.Tensor:
    return torch.randn(3, WIDTH, generator=torch.Generator().manual_seed(100 * step + rank))


def gradients(module: nn.Module) -> Gradients:
    return {name: None if p.grad is None else p.grad.clone() for name, p in module.named_parameters()}


def local_gradients(module: nn.Module, loss_of: Callable[[nn.Module], torch.Tensor]) -> Gradients:
    """What this rank has to send: by a copy without hooks."""
    module = copy.deepcopy(module)
    loss_of(module).backward()
    return gradients(module)


@contextmanager
def reducing(module: nn.Module, group: dist.ProcessGroup, bucket_bytes: int = TINY) -> Iterator[DenseGradientReducer]:
    reducer = DenseGradientReducer(list(module.named_parameters()), group, bucket_bytes)
    try:
        yield reducer
    finally:
        reducer.close()


@contextmanager
def recorded_launches() -> Iterator[list[int]]:
    """Numbers of elements of what is all-reduced in the body."""
    sizes: list[int] = []
    all_reduce = dist.all_reduce

    def record(tensor: torch.Tensor, *args: Any, **kwargs: Any) -> Any:
        sizes.append(tensor.numel())
        return all_reduce(tensor, *args, **kwargs)

    with mock.patch.object(dist, "all_reduce", record):
        yield sizes


def error_of(call: Callable[[], object]) -> str:
    """The text of the SetupError that *call* raises."""
    try:
        call()
    except SetupError as error:
        return str(error)
    return "no error"


# ---------------------------------------------------------------------- on each of two ranks

# What rank 0 and rank 1 use: layer 3 is used by one rank only, layer 4 by none; the orders differ.
USES = [[0, 1, 2], [2, 3, 0, 1]]


def uneven_use(rank: int, group: dist.ProcessGroup) -> Any:
    module = Chain()
    local = local_gradients(module, lambda copied: copied(batch(rank, 0), USES[rank]))
    with reducing(module, group) as reducer:
        reducer.prepare_for_backward()
        module(batch(rank, 0), USES[rank]).backward()
        reducer.finalize()
        return local, gradients(module)


def steps_beside_ddp(rank: int, group: dist.ProcessGroup) -> Any:
    """Four steps, the second with a micro-batch before it; the gradients of each step, of DDP and of the reducer."""
    module = Chain()
    wrapped = DistributedDataParallel(copy.deepcopy(module), process_group=group, find_unused_parameters=True)
    optimizers = [torch.optim.SGD(m.parameters(), lr=0.1, momentum=0.9) for m in (wrapped, module)]
    seen = []
    with reducing(module, group) as reducer:
        for step in range(4):
            uses = USES[(rank + step) % 2]
            if step == 1:
                with wrapped.no_sync():
                    wrapped(batch(rank, 10), uses).backward()
                with reducer.no_sync():
                    reducer.prepare_for_backward()
                    module(batch(rank, 10), uses).backward()
                    reducer.finalize()
            wrapped(batch(rank, step), uses).backward()
            reducer.prepare_for_backward()
            module(batch(rank, step), uses).backward()
            reducer.finalize()
            seen.append((gradients(wrapped.module), gradients(module)))
            for optimizer in optimizers:
                optimizer.step()
                # The last step finds zeros where it would find nothing.
                optimizer.zero_grad(set_to_none=step < 2)
    return seen


def accumulation(rank: int, group: dist.ProcessGroup) -> Any:
    """Layer 3 is used on rank 1 in the first micro-batch only."""
    module = Chain()
    uses = [USES[rank], [0, 1]]
    local = local_gradients(module, lambda copied: copied(batch(rank, 0), uses[0]) + copied(batch(rank, 1), uses[1]))
    with reducing(module, group) as reducer, recorded_launches() as launches:
        with reducer.no_sync():
            reducer.prepare_for_backward()
            module(batch(rank, 0), uses[0]).backward()
            reducer.finalize()
        launches_before = len(launches)
        before = gradients(module)
        reducer.prepare_for_backward()
        module(batch(rank, 1), uses[1]).backward()
        reducer.finalize()
        alone = local_gradients(Chain(), lambda copied: copied(batch(rank, 0), uses[0]))
        return launches_before, alone, before, local, gradients(module)


def launch_order(rank: int, group: dist.ProcessGroup) -> Any:
    """Ranks that use layers in opposite orders; and when the first bucket was launched in a plain backward."""
    module = Chain()
    opposite = EVERYTHING if rank == 0 else EVERYTHING[::-1]
    with reducing(module, group) as reducer, recorded_launches() as launches:
        reducer.prepare_for_backward()
        module(batch(rank, 0), opposite).backward()
        in_backward = len(launches)
        reducer.finalize()
    with reducing(module, group) as reducer, recorded_launches() as plain:
        launched_at_first_layer = []
        module.get_parameter("layers.0.weight").register_hook(lambda _: launched_at_first_layer.append(len(plain)))
        reducer.prepare_for_backward()
        module(batch(rank, 0), EVERYTHING).backward()
        reducer.finalize()
    return in_backward, launches, launched_at_first_layer[0]


class Mixed(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        kinds = [torch.float32, torch.float64, torch.bfloat16, torch.complex64, torch.float32]
        self.values = nn.ParameterList(torch.ones(3, dtype=kind) for kind in kinds)
        self.last = nn.Parameter(torch.ones(2, 4, 3, 5).to(memory_format=torch.channels_last))

    def forward(self, factor: int) -> torch.Tensor:
        total = (self.last * factor).sum()
        for index, value in enumerate(self.values):
            if index != 3 or factor == 1:  # the complex one is used by rank 0 only
                total = total + (value * (factor + index)).abs().sum().to(total.dtype)
        return total


def mixed_dtypes(rank: int, group: dist.ProcessGroup) -> Any:
    module = Mixed()
    local = local_gradients(module, lambda copied: copied(rank + 1))
    with reducing(module, group, 25 * 2**20) as reducer, recorded_launches() as launches:
        reducer.prepare_for_backward()
        module(rank + 1).backward()
        reducer.finalize()
        strides = module.last.grad.stride() == module.last.stride() if module.last.grad is not None else None
        return local, gradients(module), launches, strides


def failed_backward(rank: int, group: dist.ProcessGroup) -> Any:
    """Rank 0's backward raises in the middle; a step later all is well again. Once with reset, once without."""
    results = []
    for with_reset in (True, False):
        module = Chain()
        with reducing(module, group) as reducer:
            reducer.prepare_for_backward()
            if rank == 0:
                handle = module.get_parameter("layers.2.weight").register_hook(_raise)
                message = "no error"
                try:
                    module(batch(rank, 0), EVERYTHING).backward()
                except ZeroDivisionError as error:
                    message = str(error)
                handle.remove()
                if with_reset:
                    reducer.finish_failed_backward()
            else:
                module(batch(rank, 0), EVERYTHING).backward()
                message = "no error"
                if with_reset:
                    reducer.finalize()
            kept = gradients(module)
            module.zero_grad()
            reducer.prepare_for_backward()
            module(batch(rank, 1), EVERYTHING).backward()
            reducer.finalize()
            local = local_gradients(Chain(), lambda copied: copied(batch(rank, 1), EVERYTHING))
            results.append((message, kept, local, gradients(module)))
    return results


class Watched:
    """A reduction that is under way."""

    def __init__(self, work: Any, waited: list[Any]) -> None:
        self._work, self._waited = work, waited

    def wait(self) -> None:
        self._waited.append(self)
        self._work.wait()


def left_over(rank: int, group: dist.ProcessGroup) -> Any:
    """How many reductions there were, and were waited for, after a step that nobody finished and in the next one."""
    module = Chain()
    waited: list[Any] = []
    all_reduce = dist.all_reduce
    with (
        mock.patch.object(dist, "all_reduce", lambda *args, **kwargs: Watched(all_reduce(*args, **kwargs), waited)),
        reducing(module, group) as reducer,
        recorded_launches() as launches,
    ):
        counts = []
        for _ in range(2):
            reducer.prepare_for_backward()
            counts.append((len(launches), len(set(waited))))
            module(batch(rank, 0), EVERYTHING).backward()
            kept = gradients(module)
            reducer.discard_averaged_gradients()
            counts.append((len(launches), len(set(waited))))
            assert_same(gradients(module), kept)
        reducer.prepare_for_backward()
        counts.append((len(launches), len(set(waited))))
        module.zero_grad()
        module(batch(rank, 1), EVERYTHING).backward()
        reducer.finalize()
    local = local_gradients(Chain(), lambda copied: copied(batch(rank, 1), EVERYTHING))
    return counts, local, gradients(module)


def _raise(gradient: torch.Tensor) -> None:
    raise ZeroDivisionError("in the middle")


def second_backward(rank: int, group: dist.ProcessGroup) -> Any:
    """The error of one on gradients that were sent, with and without sync."""
    errors = []
    for sync in (True, False):
        module = Chain()
        with reducing(module, group) as reducer:
            reducer.prepare_for_backward()
            loss = module(batch(rank, 0), EVERYTHING)
            loss.backward(retain_graph=True)
            with nullcontext() if sync else reducer.no_sync():
                errors.append(error_of(loss.backward))
    return errors


class Tied(nn.Module):
    """The gradient of a sparse embedding is dense on the ranks that also multiply with its weight."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.embedding = nn.Embedding(4, 3, sparse=True)

    def forward(self, multiplies: bool) -> torch.Tensor:
        rows = self.embedding(torch.tensor([1, 2]))
        return (rows @ self.embedding.weight.T).sum() if multiplies else rows.sum()


def sparse_on_one_rank(rank: int, group: dist.ProcessGroup) -> Any:
    """The gradient of a rank, which is sparse on rank 1, and the average."""
    module = Tied()
    with reducing(module, group) as reducer:
        reducer.prepare_for_backward()
        module(rank == 0).backward()
        own = module.embedding.weight.grad
        assert own is not None
        before = own.is_sparse, own.to_dense().clone()
        reducer.finalize()
    assert module.embedding.weight.grad is not None
    return *before, module.embedding.weight.grad.clone()


def waits_of_the_host(rank: int, group: dist.ProcessGroup) -> Any:
    dense = Chain()
    with watched() as device:
        reducer = DenseGradientReducer(list(dense.named_parameters()), group, TINY)
        reducer.prepare_for_backward()
        dense(batch(rank, 0), EVERYTHING).backward()
        device.syncs.clear()
        reducer.finalize()
        waits = [str(sync) for sync in device.syncs]
        reducer.close()
    return waits


def frozen_then_trained(rank: int, group: dist.ProcessGroup) -> Any:
    module = Chain()
    uses = [0, 1]
    module.layers[0].requires_grad_(False)
    with reducing(module, group) as reducer:
        reducer.prepare_for_backward()
        module(batch(rank, 0), uses).backward()
        reducer.finalize()
        first = gradients(module)
        module.zero_grad()
        module.layers[0].requires_grad_(True)
        reducer.prepare_for_backward()
        module(batch(rank, 0), uses).backward()
        reducer.finalize()
    return first, local_gradients(Chain(), lambda copied: copied(batch(rank, 0), uses)), gradients(module)


def closed(rank: int, group: dist.ProcessGroup) -> Any:
    module = Chain()
    with reducing(module, group) as reducer:
        reducer.prepare_for_backward()
    with recorded_launches() as launches:
        module(batch(rank, 0), USES[rank]).backward()
        reducer.prepare_for_backward()
        reducer.finalize()
    alive = weakref.ref(reducer)
    del reducer
    gc.collect()
    # The module still lives, and would hold the reducer by a hook.
    local = local_gradients(Chain(), lambda copied: copied(batch(rank, 0), USES[rank]))
    return launches, alive() is None, local, gradients(module)


def other_parameters(rank: int, group: dist.ProcessGroup) -> Any:
    """The error where dtypes differ, and where one rank trains nothing."""

    def build(module: nn.Module) -> None:
        with reducing(module, group):
            pass

    other_dtype = Chain() if rank == 0 else Chain(torch.float64)
    frozen = Chain().requires_grad_(rank == 1)
    return error_of(lambda: build(other_dtype)), error_of(lambda: build(frozen))


# ---------------------------------------------------------------------- on each of three: a sum's order matters


def launched_early_and_late(rank: int, group: dist.ProcessGroup) -> Any:
    found = []
    for early in (True, False):
        module = Chain()
        # The ranks' gradients come in other orders, and in one sum with those of a second use.
        uses = [(rank + index) % 5 for index in range(5)]
        with reducing(module, group) as reducer:
            if early:
                reducer.prepare_for_backward()
                module(batch(rank, 0), uses).backward()
            else:
                with reducer.no_sync():
                    module(batch(rank, 0), uses).backward()
                reducer.prepare_for_backward()
            reducer.finalize()
            found.append(gradients(module))
    return found


CASES: list[Case] = [
    uneven_use,
    steps_beside_ddp,
    accumulation,
    launch_order,
    mixed_dtypes,
    failed_backward,
    left_over,
    second_backward,
    sparse_on_one_rank,
    waits_of_the_host,
    frozen_then_trained,
    closed,
    other_parameters,
    launched_early_and_late,
]


def run_cases(rank: int, world_size: int) -> dict[str, Any]:
    """One start of three ranks for all cases; a case that raises does not hide the others."""
    pair: Any = dist.new_group([0, 1])
    everyone = dist.group.WORLD
    assert everyone is not None
    results = {}
    for case in CASES:
        try:
            if case is launched_early_and_late:
                results[case.__name__] = case(rank, everyone)
            elif rank < 2:
                results[case.__name__] = case(rank, pair)
        except Exception:
            results[case.__name__] = traceback.format_exc()
        dist.barrier()
    return results


# ---------------------------------------------------------------------- what came of it

Results = Callable[[Case], list[Any]]


@pytest.fixture(scope="module")
def results() -> Results:
    """What each rank that took part in a case returned."""
    ranks = run_ranks(run_cases, 3)

    def of(case: Case) -> list[Any]:
        found = [rank[case.__name__] for rank in ranks if case.__name__ in rank]
        # Errors that a case is about are caught in it, and have no traceback.
        assert not any(isinstance(value, str) and value.startswith("Traceback") for value in found), found
        return found

    return of


def mean(ranks: list[Gradients]) -> Gradients:
    """By hand; None where no rank has one."""
    averages: Gradients = {}
    for name in ranks[0]:
        there = [rank[name] for rank in ranks if rank[name] is not None]
        averages[name] = cast(torch.Tensor, sum(cast(list[torch.Tensor], there))) / len(ranks) if there else None
    return averages


def assert_same(found: Gradients, expected: Gradients) -> None:
    """To the bit."""
    assert found.keys() == expected.keys()
    for name, value in expected.items():
        other = found[name]
        if value is None or other is None:
            assert value is other, name
        else:
            assert torch.equal(value, other), name


def test_gradients_are_the_mean_over_ranks_whatever_each_rank_uses(results: Results) -> None:
    (local_0, found_0), (local_1, found_1) = results(uneven_use)
    assert local_0["layers.3.weight"] is None
    assert local_1["layers.3.weight"] is not None
    expected = mean([local_0, local_1])
    assert_same(found_0, expected)
    assert_same(found_1, expected)
    assert found_0["layers.3.weight"] is not None


def test_a_parameter_that_no_rank_uses_keeps_no_gradient(results: Results) -> None:
    for _, found in results(uneven_use):
        assert found["layers.4.weight"] is None
        assert found["layers.4.bias"] is None


def test_every_step_equals_distributed_data_parallel(results: Results) -> None:
    for rank in results(steps_beside_ddp):
        assert len(rank) == 4
        for by_ddp, found in rank:
            # Halves are exact, and a sum of two has one order.
            assert_same(found, by_ddp)


def test_without_sync_gradients_accumulate_on_the_rank_and_nothing_is_sent(results: Results) -> None:
    for launches, alone, before, _, _ in results(accumulation):
        assert launches == 0
        assert_same(before, alone)


def test_the_step_after_averages_what_all_micro_batches_accumulated(results: Results) -> None:
    (*_, local_0, found_0), (*_, local_1, found_1) = results(accumulation)
    expected = mean([local_0, local_1])
    assert_same(found_0, expected)
    assert_same(found_1, expected)
    assert found_0["layers.3.weight"] is not None


def test_buckets_are_launched_in_one_order_on_ranks_whose_gradients_come_in_opposite_orders(results: Results) -> None:
    (in_backward_0, launches_0, _), (in_backward_1, launches_1, _) = results(launch_order)
    assert launches_0 == launches_1
    assert len(launches_0) == 5
    # All gradients came, so all buckets were full when backward ended: none was left to finalize.
    assert in_backward_0 == in_backward_1 == 5


def test_a_full_bucket_is_launched_while_backward_still_runs(results: Results) -> None:
    for *_, launched_at_first_layer in results(launch_order):
        assert launched_at_first_layer == 4


def test_parameters_of_other_dtypes_and_layouts_are_averaged_in_buckets_of_their_own(results: Results) -> None:
    (local_0, found_0, launches_0, strides_0), (local_1, found_1, launches_1, strides_1) = results(mixed_dtypes)
    expected = mean([local_0, local_1])
    assert_same(found_0, expected)
    assert_same(found_1, expected)
    assert {name: value.dtype for name, value in found_0.items()} == {n: v.dtype for n, v in local_0.items()}
    assert len(launches_0) == len(launches_1) == 4
    assert strides_0
    assert strides_1


@pytest.mark.parametrize("attempt", [0, 1], ids=["after reset", "at the next prepare"])
def test_a_backward_that_raises_leaves_no_rank_waiting_and_the_next_step_is_right(
    results: Results, attempt: int
) -> None:
    (message, kept, local_0, found_0), (other_message, _, local_1, found_1) = (
        rank[attempt] for rank in results(failed_backward)
    )
    assert message == "in the middle"
    assert other_message == "no error"
    assert kept["layers.4.weight"] is not None
    assert kept["layers.0.weight"] is None
    expected = mean([local_0, local_1])
    assert_same(found_0, expected)
    assert_same(found_1, expected)


def test_reductions_left_over_are_waited_for_before_the_next_step_uses_their_memory(results: Results) -> None:
    (counts_0, local_0, found_0), (counts_1, local_1, found_1) = results(left_over)
    assert counts_0 == counts_1 == [(0, 0), (5, 0), (5, 5), (10, 5), (10, 10)]
    expected = mean([local_0, local_1])
    assert_same(found_0, expected)
    assert_same(found_1, expected)


def test_a_second_backward_after_the_gradients_were_sent_is_an_error_that_says_what_to_do(results: Results) -> None:
    for errors in results(second_backward):
        for text in errors:
            assert "parameter 'layers.4." in text
            assert "got a gradient again" in text
            assert "no_sync()" in text


def test_a_gradient_that_is_dense_on_one_rank_and_sparse_on_another_is_averaged(results: Results) -> None:
    ranks = results(sparse_on_one_rank)
    assert [is_sparse for is_sparse, *_ in ranks] == [False, True]
    for *_, found in ranks:
        assert torch.equal(found, (ranks[0][1] + ranks[1][1]) / 2)


def test_the_host_does_not_wait_for_the_averages_of_a_device(results: Results) -> None:
    assert results(waits_of_the_host) == [[], []]


def test_parameters_may_be_frozen_and_trained_later(results: Results) -> None:
    ranks = results(frozen_then_trained)
    expected = mean([local for _, local, _ in ranks])
    for first, _, found in ranks:
        assert_same(found, expected)
        assert_same(first, {**expected, "layers.0.weight": None, "layers.0.bias": None})


def test_after_close_no_hook_is_left_and_nothing_is_sent(results: Results) -> None:
    for launches, forgotten, local, found in results(closed):
        assert launches == []
        assert forgotten
        assert_same(found, local)


def test_parameters_that_differ_between_ranks_are_an_error_on_every_rank(results: Results) -> None:
    first, second = results(other_parameters)
    assert first == second
    other_dtype, frozen = first
    assert "rank 0 has 'layers.0.weight' = '[6, 6] torch.float32'" in other_dtype
    assert "rank 1 has 'layers.0.weight' = '[6, 6] torch.float64'" in other_dtype
    assert "rank 0 has no more entries, but rank 1 has 'layers.0.weight'" in frozen


def test_averages_are_the_same_to_the_bit_on_every_rank_and_whenever_the_buckets_were_launched(
    results: Results,
) -> None:
    ranks = results(launched_early_and_late)
    assert len(ranks) == 3
    first = ranks[0][0]
    assert all(value is not None for value in first.values())
    for rank in ranks:
        for found in rank:
            assert_same(found, first)


# ---------------------------------------------------------------------- streams


class TwoRanks:
    """A group whose collectives are recorded instead."""

    def size(self) -> int:
        return 2


def test_a_bucket_is_filled_after_the_work_of_all_streams_that_its_gradients_came_on() -> None:
    device = FakeDevice()
    names = ["first", "second", "third"]
    parameters = [(name, nn.Parameter(torch.ones(2))) for name in names]
    launched: list[Any] = []

    def on_stream_of_its_own(name: str, parameter: torch.Tensor) -> None:
        """Stand for autograd, which runs a parameter's node and hooks on a stream of its forward."""
        device._local.stream = FakeStream()
        device.launch((name, 0))

    def all_reduce(buffer: torch.Tensor, **_: Any) -> Any:
        launched.append(device.current_stream().before)
        return mock.Mock()

    for name, parameter in parameters:
        parameter.register_post_accumulate_grad_hook(partial(on_stream_of_its_own, name))
    with (
        watched(),
        mock.patch.object(dense_reduction, "current_stream", device.current_stream),
        mock.patch.object(dense_reduction, "check_agreement"),
        mock.patch.object(dist, "all_reduce", all_reduce),
    ):
        reducer = DenseGradientReducer(parameters, cast(dist.ProcessGroup, TwoRanks()))
        reducer.prepare_for_backward()
        sum((parameter.sum() for _, parameter in parameters), torch.zeros(())).backward()
        reducer.close()
    assert launched == [{(name, 0) for name in names}]


# ---------------------------------------------------------------------- one rank


class OneRank:
    """All that may be asked of a group of one: a collective would fail."""

    def size(self) -> int:
        return 1


def test_a_group_of_one_rank_sends_and_copies_nothing() -> None:
    module = Chain()
    reducer = DenseGradientReducer(list(module.named_parameters()), cast(dist.ProcessGroup, OneRank()))
    reducer.prepare_for_backward()
    module(batch(0, 0), [0, 1]).backward()
    before = {name: parameter.grad for name, parameter in module.named_parameters()}
    reducer.finalize()
    assert all(parameter.grad is before[name] for name, parameter in module.named_parameters())
    with reducer.no_sync():
        reducer.prepare_for_backward()
        reducer.finalize()
    reducer.finish_failed_backward()
    reducer.close()
