"""Loss of a mini-batch as a sum over its micro-batches, normalized over the whole mini-batch.

A mean over rows is the mean of the micro-batches' means, weighted by their rows. A cross entropy that ignores targets
or weights classes divides by the total weight of the counted targets. For the whole mini-batch, this weight is computed
before the first micro-batch runs. A function without a ``reduction`` is checked once on two parts of a micro-batch.
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
from lightning_pipe.pipe.scatter import count_batch_rows, scatter

LossFunction = Callable[[Any, Any], Tensor]
Reduction = Literal["mean", "sum"]

# Keyed by the ``reduction`` of a loss; "batchmean" is a sum divided by the number of rows.
_REDUCTIONS: dict[Any, Reduction] = {"mean": "mean", "batchmean": "mean", "sum": "sum"}
_CROSS_ENTROPIES = (nn.CrossEntropyLoss, nn.NLLLoss)
_FUNCTIONS = {functional.cross_entropy: nn.CrossEntropyLoss, functional.nll_loss: nn.NLLLoss}


class MiniBatchLoss:
    """Builds the loss functions of a mini-batch's micro-batches."""

    def __init__(self, loss_fn: LossFunction, reduction: Reduction | None, known_means: set[Any]) -> None:
        loss_fn = _FUNCTIONS[loss_fn]() if _is_functional_cross_entropy(loss_fn) else loss_fn  # type: ignore[index]
        declared: Any = reduction
        if declared is None:
            declared = getattr(loss_fn, "reduction", None) or getattr(loss_fn, "keywords", {}).get("reduction")
        if declared is not None and declared not in _REDUCTIONS:
            raise InputError(
                f"loss_fn has the reduction {declared!r}; expected 'mean' or 'sum', which give a scalar for a"
                " micro-batch"
            )
        self.loss_fn = loss_fn
        self.reduction: Reduction = "mean" if declared is None else _REDUCTIONS[declared]
        self._known_means = known_means
        self._kind = _make_loss_function_key(loss_fn)
        self._to_try = declared is None and self._kind not in known_means

    def split(self, targets: Any, count: int, scale: float) -> list[MicroBatchLoss]:
        """Return the loss functions of *count* micro-batches."""
        pieces = scatter(targets, count)
        total = None if self.reduction == "sum" else _total_target_weight(self.loss_fn, targets)
        rows = count_batch_rows(targets)
        loss_fn, by_rows = self.loss_fn, self.reduction == "mean" and total is None
        if total is not None:
            loss_fn = copy.copy(loss_fn)
            loss_fn.reduction = "sum"  # type: ignore[union-attr]
        losses = []
        for index, piece in enumerate(pieces):
            keep = self._to_try and index == 0 and count_batch_rows(piece) > 1
            weight = count_batch_rows(piece) / rows if by_rows else 1.0
            losses.append(MicroBatchLoss(loss_fn, piece, weight, total, scale, keep))
        return losses

    def check_is_mean(self, first: MicroBatchLoss) -> None:
        """Check that a function without a ``reduction`` returns a mean over rows, after the first micro-batch."""
        if first.sample is None:
            return
        output, target, loss, dtype = first.sample
        first.sample = None
        parts = _compute_half_batch_losses(self.loss_fn, output, target)
        if parts is None:
            return
        (a, rows_a), (b, rows_b) = parts
        near = _bound_loss_rounding_error(output, dtype) * (abs(a) + abs(b) + abs(loss)) + 1e-12
        if abs(loss - (a * rows_a + b * rows_b) / (rows_a + rows_b)) <= near:
            self._known_means.add(self._kind)
            return
        description = f"{loss:.6g} for {rows_a + rows_b} rows, {a:.6g} for the first {rows_a} and {b:.6g} for the rest"
        is_sum = abs(loss - a - b) <= near
        raise InputError(
            f"loss_fn returns {description}, which is {'a sum' if is_sum else 'neither a mean nor a sum'} over rows;"
            " expected a mean. If it returns a sum, pass reduction='sum'. For ignored targets or class weights, pass"
            " nn.CrossEntropyLoss, or return a sum and divide the result of pipe.loss. To average the micro-batches'"
            " losses anyway, pass reduction='mean'"
        )


class MicroBatchLoss:
    """Loss of one micro-batch, as a summand of the mini-batch's loss: times *weight*, divided by *total*."""

    def __init__(
        self, loss_fn: LossFunction, target: Any, weight: float, total: Tensor | None, scale: float, keep: bool
    ) -> None:
        self._loss_fn, self._target, self._weight, self._total, self._scale = loss_fn, target, weight, total, scale
        self._keep = keep
        self.kind = _make_loss_function_key(loss_fn)
        self.value: Tensor = torch.empty(())  # summand without the scale
        self.sample: tuple[Any, Any, float, torch.dtype] | None = None  # output, target, loss and its dtype

    def __call__(self, output: Any) -> Tensor:
        loss = self._loss_fn(output, self._target)
        if not isinstance(loss, Tensor) or loss.dim():
            returned = tuple(loss.shape) if isinstance(loss, Tensor) else type(loss).__name__
            raise InputError(
                f"loss_fn returned {returned}; expected a tensor without dimensions. Return a mean or a sum over rows"
            )
        if self._keep:
            detached = pytree.tree_map_only(Tensor, Tensor.detach, output)
            self.sample = detached, self._target, float(loss.detach()), loss.dtype
        if self._total is not None:
            loss = loss / self._total
        if self._weight != 1.0:
            loss = loss * self._weight
        self.value = loss.detach()
        return loss if self._scale == 1.0 else loss * self._scale


def _is_functional_cross_entropy(loss_fn: Any) -> bool:
    try:
        return loss_fn in _FUNCTIONS
    except TypeError:  # not hashable
        return False


def _make_loss_function_key(loss_fn: Any) -> Any:
    """Return a key that is equal for functions that are created again in every step."""
    while isinstance(loss_fn, partial):
        loss_fn = loss_fn.func
    return getattr(getattr(loss_fn, "__func__", loss_fn), "__code__", type(loss_fn))


def _total_target_weight(loss_fn: LossFunction, targets: Any) -> Tensor | None:
    """Return the divisor of a cross entropy's mean; None if it is the number of targets, or for other functions."""
    if type(loss_fn) not in _CROSS_ENTROPIES or not isinstance(targets, Tensor) or targets.is_floating_point():
        return None
    assert isinstance(loss_fn, _CROSS_ENTROPIES)
    counts = targets != loss_fn.ignore_index
    if loss_fn.weight is None:
        # On a GPU this synchronizes the host once per mini-batch. If all targets count, means stay bitwise the same.
        return None if bool(counts.all()) else counts.sum()
    weights: Tensor = loss_fn.weight.to(targets.device)
    return weights[targets[counts]].sum()


def _compute_half_batch_losses(loss_fn: LossFunction, output: Any, target: Any) -> list[tuple[float, int]] | None:
    """Return losses and rows of two parts of a micro-batch; None if they cannot be computed, or are random."""
    devices = list(range(torch.cuda.device_count())) if torch.cuda.is_initialized() else []
    with torch.no_grad(), torch.random.fork_rng(devices):
        before = torch.get_rng_state()
        try:
            pieces = zip(scatter(output, 2), scatter(target, 2), strict=True)
            losses = [(float(loss_fn(*piece)), count_batch_rows(piece[1])) for piece in pieces]
        except Exception:
            return None  # the function cannot be computed on a part of a micro-batch
        return losses if torch.equal(before, torch.get_rng_state()) else None


def _bound_loss_rounding_error(output: Any, dtype: torch.dtype) -> float:
    """Return a bound of the relative rounding error of a loss.

    The error of a sum of n terms grows as sqrt(n) epsilon (Higham and Mary, 2019). PyTorch adds in single precision or
    better, and rounds the result to *dtype*. The factor 16 leaves room for a loss of several operations, and for terms
    of different signs that cancel. Integers are exact.
    """
    epsilon = torch.finfo(dtype).eps if dtype.is_floating_point else 0.0
    count = max((leaf.numel() for leaf in pytree.tree_leaves(output) if isinstance(leaf, Tensor)), default=1)
    return float(2 * epsilon + 16 * min(epsilon, torch.finfo(torch.float32).eps) * count**0.5)


def sum_losses(losses: Sequence[MicroBatchLoss]) -> Tensor:
    """Return the loss of the mini-batch."""
    return sum((loss.value for loss in losses[1:]), losses[0].value)
