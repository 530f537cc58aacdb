"""State that one batch carries from task to task: splits, requests, features and, at the boundary, embeddings."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from dataclasses import dataclass, field
from typing import Any

import torch
import torch.distributed as dist
from torchrec.distributed.types import Awaitable

from lightning_pipe.recsys.dynamic.tables.row_tables import BatchRows, end_step
from lightning_pipe.recsys.kernels.kernel_calls import KernelGradients, LookupCalls
from lightning_pipe.recsys.modules.call_arguments import Arguments, PostprocessResults
from lightning_pipe.recsys.rewrite.boundary import Cut, cut_output
from lightning_pipe.recsys.rewrite.input_dist import SplitsRequest


@dataclass
class Inputs:
    """Inputs of the pipelined modules' calls that are taken from a batch ahead of the step.

    Attributes:
        batch: the transferred batch.
        arguments: arguments of each pipelined module's call, as found in the batch, before keys are reordered or copies
            are made.
        postprocessed: results of post-processing modules.
        contexts: TorchRec's context of this batch, for each module.
    """

    batch: Any
    postprocessed: PostprocessResults
    arguments: dict[str, Arguments] = field(default_factory=dict)
    contexts: dict[str, Any] = field(default_factory=dict)


@dataclass
class Splits:
    """State after EmbInputDistStart.

    Attributes:
        request: the fused splits; None if this rank failed or nothing is pipelined.
        status: with several ranks, the collective that reports whether any rank has failed, and its tensor; None if the
            splits report it.
        error: reason why this rank sent no splits.
        answer: work that this rank submitted instead.
    """

    inputs: Inputs
    request: SplitsRequest | None = None
    status: tuple[dist.Work, torch.Tensor] | None = None
    error: Exception | None = None
    answer: dist.Work | None = None


@dataclass
class Requests:
    """State after EmbInputDistWait: each module's awaitable of its distributed features.

    Attributes:
        error: error of the batch, the same on all ranks, that the lookup raises; None if the batch can be trained.
    """

    inputs: Inputs
    tensors: dict[str, Awaitable[Any]]
    error: Exception | None = None


@dataclass
class Features:
    """State after EmbPrefetch: each module's distributed features, and the error of its :class:`Requests`."""

    inputs: Inputs
    distributed: dict[str, Any]
    error: Exception | None = None


@dataclass
class ModuleCall:
    """One call of a sharded module in a step.

    Attributes:
        name: name of the module.
        cuts: cuts of its output.
        lookups: captured calls of its lookups, if they are captured.
    """

    name: str
    cuts: list[Cut]
    lookups: LookupCalls | None = None


class Embeddings:
    """State after EmbForward: the cut outputs of the pipelined modules, and during the step those of other modules.

    Attributes:
        ready: outputs that were looked up ahead and not taken yet, by module. A second call makes another lookup.
        calls: module calls in the order of the lookups, which is the same on every rank.
        kernel_gradients: result of the first half of the tables' backward, if that runs in two halves.
    """

    def __init__(self, inputs: Inputs) -> None:
        self.inputs = inputs
        self.ready: dict[str, Any] = {}
        self.calls: list[ModuleCall] = []
        self.kernel_gradients: KernelGradients | None = None
        self._rows: list[BatchRows] = []

    def add(self, name: str, output: Any, lookups: LookupCalls | None = None) -> Any:
        """Cut the awaited ``output`` of one call of the module ``name``, and return the output for the step."""
        cuts: list[Cut] = []
        passed_on = cut_output(output, cuts)
        self.calls.append(ModuleCall(name, cuts, lookups))
        return passed_on

    def keep_ready(self, name: str, output: Any, lookups: LookupCalls | None = None) -> None:
        self.ready[name] = self.add(name, output, lookups)

    def cuts(self) -> Iterator[Cut]:
        for call in self.calls:
            yield from call.cuts

    def gradient_tensors(self) -> list[torch.Tensor]:
        """Return the unscaled gradients that the dense backward has sent to this rank's outputs so far."""
        return [cut.gradient for cut in self.cuts() if cut.gradient is not None]

    def hold_rows(self, rows: Iterable[BatchRows]) -> None:
        """Hold rows of dynamic tables that were looked up, and release them when the step ends."""
        self._rows += rows

    def hand_over_rows(self) -> list[BatchRows]:
        """Return the rows that are held, which the caller releases from now on."""
        rows, self._rows = self._rows, []
        return rows

    def end(self, trained: bool) -> None:
        """Release all state, after the tables' backward or in its place."""
        end_step(self.hand_over_rows(), trained)
        self.clear()

    def clear(self) -> None:
        """Release outputs, graphs and gradients."""
        self.ready.clear()
        self.calls.clear()
        self.kernel_gradients = None
