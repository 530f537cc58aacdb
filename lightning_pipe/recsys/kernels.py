"""What FBGEMM's fused lookup kernels need from their caller when nothing is trained.

Under inference mode the fused lookups have no CPU kernel; under ``no_grad`` they work. And each lookup of an optimiser
that counts steps (row-wise Adagrad, Adam) advances the count, which only training may do.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from contextlib import contextmanager

import torch
from fbgemm_gpu.split_table_batched_embeddings_ops_training import SplitTableBatchedEmbeddingBagsCodegen

__all__ = ["evaluating", "fused_kernels"]


def fused_kernels(module: torch.nn.Module) -> list[SplitTableBatchedEmbeddingBagsCodegen]:
    """The fused lookup kernels inside a sharded module, each once."""
    found: dict[int, SplitTableBatchedEmbeddingBagsCodegen] = {}
    for child in module.modules():
        for lookup in getattr(child, "_lookups", ()):  # a plain list: not among the child's modules
            for kernel in lookup.modules():
                if isinstance(kernel, SplitTableBatchedEmbeddingBagsCodegen):
                    found[id(kernel)] = kernel
    return list(found.values())


@contextmanager
def evaluating(modules: Iterable[torch.nn.Module]) -> Iterator[None]:
    """Within it the lookups of ``modules`` run outside inference mode, without grad, and leave their counters alone."""
    kernels = [kernel for module in modules for kernel in fused_kernels(module)]
    with torch.inference_mode(False), torch.no_grad():
        counters = [(kernel, kernel.iter.clone(), kernel.iter_cpu.clone()) for kernel in kernels]
        try:
            yield
        finally:
            for kernel, steps, steps_on_cpu in counters:
                kernel.iter.copy_(steps)
                kernel.iter_cpu.copy_(steps_on_cpu)
