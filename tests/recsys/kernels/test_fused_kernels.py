"""What is known of the fused kernels."""

from __future__ import annotations

from typing import Any

import pytest
import torch
import torchrec

from lightning_pipe.recsys.kernels.fused_kernels import (
    clear_prefetches,
    find_fused_kernels,
    hide_prefetch_queues_of_modules,
    moves_rows_at_zero_gradient,
    preserve_pending_lookups,
)
from tests.recsys.rewrite_cases import Bags, batches, shard, table_values

pytestmark = pytest.mark.usefixtures("one_rank")

OPTIMIZERS: list[tuple[Any, dict[str, Any], bool]] = [
    (torch.optim.SGD, {}, False),
    (torch.optim.Adagrad, {"eps": 1e-8}, False),
    (torch.optim.Adagrad, {"eps": 0.0}, True),
    (torchrec.optim.RowWiseAdagrad, {"eps": 1e-8}, False),
    (torchrec.optim.RowWiseAdagrad, {"eps": 0.0}, True),
]


@pytest.mark.parametrize(("optimizer", "arguments", "moves"), OPTIMIZERS)
def test_it_is_known_which_optimizers_change_a_row_at_a_gradient_of_zero(
    optimizer: Any, arguments: dict[str, Any], moves: bool
) -> None:
    model = shard(Bags(), optimizer=optimizer, **arguments)
    modules = [model.module.a, model.module.b]
    assert [moves_rows_at_zero_gradient(module) for module in modules] == [moves] * 2
    before = table_values(model)
    (batch,) = batches(1)
    for module in modules:
        module(batch.sparse).wait().values().backward(torch.zeros(4, 16))
    after = table_values(model)
    assert any(not torch.equal(after[name], before[name]) for name in before) == moves


def test_weight_decay_counts_as_a_change_whether_or_not_the_kernel_of_this_device_does_it() -> None:
    model = shard(Bags(), optimizer=torchrec.optim.RowWiseAdagrad, eps=1e-8, weight_decay=0.1)
    assert moves_rows_at_zero_gradient(model.module.a)


def test_replicated_tables_have_no_fused_kernel() -> None:
    model = shard(Bags(), "data_parallel")
    assert find_fused_kernels(model.module.a) == []
    assert not moves_rows_at_zero_gradient(model.module.a)


def filled(model: Any) -> Any:
    """A kernel with a cache; only kernels on a GPU have one, and fill it."""
    (kernel,) = find_fused_kernels(model.module.a)
    kernel.lxu_cache_weights = torch.ones(2, 8)
    kernel.lxu_cache_locking_counter = torch.tensor([[1, 0]], dtype=torch.int32)
    kernel.timesteps_prefetched, kernel.lxu_cache_locations_list = [7], [torch.zeros(1)]
    return kernel


def test_lookups_without_a_backward_leave_what_the_backward_of_another_needs() -> None:
    model = shard(Bags(), optimizer=torch.optim.SGD)
    kernel = filled(model)
    ids = kernel._indices = torch.tensor([3, 4])
    with preserve_pending_lookups([model.module.a, model.module.b]):
        kernel._indices = torch.tensor([5])
        kernel.lxu_cache_locations = torch.tensor([1])
        kernel.lxu_cache_locking_counter += 1
    assert kernel._indices is ids
    assert kernel.lxu_cache_locking_counter.tolist() == [[1, 0]]
    assert kernel.lxu_cache_locations.tolist() != [1]


def test_prefetches_of_abandoned_batches_are_dropped() -> None:
    model = shard(Bags(), optimizer=torch.optim.SGD)
    kernel = filled(model)
    clear_prefetches([model.module.a, model.module.b])
    assert (kernel.timesteps_prefetched, kernel.lxu_cache_locations_list) == ([], [])
    assert not kernel.lxu_cache_locking_counter.any()


def test_a_lookup_between_a_prefetch_and_its_own_leaves_what_was_prefetched() -> None:
    """Only kernels with a cache, on a GPU, fill these queues: here they are filled by hand."""
    model = shard(Bags(), optimizer=torch.optim.SGD)
    module, (batch,) = model.module.a, batches(1)
    (kernel,) = find_fused_kernels(module)
    expected = module(batch.sparse).wait().values()
    kernel.timesteps_prefetched, kernel.lxu_cache_locations_list = [7], [torch.zeros(1)]
    with hide_prefetch_queues_of_modules([module]):
        assert torch.equal(module(batch.sparse).wait().values(), expected)
        kernel.timesteps_prefetched.append(8)  # of an evaluation that is given up
    assert kernel.timesteps_prefetched == [7]
    assert len(kernel.lxu_cache_locations_list) == 1
