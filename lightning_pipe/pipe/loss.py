"""The loss of a mini-batch as a sum over its micro-batches, whose mean is over what the loss means.

A mean over rows is the mean of the micro-batches' means, weighted by their rows. Where a cross entropy leaves out
targets, or weighs classes, its mean is over the weights of the targets that count: those of the whole mini-batch, which
are known before it runs. A function that does not say what it returns is tried once on two parts of a micro-batch.
"""

from __future__ import annotations

import copy
from collections.abc import Callable, Sequence
from functools import partial
from typing import Any, Literal

import torch
from torch import Tensor, nn
from torch.nn import functional

from lightning_pipe._compat.torch import pytree
from lightning_pipe.engine import InputError
from lightning_pipe.pipe.scatter import rows_of, scatter

__all__ = ["LossFunction", "MicroLoss", "MiniBatchLoss", "Reduction", "total_of"]

LossFunction = Callable[[Any, Any], Tensor]
Reduction = Literal["mean", "sum"]

# By what a loss says of itself; "batchmean" is a sum over the number of rows.
_REDUCTIONS: dict[Any, Reduction] = {"mean": "mean", "batchmean": "mean", "sum": "sum"}
_CROSS_ENTROPIES = (nn.CrossEntropyLoss, nn.NLLLoss)
_FUNCTIONS = {functional.cross_entropy: nn.CrossEntropyLoss, functional.nll_loss: nn.NLLLoss}
_NEAR = 1e-2  # of the losses themselves: far above what rounding does, half precision included


class MiniBatchLoss:
    """Makes the losses of a mini-batch's micro-batches.

    Args:
        loss_fn: called with what the last layer returns for a micro-batch, and its targets.
        reduction: what it returns; None for what its ``reduction`` says, or for what it turns out to be.
        known: kinds of functions that have turned out to be means; added to.

    Raises:
        InputError: it returns neither a mean nor a sum.
    """

    def __init__(self, loss_fn: LossFunction, reduction: Reduction | None, known: set[Any]) -> None:
        if not callable(loss_fn):
            raise InputError(f"loss_fn is {loss_fn!r}; needed is what makes a loss of outputs and targets")
        loss_fn = _FUNCTIONS[loss_fn]() if _is_known(loss_fn) else loss_fn  # type: ignore[index]
        told: Any = reduction
        if told is None:
            told = getattr(loss_fn, "reduction", None) or getattr(loss_fn, "keywords", {}).get("reduction")
        if told is not None and told not in _REDUCTIONS:
            raise InputError(
                f"loss_fn has the reduction {told!r}; needed is a scalar for a micro-batch: 'mean' or 'sum'"
            )
        self.loss_fn = loss_fn
        self.reduction: Reduction = "mean" if told is None else _REDUCTIONS[told]
        self._known = known
        self._kind = _kind_of(loss_fn)
        self._to_try = told is None and self._kind not in known

    def of_micro_batches(self, targets: Any, count: int, scale: float) -> list[MicroLoss]:
        """The losses of *count* micro-batches.

        Args:
            targets: of the mini-batch.
            count: how many.
            scale: what backward runs from, over the loss.
        """
        pieces = scatter(targets, count)
        total = None if self.reduction == "sum" else _counted(self.loss_fn, targets)
        rows = rows_of(targets)
        loss_fn, by_rows = self.loss_fn, self.reduction == "mean" and total is None
        if total is not None:
            loss_fn = copy.copy(loss_fn)
            loss_fn.reduction = "sum"  # type: ignore[union-attr]
        losses = []
        for index, piece in enumerate(pieces):
            keep = self._to_try and index == 0 and rows_of(piece) > 1
            weight = rows_of(piece) / rows if by_rows else 1.0
            losses.append(MicroLoss(loss_fn, piece, weight, total, scale, keep))
        return losses

    def check(self, first: MicroLoss) -> None:
        """Refuse a function that is no mean over rows, if it did not say what it is; once the first has run.

        Raises:
            InputError: it is none.
        """
        if first.kept is None:
            return
        output, target, whole = first.kept
        first.kept = None
        parts = _on_halves(self.loss_fn, output, target)
        if parts is None:
            return
        (a, rows_a), (b, rows_b) = parts
        near = _NEAR * (abs(a) + abs(b) + abs(whole)) + 1e-12
        if abs(whole - (a * rows_a + b * rows_b) / (rows_a + rows_b)) <= near:
            self._known.add(self._kind)
            return
        found = (
            f"{whole:.6g} for {rows_a + rows_b} rows, {a:.6g} for the first {rows_a} of them and {b:.6g} for the rest"
        )
        if abs(whole - a - b) <= near:
            raise InputError(f"loss_fn returns a sum over rows ({found}); say so: reduction='sum'")
        raise InputError(
            f"loss_fn returns {found}, which is neither a mean nor a sum over rows: micro-batches' losses do not add up"
            " to that of the mini-batch. Give nn.CrossEntropyLoss where targets are left out or weighed, or"
            " return a sum, say reduction='sum', and divide what pipe.loss returns. reduction='mean' takes the mean of"
            " micro-batches all the same"
        )


class MicroLoss:
    """The loss of one micro-batch: its part of the whole.

    Args:
        loss_fn: see :class:`MiniBatchLoss`.
        target: of the micro-batch.
        weight: what the loss is multiplied by.
        total: what it is divided by; None for nothing.
        scale: see :meth:`MiniBatchLoss.of_micro_batches`.
        keep: keep the output, to try the function with.

    Attributes:
        kind: the same for functions that are made anew in every step.
        value: the part, once it has run.
        kept: output, target and loss of the micro-batch.
    """

    def __init__(
        self, loss_fn: LossFunction, target: Any, weight: float, total: Tensor | None, scale: float, keep: bool
    ) -> None:
        self._loss_fn, self._target, self._weight, self._total, self._scale = loss_fn, target, weight, total, scale
        self._keep = keep
        self.kind = _kind_of(loss_fn)
        self.value: Tensor = torch.empty(())
        self.kept: tuple[Any, Any, float] | None = None

    def __call__(self, output: Any) -> Tensor:
        loss = self._loss_fn(output, self._target)
        if not isinstance(loss, Tensor) or loss.dim():
            found = tuple(loss.shape) if isinstance(loss, Tensor) else type(loss).__name__
            raise InputError(f"loss_fn returned {found}; needed is a tensor without dimensions, a mean or a sum")
        if self._keep:
            self.kept = (pytree.tree_map(_detached, output), self._target, float(loss.detach()))
        if self._total is not None:
            loss = loss / self._total
        if self._weight != 1.0:
            loss = loss * self._weight
        self.value = loss.detach()
        return loss if self._scale == 1.0 else loss * self._scale


def _detached(value: Any) -> Any:
    return value.detach() if isinstance(value, Tensor) else value


def _is_known(loss_fn: Any) -> bool:
    try:
        return loss_fn in _FUNCTIONS
    except TypeError:  # not hashable
        return False


def _kind_of(loss_fn: Any) -> Any:
    """The same for functions that are made anew in every step."""
    while isinstance(loss_fn, partial):
        loss_fn = loss_fn.func
    return getattr(getattr(loss_fn, "__func__", loss_fn), "__code__", type(loss_fn))


def _counted(loss_fn: LossFunction, targets: Any) -> Tensor | None:
    """What a cross entropy's mean divides by, where that is not the number of targets; else None."""
    if type(loss_fn) not in _CROSS_ENTROPIES or not isinstance(targets, Tensor) or targets.is_floating_point():
        return None
    assert isinstance(loss_fn, _CROSS_ENTROPIES)
    counts = targets != loss_fn.ignore_index
    if loss_fn.weight is None:
        # On a GPU the host waits here, once a mini-batch; where all count, means stay what they are, to the bit.
        return None if bool(counts.all()) else counts.sum()
    weights: Tensor = loss_fn.weight.to(targets.device)
    return weights[targets[counts]].sum()


def _on_halves(loss_fn: LossFunction, output: Any, target: Any) -> list[tuple[float, int]] | None:
    """Losses and rows of two parts of a micro-batch; None where they cannot be had, or are random."""
    devices = list(range(torch.cuda.device_count())) if torch.cuda.is_initialized() else []
    with torch.no_grad(), torch.random.fork_rng(devices):
        before = torch.get_rng_state()
        try:
            pieces = zip(scatter(output, 2), scatter(target, 2), strict=True)
            found = [(float(loss_fn(*piece)), rows_of(piece[1])) for piece in pieces]
        except Exception:
            return None  # what it needs of a micro-batch a part does not have
        return found if torch.equal(before, torch.get_rng_state()) else None


def total_of(losses: Sequence[MicroLoss]) -> Tensor:
    """The loss of the mini-batch."""
    total = losses[0].value
    for one in losses[1:]:
        total = total + one.value
    return total
