"""Handling of FBGEMM's fused lookup kernels outside of training.

The fused lookups have no CPU kernel under inference mode, but work under ``no_grad``. Each lookup of an optimizer that
counts steps (row-wise Adagrad, Adam) also advances the count, which only training must do.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager

import torch
from fbgemm_gpu.split_embedding_configs import EmbOptimType
from fbgemm_gpu.split_table_batched_embeddings_ops_training import SplitTableBatchedEmbeddingBagsCodegen

from lightning_pipe._compat.torchrec import lookups_of, restore_last_lookup, snapshot_last_lookup

# Attribute of a kernel for the optimizer that trains its tables in place of its own.
ROW_OPTIMIZER = "_lightning_pipe_row_optimizer"


def find_fused_kernels(module: torch.nn.Module) -> list[SplitTableBatchedEmbeddingBagsCodegen]:
    """Return the fused lookup kernels inside a sharded module, each once."""
    kernels: dict[int, SplitTableBatchedEmbeddingBagsCodegen] = {}
    for child in module.modules():
        for lookup in lookups_of(child):  # not registered as child modules
            for kernel in lookup.modules():
                if isinstance(kernel, SplitTableBatchedEmbeddingBagsCodegen):
                    kernels[id(kernel)] = kernel
    return list(kernels.values())


def moves_rows_at_zero_gradient(module: torch.nn.Module) -> bool:
    """Return True if the optimizer of any fused kernel in a sharded module changes a row whose gradient is zero.

    Possible causes are its momentum, weight decay, or a division of zero by zero.
    """
    return any(_kernel_moves_rows_at_zero_grad(kernel) for kernel in find_fused_kernels(module))


def _kernel_moves_rows_at_zero_grad(kernel: SplitTableBatchedEmbeddingBagsCodegen) -> bool:
    if hasattr(kernel, ROW_OPTIMIZER):
        return True
    if kernel.optimizer in (EmbOptimType.SGD, EmbOptimType.EXACT_SGD):
        divides_by_zero = False
    elif kernel.optimizer in (EmbOptimType.EXACT_ADAGRAD, EmbOptimType.EXACT_ROWWISE_ADAGRAD):
        divides_by_zero = kernel.optimizer_args.eps == 0
    else:
        return True
    return divides_by_zero or kernel.optimizer_args.weight_decay != 0


def add_to_kernel_iteration_counts(module: torch.nn.Module, change: int) -> None:
    """Change the number of training lookups of a sharded module's kernels, if their optimizers count."""
    for kernel in find_fused_kernels(module):
        if kernel.iter_cpu.item() > 0:  # an optimizer that counts has counted an earlier lookup
            kernel.iter_cpu.add_(change)
            kernel.iter.add_(change)


def find_uvm_caching_kernels(modules: Iterable[torch.nn.Module]) -> list[SplitTableBatchedEmbeddingBagsCodegen]:
    """Return the fused kernels with a cache of rows on a GPU, whose tables are in the host's memory."""
    return [kernel for kernel in _find_kernels_of_modules(modules) if kernel.lxu_cache_weights.numel()]


def clear_prefetches(modules: Iterable[torch.nn.Module]) -> None:
    """Drop all prefetches of rows, and let the caches replace all rows. No batch may be in flight."""
    for kernel in find_uvm_caching_kernels(modules):
        kernel.timesteps_prefetched, kernel.lxu_cache_locations_list = [], []
        kernel.lxu_cache_locking_counter.zero_()


@contextmanager
def preserve_pending_lookups(modules: Iterable[torch.nn.Module]) -> Iterator[None]:
    """Context for lookups without a backward, between the lookup of a training batch and its backward.

    A kernel whose rows are prefetched keeps the ids of its newest lookup for the backward of that lookup, which also
    releases the cached rows that the lookup protects.
    """
    states = [
        (kernel, snapshot_last_lookup(kernel), kernel.lxu_cache_locking_counter.clone())
        for kernel in find_uvm_caching_kernels(modules)
    ]
    try:
        yield
    finally:
        for kernel, newest, protected in states:
            restore_last_lookup(kernel, newest)
            kernel.lxu_cache_locking_counter.copy_(protected)


def get_newest_prefetch_locations(modules: Iterable[torch.nn.Module]) -> list[torch.Tensor | None]:
    """Return the cache locations of the newest prefetch, for each kernel: None without a cache or a prefetch."""
    queues = [kernel.lxu_cache_locations_list for kernel in _find_kernels_of_modules(modules)]
    return [queue[-1] if queue else None for queue in queues]


def requeue_prefetch_locations(modules: Iterable[torch.nn.Module], locations: Iterable[torch.Tensor | None]) -> None:
    """Queue the cache locations of rows that were prefetched before, in each kernel with a cache."""
    for kernel, where in zip(_find_kernels_of_modules(modules), locations, strict=True):
        if where is not None:
            kernel.lxu_cache_locations_list.append(where)
            kernel.timesteps_prefetched.append(kernel.timestep)


@contextmanager
def hide_prefetch_queues_of_modules(modules: Iterable[torch.nn.Module]) -> Iterator[None]:
    """Context in which lookups of ``modules`` fetch their own rows, and leave prefetched rows to later lookups.

    A kernel with a cache keeps its prefetches in a queue. Each lookup takes the first entry, whichever batch it is for,
    so a lookup between a training batch's prefetch and its lookup would take that batch's entry.
    """
    with hide_prefetch_queues_of_kernels(_find_kernels_of_modules(modules)):
        yield


@contextmanager
def hide_prefetch_queues_of_kernels(kernels: Sequence[SplitTableBatchedEmbeddingBagsCodegen]) -> Iterator[None]:
    """Context like :func:`hide_prefetch_queues_of_modules`, for kernels."""
    queues = [(kernel, kernel.timesteps_prefetched, kernel.lxu_cache_locations_list) for kernel in kernels]
    for kernel in kernels:
        kernel.timesteps_prefetched, kernel.lxu_cache_locations_list = [], []
    try:
        yield
    finally:
        for kernel, timesteps, locations in queues:
            kernel.timesteps_prefetched, kernel.lxu_cache_locations_list = timesteps, locations


@contextmanager
def override_kernel_iteration(kernel: SplitTableBatchedEmbeddingBagsCodegen, count: int) -> Iterator[None]:
    """Context in which the next lookup is the ``count``-th of the training, if the kernel's optimizer counts.

    The counter is restored at the end.
    """
    with _counters_restored([kernel]):
        if count > 0:
            kernel.iter.fill_(count - 1)
            kernel.iter_cpu.fill_(count - 1)
        yield


@contextmanager
def disable_lookup_training(modules: Iterable[torch.nn.Module]) -> Iterator[None]:
    """Context in which lookups of ``modules`` run without grad or inference mode, and do not advance the counters."""
    with torch.inference_mode(False), torch.no_grad(), _counters_restored(_find_kernels_of_modules(modules)):
        yield


@contextmanager
def _counters_restored(kernels: Sequence[SplitTableBatchedEmbeddingBagsCodegen]) -> Iterator[None]:
    counters = [(kernel, kernel.iter.clone(), kernel.iter_cpu.clone()) for kernel in kernels]
    try:
        yield
    finally:
        for kernel, steps, steps_on_cpu in counters:
            kernel.iter.copy_(steps)
            kernel.iter_cpu.copy_(steps_on_cpu)


def _find_kernels_of_modules(modules: Iterable[torch.nn.Module]) -> list[SplitTableBatchedEmbeddingBagsCodegen]:
    return [kernel for module in modules for kernel in find_fused_kernels(module)]
