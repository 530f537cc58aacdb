"""Mean loss over the tokens of all ranks, for ranks with different numbers of tokens.

Averaging gradients over ranks divides by the number of ranks. With a mean over each rank's own tokens, a token would
weigh more on a rank with few tokens. Here every rank's sum is divided by the number of tokens of all ranks::

    rank r:   loss_r = sum_r x ranks / (tokens_0 + tokens_1 + ...)
    mean of the ranks' gradients = gradient of (sum_0 + sum_1 + ...) / (tokens_0 + tokens_1 + ...)

This needs the token counts of the other ranks. Their all-gather starts as soon as this rank's count is known.
"""

from __future__ import annotations

import weakref

import torch
import torch.distributed as dist

from lightning_pipe.engine.common.errors import InputError
from lightning_pipe.engine.ranks.object_collectives import collective_device
from lightning_pipe.engine.ranks.process_groups import new_group

# Process group for the counts of each world, made at the first count and dropped with the world.
_groups: weakref.WeakKeyDictionary[dist.ProcessGroup, dist.ProcessGroup] = weakref.WeakKeyDictionary()


class GlobalTokenCount:
    """Token count of all ranks, gathered asynchronously.

    Collective: every rank creates one for each of its batches, in the same order, on the main thread. The first one in
    a process also creates a process group for the counts. Without ``torch.distributed`` it holds this process's count.

    If created in ``on_after_batch_transfer`` and kept in the batch, the total is available long before the loss needs
    it. If created at the start of ``training_step``, its all-gather overlaps with the forward pass. Balancing samples
    between ranks does not change the total.

    Args:
        tokens: number of tokens of this rank's batch, or sum of their weights, >= 0: a number or a tensor with one
            element.
        group: process group of the ranks whose gradients are averaged (default None: all ranks, in a process group
            reserved for the counts).

    Raises:
        InputError: ``tokens`` is not a single number. The other ranks raise an error in :meth:`total`.
    """

    __slots__ = ("_counts", "_group", "_work")  # no __dict__: walks over the batch must find no per-sample data here

    def __init__(self, tokens: torch.Tensor | float, group: dist.ProcessGroup | None = None) -> None:
        error: InputError | None = None
        try:
            count = _to_count_tensor(tokens)
        except InputError as wrong:
            # The other ranks wait for this rank's count; NaN marks it as invalid.
            count, error = torch.tensor([torch.nan], dtype=torch.float64), wrong
        self._group = _get_token_count_group() if group is None else group
        self._work: dist.Work | None = None
        self._counts = count
        if self._group is not None:
            count = count.to(collective_device(self._group, count.device))
            self._counts = count.new_zeros(self._group.size())
            self._work = dist.all_gather(list(self._counts.split(1)), count, group=self._group, async_op=True)
        if error is not None:
            raise error

    @property
    def num_ranks(self) -> int:
        """Number of ranks."""
        return len(self._counts)

    def total(self) -> torch.Tensor:
        """Wait for the number of tokens of all ranks and return it, a zero-dimensional float64 tensor.

        Raises:
            InputError: On every rank, if any rank's count is negative or not finite. Counts on a GPU are not checked,
                because the check would synchronize; the loss is then NaN on all ranks.
        """
        if self._work is not None:
            self._work.wait()
            self._work = None
        wrong = ~(torch.isfinite(self._counts) & (self._counts >= 0))
        if not self._counts.is_cuda and wrong.any():
            invalid_counts = {rank: self._counts[rank].item() for rank in wrong.nonzero().flatten().tolist()}
            raise InputError(
                "the number of tokens is"
                f" {', '.join(f'{count} on rank {rank}' for rank, count in invalid_counts.items())}; expected a finite"
                " number >= 0. Fix the count of these ranks' batches"
            )
        return torch.where(wrong, torch.nan, self._counts).sum()

    def mean(self, loss_sum: torch.Tensor) -> torch.Tensor:
        """This rank's part of the mean over all tokens, multiplied by the number of ranks.

        The mean of the returned values over ranks is the loss of the global batch, and the mean of their gradients is
        its gradient. A rank without tokens gets 0 with zero gradients, even if all ranks are without tokens.

        Args:
            loss_sum: sum of the losses of this rank's tokens. Without tokens it must be 0 and still be part of the
                autograd graph.
        """
        total = self.total().to(loss_sum.device)
        return loss_sum * (self.num_ranks / total.masked_fill(total == 0, 1.0)).to(loss_sum.dtype)


def token_weighted_mean(loss_sum: torch.Tensor, tokens: GlobalTokenCount | torch.Tensor | float) -> torch.Tensor:
    """Loss of this rank whose gradients, averaged over ranks, are those of the mean loss over all ranks' tokens.

    Example::

        def training_step(self, batch, batch_idx):
            tokens = GlobalTokenCount(batch.mask.sum())  # travels during the forward pass
            losses = cross_entropy(self(batch), batch.targets, reduction="none") * batch.mask
            return token_weighted_mean(losses.sum(), tokens)

    Args:
        loss_sum: sum of the losses of this rank's tokens.
        tokens: number of these tokens, >= 0; or a :class:`GlobalTokenCount` created earlier, whose all-gather overlaps
            with the forward pass.

    Raises:
        InputError: See :class:`GlobalTokenCount` and :meth:`GlobalTokenCount.total`.
    """
    count = tokens if isinstance(tokens, GlobalTokenCount) else GlobalTokenCount(tokens)
    return count.mean(loss_sum)


def _to_count_tensor(tokens: object) -> torch.Tensor:
    """Return the count as a float64 tensor of one element."""
    try:
        count = torch.as_tensor(tokens).detach().to(torch.float64).reshape(1)
    except (TypeError, ValueError, RuntimeError) as error:
        raise InputError(
            f"the number of tokens is a {type(tokens).__name__} ({error}); expected one number, such as the result of"
            " tensor.sum()"
        ) from error
    return count


def _get_token_count_group() -> dist.ProcessGroup | None:
    world = dist.group.WORLD if dist.is_available() and dist.is_initialized() else None
    if world is None or world.size() == 1:
        return None
    if world not in _groups:
        _groups[world] = new_group()
    return _groups[world]
