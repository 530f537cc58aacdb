"""What a step returns and logs, as Lightning keeps it, with less work.

Lightning moves a logged value's accumulators to the value's device whenever it is logged, and copies all that is known
of it on the way: more than all the rest of a log together. Here they are moved where they are not there yet. And it
divides the loss by the number of accumulated batches, also where that is one, which is a node of the graph too.
"""

from __future__ import annotations

from typing import Any

import torch
from lightning.pytorch.loops.optimization.automatic import ClosureResult
from lightning.pytorch.trainer.connectors.logger_connector.result import _ResultCollection, _ResultMetric
from torch import Tensor

__all__ = ["QuickClosureResult", "QuickResults"]


class QuickClosureResult(ClosureResult):
    """What ``training_step`` returned; a loss divided by one is that loss."""

    @classmethod
    def from_training_step_output(cls, training_step_output: Any, normalize: int = 1) -> ClosureResult:
        if normalize == 1 and type(training_step_output) is Tensor and training_step_output.is_floating_point():
            return cls(training_step_output)
        return super().from_training_step_output(training_step_output, normalize)


class QuickResults(_ResultCollection):
    """Drop-in for Lightning's, of whose class objects may be made ones of this (:meth:`of`)."""

    @classmethod
    def of(cls, results: _ResultCollection) -> _ResultCollection:
        """*results* itself, with what it holds, as one of these; one of a class that is not Lightning's stays."""
        if type(results) is _ResultCollection:
            results.__class__ = cls
            for key, metric in list(results.items()):
                results[key] = metric
        return results

    def __setitem__(self, key: str, metric: _ResultMetric) -> None:
        if type(metric) is _ResultMetric:
            metric.__class__ = _QuickMetric
        super().__setitem__(key, metric)


class _QuickMetric(_ResultMetric):
    def to(self, *args: Any, **kwargs: Any) -> _ResultMetric:  # type: ignore[override]  # as the base
        if len(args) == 1 and not kwargs and isinstance(args[0], torch.device) and self._is_on(args[0]):
            return self
        return super().to(*args, **kwargs)

    def _is_on(self, device: torch.device) -> bool:
        """Whether all that is moved with it is there: what is accumulated, and what that begins with."""
        return self.is_tensor and all(
            value.device == device
            for values in (vars(self), self._defaults)
            for value in values.values()
            if isinstance(value, Tensor)
        )
