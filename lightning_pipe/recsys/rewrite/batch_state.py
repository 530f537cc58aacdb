"""State that one batch carries from task to task: splits, requests, features and, at the boundary, embeddings."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

import torch
import torch.distributed as dist
from torchrec.distributed.types import Awaitable

from lightning_pipe.recsys.kernels.kernel_calls import KernelOutputGradients, LookupCalls
from lightning_pipe.recsys.modules.call_arguments import Arguments, PostprocessResults
from lightning_pipe.recsys.rewrite.boundary import EmbeddingCut, cut_autograd_at_output
from lightning_pipe.recsys.rewrite.divided_lookup import (
    DividedOutputDist,
    DividedRows,
    DivisionExchange,
    RowDivision,
)
from lightning_pipe.recsys.rewrite.input_dist import SplitsRequest

if TYPE_CHECKING:
    from lightning_pipe.recsys.dynamic.tables.row_tables import BatchRows


@dataclass
class ModuleInputs:
    """Inputs of the pipelined modules' calls that are taken from a transferred batch ahead of the step."""

    batch: Any
    postprocessed: PostprocessResults
    # As found in the batch, before keys are reordered or copies are made.
    arguments: dict[str, Arguments] = field(default_factory=dict)
    contexts: dict[str, Any] = field(default_factory=dict)  # TorchRec's, for each module


@dataclass
class PendingSplits:
    """State after EmbInputDistStart."""

    inputs: ModuleInputs
    request: SplitsRequest | None = None  # the fused splits; None if nothing is pipelined
    status: tuple[dist.Work, torch.Tensor] | None = None  # reports a failed rank, unless the splits do
    error: Exception | None = None  # reason why this rank sent no splits


@dataclass
class PendingFeatures:
    """State after EmbInputDistWait: each module's awaitable of its distributed features."""

    inputs: ModuleInputs
    tensors: dict[str, Awaitable[Any]]
    error: Exception | None = None  # of the batch, the same on all ranks; the lookup raises it


@dataclass
class DistributedFeatures:
    """State after EmbPrefetch: each module's distributed features, and the error of its :class:`PendingFeatures`."""

    inputs: ModuleInputs
    distributed: dict[str, Any]
    error: Exception | None = None


@dataclass
class DividedFeatures:
    """State after EmbOverlap: which rows of each divided module wait, and the exchange that tells other ranks."""

    divisions: dict[str, list[tuple[DividedOutputDist, RowDivision]]]
    exchange: DivisionExchange | None  # None if no module is divided


@dataclass
class AheadLookup:
    """Lookup of one divided module whose first rows are sent."""

    output: Awaitable[Any]
    rows: list[DividedRows]
    calls: LookupCalls
    pinned: list[BatchRows]  # of dynamic tables


@dataclass
class ModuleCall:
    """One call of a sharded module in a step."""

    name: str
    cuts: list[EmbeddingCut]
    lookups: LookupCalls | None = None  # if they are captured


class Embeddings:
    """State after EmbForward: the cut outputs of the pipelined modules, and during the step those of other modules."""

    def __init__(self, inputs: ModuleInputs) -> None:
        self.inputs = inputs
        # Outputs that were looked up ahead and not taken yet, by module. A second call makes another lookup.
        self.ready: dict[str, Any] = {}
        self.calls: list[ModuleCall] = []  # in the order of the lookups, which is the same on every rank
        # Of the first half of the tables' backward, if that runs in two halves.
        self.kernel_gradients: KernelOutputGradients | None = None
        self._rows: list[BatchRows] = []

    def add_output_with_autograd_cut(self, name: str, output: Any, lookups: LookupCalls | None = None) -> Any:
        """Cut the awaited ``output`` of one call of the module ``name``, and return the output for the step."""
        cuts: list[EmbeddingCut] = []
        passed_on = cut_autograd_at_output(output, cuts)
        self.calls.append(ModuleCall(name, cuts, lookups))
        return passed_on

    def add_ready_output(self, name: str, output: Any, lookups: LookupCalls | None = None) -> None:
        self.ready[name] = self.add_output_with_autograd_cut(name, output, lookups)

    def iterate_autograd_cuts(self) -> Iterator[EmbeddingCut]:
        for call in self.calls:
            yield from call.cuts

    def gradient_tensors(self) -> list[torch.Tensor]:
        """Return the unscaled gradients that the dense backward has sent to this rank's outputs so far."""
        return [cut.gradient for cut in self.iterate_autograd_cuts() if cut.gradient is not None]

    def hold_rows(self, rows: Iterable[BatchRows]) -> None:
        """Hold rows of dynamic tables that were looked up, and release them when the step ends."""
        self._rows += rows

    def take_held_rows(self) -> list[BatchRows]:
        """Return the rows that are held, which the caller releases from now on."""
        rows, self._rows = self._rows, []
        return rows

    def release(self, trained: bool) -> None:
        """Release all state, after the tables' backward or in its place."""
        release_pinned_rows(self.take_held_rows(), trained)
        self.ready.clear()
        self.calls.clear()
        self.kernel_gradients = None


def release_pinned_rows(rows: Sequence[BatchRows], trained: bool) -> None:
    """End the lookups in dynamic tables of one step."""
    if rows:
        from lightning_pipe.recsys.dynamic.tables.row_tables import end_lookups  # lazy: few models have dynamic tables

        end_lookups(rows, trained)
