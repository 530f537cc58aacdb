"""Replacement and restoration of sharded modules' forwards, and access to the results of the resolution."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping
from functools import partial
from typing import Any

import torch
from torchrec.distributed.types import ShardedModule

from lightning_pipe.recsys.kernels.kernel_calls import has_dense_kernels, trains_only_tables
from lightning_pipe.recsys.modules.call_arguments import CallArguments
from lightning_pipe.recsys.rewrite.resolution import Resolution
from lightning_pipe.recsys.rewrite.sharded_modules import Sharded


class ReplacedForwards(ABC):
    """Replaces the forwards of a model's sharded modules, and of post-processing modules that run ahead."""

    def __init__(self, model: torch.nn.Module, sharded: Mapping[str, Sharded], resolution: Resolution) -> None:
        self._model = model
        self._sharded = sharded
        self._resolution = resolution
        self._postprocess_forwards: dict[str, Callable[..., Any]] = {}
        self._attached = False

    @property
    def model(self) -> torch.nn.Module:
        """The model, without wrappers."""
        return self._model

    @property
    def resolved(self) -> bool:
        """True if it is known which modules are pipelined. Until then, batches must be trained serially."""
        return self._resolution.done

    @property
    def records(self) -> bool:
        """True if the method observes the first step, which must then be trained serially."""
        return self._resolution.records

    @property
    def only_tables(self) -> bool:
        """True if the sharded modules train only tables, and no feature processors."""
        return all(map(trains_only_tables, self.modules.values()))

    @property
    def has_replicated_tables(self) -> bool:
        """True if this rank looks up replicated tables, which no kernel trains."""
        return any(map(has_dense_kernels, self.modules.values()))

    @property
    def attached(self) -> bool:
        """True while the forwards are replaced."""
        return self._attached

    @property
    def pipelined(self) -> dict[str, CallArguments]:
        """The pipelined modules, with the sources of their arguments in a batch."""
        return {name: entry.arguments for name, entry in self._sharded.items() if entry.arguments is not None}

    @property
    def unpipelined(self) -> dict[str, str]:
        """The other sharded modules, with the reason why each is not pipelined."""
        return {name: entry.reason for name, entry in self._sharded.items() if entry.arguments is None}

    @property
    def postprocessed(self) -> dict[str, CallArguments]:
        """The post-processing modules that run ahead, with the sources of their arguments in a batch."""
        found: dict[str, CallArguments] = {}
        for arguments in self.pipelined.values():
            found |= arguments.postprocesses()
        return found

    @property
    def modules(self) -> dict[str, ShardedModule[Any, Any, Any, Any]]:
        """All sharded modules by name."""
        return {name: entry.module for name, entry in self._sharded.items()}

    # Replacement and restoration

    def attach(self) -> None:
        """Replace the forwards, also after ``detach``. Results of the resolution are kept."""
        if not self._attached:
            for entry in self._sharded.values():
                entry.install(partial(self._called, entry))
            self._attached = True
            self._attach_postprocesses()

    def _attach_postprocesses(self) -> None:
        for name in self.postprocessed:
            module = self._model.get_submodule(name)
            if "forward" not in module.__dict__:
                self._postprocess_forwards[name] = module.forward
                module.forward = partial(self._postprocess, name, module.forward)

    def detach(self) -> None:
        """Restore all replaced forwards, so that the model is as before. Batches in flight stay valid."""
        if self._attached:
            for entry in self._sharded.values():
                entry.restore()
            for name in self.postprocessed:
                self._model.get_submodule(name).__dict__.pop("forward", None)
            self._attached = False

    def restore(self) -> None:
        """Detach for good, so that another rewrite can replace the forwards."""
        self.detach()

    # Resolution

    def resolve(self, batch: Any) -> None:
        """Find the input of each module from a transferred batch alone, directly or by fx. A collective."""
        self._resolution.without_step(batch)
        self._attach_postprocesses()

    @abstractmethod
    def _called(self, entry: Sharded, /, *positional: Any, **named: Any) -> Any:
        """Replacement of a sharded module's forward."""

    @abstractmethod
    def _postprocess(self, name: str, forward: Callable[..., Any], /, *positional: Any, **named: Any) -> Any:
        """Replacement of a post-processing module's forward."""
