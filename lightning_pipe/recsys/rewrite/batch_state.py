"""What one batch carries from task to task: its splits, requests, features and, at the boundary, its embeddings.

Tested in ``tests/recsys/rewrite/test_model_rewrite.py``.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from dataclasses import dataclass, field
from typing import Any

import torch
import torch.distributed as dist
from torchrec.distributed.types import Awaitable

from lightning_pipe.recsys.dynamic.tables.batch_rows import BatchRows, end_step
from lightning_pipe.recsys.kernels.kernel_calls import KernelGradients, LookupCalls
from lightning_pipe.recsys.modules.call_arguments import Arguments, PostprocessResults
from lightning_pipe.recsys.rewrite.boundary import Cut, cut_output
from lightning_pipe.recsys.rewrite.input_dist import SplitsRequest

__all__ = ["Embeddings", "Features", "Inputs", "ModuleCall", "Requests", "Splits"]


@dataclass
class Inputs:
    """What of a batch the pipelined modules' calls were given ahead of the step.

    Attributes:
        batch: the transferred batch.
        arguments: of each pipelined module's call, as found in the batch; not yet re-ordered or copied.
        postprocessed: results of post-processing modules.
        contexts: each module's own context of this batch.
    """

    batch: Any
    postprocessed: PostprocessResults
    arguments: dict[str, Arguments] = field(default_factory=dict)
    contexts: dict[str, Any] = field(default_factory=dict)


@dataclass
class Splits:
    """After EmbInputDistStart.

    Attributes:
        request: the fused splits; None if this rank failed or nothing is pipelined.
        status: with several ranks, the collective that tells each whether any has failed, and its tensor; None where
            the splits say so.
        error: why this rank sent no splits.
        answer: what it sent instead.
    """

    inputs: Inputs
    request: SplitsRequest | None = None
    status: tuple[dist.Work, torch.Tensor] | None = None
    error: Exception | None = None
    answer: dist.Work | None = None


@dataclass
class Requests:
    """After EmbInputDistWait: each module's awaitable of its distributed features."""

    inputs: Inputs
    tensors: dict[str, Awaitable[Any]]


@dataclass
class Features:
    """After EmbPrefetch: each module's distributed features."""

    inputs: Inputs
    distributed: dict[str, Any]


@dataclass
class ModuleCall:
    """One call of a sharded module in a step.

    Attributes:
        name: of the module.
        cuts: of its output.
        lookups: what its lookups were called with, where that is captured.
    """

    name: str
    cuts: list[Cut]
    lookups: LookupCalls | None = None


class Embeddings:
    """After EmbForward: the cut outputs of the pipelined modules, and during the step those of all others.

    Args:
        inputs: of the same batch.

    Attributes:
        kernel_gradients: after the first half of the tables' backward, where it is run in two.
    """

    def __init__(self, inputs: Inputs) -> None:
        self.inputs = inputs
        self._ready: dict[str, Any] = {}
        self._calls: list[ModuleCall] = []
        self.kernel_gradients: KernelGradients | None = None
        self._rows: list[BatchRows] = []

    def add(self, name: str, output: Any, lookups: LookupCalls | None = None) -> Any:
        """Cuts the awaited ``output`` of one call of the module ``name`` and returns what the step may use."""
        cuts: list[Cut] = []
        handed_on = cut_output(output, cuts)
        self._calls.append(ModuleCall(name, cuts, lookups))
        return handed_on

    def keep_ready(self, name: str, output: Any, lookups: LookupCalls | None = None) -> None:
        self._ready[name] = self.add(name, output, lookups)

    @property
    def ready(self) -> dict[str, Any]:
        """The outputs looked up ahead and not taken yet, by module."""
        return self._ready

    def is_ready(self, name: str) -> bool:
        return name in self._ready

    def take(self, name: str) -> Any:
        """The output looked up ahead, once: a second call of the module looks up anew."""
        return self._ready.pop(name)

    @property
    def calls(self) -> list[ModuleCall]:
        """Each module call, in the order of the lookups: the same on every rank."""
        return self._calls

    def cuts(self) -> Iterator[Cut]:
        for call in self._calls:
            yield from call.cuts

    def gradient_tensors(self) -> list[torch.Tensor]:
        """The gradients that the dense backward has sent to this rank's outputs so far, unscaled."""
        return [cut.gradient for cut in self.cuts() if cut.gradient is not None]

    def hold_rows(self, rows: Iterable[BatchRows]) -> None:
        """Rows of dynamic tables that were looked up, to be let go of when the step ends."""
        self._rows += rows

    def end(self, trained: bool) -> None:
        """The tables' backward has been run, or will not be: lets go of everything."""
        rows, self._rows = self._rows, []
        end_step(rows, trained)
        self.clear()

    def clear(self) -> None:
        """Lets go of outputs, graphs and gradients."""
        self._ready.clear()
        self._calls.clear()
        self.kernel_gradients = None
