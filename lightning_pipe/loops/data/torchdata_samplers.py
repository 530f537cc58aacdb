"""Samplers of torchdata under Lightning's ``DistributedSamplerWrapper``."""

from __future__ import annotations

from typing import Any

from lightning.fabric.utilities.distributed import DistributedSamplerWrapper
from torch.utils.data import Dataset, SequentialSampler

from lightning_pipe._compat.lightning import wrapped_sampler


def is_instance_from_package(project: str, instance: Any) -> bool:
    """Return True if the class of *instance* is defined in *project*, or derived from such a class."""
    return any(base.__module__.startswith(f"{project}.") for base in type(instance).__mro__)


def fix_torchdata_distributed_shuffle(loader: Any) -> Any:
    """Make a loader distribute its rows over ranks correctly if it uses torchdata's samplers, and return it.

    Lightning replaces PyTorch's ``RandomSampler`` by a ``DistributedSampler``, but wraps torchdata's sampler. Each rank
    would then draw a different order and take its part of that order, so that some rows would be trained twice in an
    epoch, and others never.
    """
    if is_instance_from_package("torchdata", loader):
        for holder in (loader, loader.batch_sampler):
            wrapper = getattr(holder, "sampler", None)
            inner = wrapped_sampler(wrapper)
            if not isinstance(wrapper, DistributedSamplerWrapper) or inner is None:
                continue
            is_shuffle = is_instance_from_package("torchdata", inner) and getattr(inner, "replacement", None) is False
            if is_shuffle and len(inner) == len(inner.data_source):
                inner = SequentialSampler(inner.data_source)
            wrapper.dataset = _LazySamplerDataset(inner)
    return loader


class _LazySamplerDataset(Dataset[Any]):
    """Dataset of a sampler's indices for ``DistributedSamplerWrapper``, which draws them on first use.

    Lightning's dataset draws when an iteration begins. A torchdata loader that continues begins two iterations, and
    uses one of them.
    """

    def __init__(self, sampler: Any) -> None:
        self.sampler = sampler
        vars(self)["_sampler"] = sampler  # the attribute name in Lightning's wrapper
        self._indices: list[Any] | None = None

    def __len__(self) -> int:
        return len(self.sampler)

    def __getitem__(self, index: int) -> Any:
        if self._indices is None:
            self._indices = list(self.sampler)
        return self._indices[index]

    def reset(self) -> None:
        """Discard the indices, so that the next access draws again."""
        self._indices = None
