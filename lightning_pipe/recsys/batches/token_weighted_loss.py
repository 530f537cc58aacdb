"""Losses that are means over all tokens of all ranks, where ranks have different numbers of tokens.

What averages gradients over ranks divides by the number of ranks, so a mean over each rank's own tokens gives a token
of a rank with few of them more weight. Here every rank's sum is divided by the tokens of all ranks together::

    rank r:   loss_r = sum_r x ranks / (tokens_0 + tokens_1 + ...)
    mean of the ranks' gradients = gradient of (sum_0 + sum_1 + ...) / (tokens_0 + tokens_1 + ...)

That needs the other ranks' counts, which are on their way from the moment on when this rank's is known.
"""

from __future__ import annotations

import weakref

import torch
import torch.distributed as dist

from lightning_pipe.engine.common.errors import InputError
from lightning_pipe.engine.ranks.process_groups import new_group
from lightning_pipe.engine.ranks.together import communicating_device

__all__ = ["TokenCount", "token_weighted_mean"]

# The group that counts travel through, made at the first count in a world, and left with it.
_groups: weakref.WeakKeyDictionary[dist.ProcessGroup, dist.ProcessGroup] = weakref.WeakKeyDictionary()


class TokenCount:
    """The number of tokens of all ranks, on its way.

    A collective: every rank makes one for each of its batches, in the same order, on the main thread. The first one in
    a process makes a process group for them. Without ``torch.distributed`` it is this process's count.

    Made in ``on_after_batch_transfer``, and kept in the batch, it is there long before the loss needs it; made at the
    begin of ``training_step``, it travels during the forward pass. Where samples are balanced between ranks the count
    of all of them stays what it was.

    Args:
        tokens: of this rank's batch: a number or a tensor of one, 0 or more.
        group: the ranks whose gradients are averaged; by default all, over a group of the counts' own.

    Raises:
        InputError: it is no number, or several. The other ranks hear of it in :meth:`total`.
    """

    __slots__ = ("_counts", "_group", "_work")  # no attributes: nothing in it belongs to samples

    def __init__(self, tokens: torch.Tensor | float, group: dist.ProcessGroup | None = None) -> None:
        error: InputError | None = None
        try:
            count = _count_of(tokens)
        except InputError as wrong:
            # The others wait for this rank's count; NaN tells them that it is none.
            count, error = torch.tensor([torch.nan], dtype=torch.float64), wrong
        self._group = _own_group() if group is None else group
        self._work: dist.Work | None = None
        self._counts = count
        if self._group is not None:
            count = count.to(communicating_device(self._group, count.device))
            self._counts = count.new_zeros(self._group.size())
            self._work = dist.all_gather(list(self._counts.split(1)), count, group=self._group, async_op=True)
        if error is not None:
            raise error

    @property
    def ranks(self) -> int:
        """How many ranks there are."""
        return len(self._counts)

    def total(self) -> torch.Tensor:
        """The tokens of all ranks, a float64 tensor without dimensions; waits until it is there.

        Raises:
            InputError: on every rank, if the count of any is negative or no number. On a GPU this is not looked at,
                for that would wait for it; the loss is then NaN on all ranks.
        """
        if self._work is not None:
            self._work.wait()
            self._work = None
        wrong = ~(torch.isfinite(self._counts) & (self._counts >= 0))
        if not self._counts.is_cuda and wrong.any():
            found = {rank: self._counts[rank].item() for rank in wrong.nonzero().flatten().tolist()}
            raise InputError(
                f"the number of tokens is {', '.join(f'{count} on rank {rank}' for rank, count in found.items())};"
                " needed is a finite number, 0 or more"
            )
        return torch.where(wrong, torch.nan, self._counts).sum()

    def mean(self, loss_sum: torch.Tensor) -> torch.Tensor:
        """This rank's part of the mean over all tokens, times the number of ranks.

        The mean over ranks of what they get is the loss of the global batch, and the mean of its gradients that of the
        loss. A rank without tokens gets 0, whose gradients are zeros; if no rank has any, all do.

        Args:
            loss_sum: the sum of the losses of this rank's tokens; 0 where there is none, and on the graph all the same.
        """
        total = self.total().to(loss_sum.device)
        return loss_sum * (self.ranks / total.clamp(min=1.0)).to(loss_sum.dtype)


def token_weighted_mean(loss_sum: torch.Tensor, tokens: TokenCount | torch.Tensor | float) -> torch.Tensor:
    """The loss of this rank, so that gradients averaged over ranks are those of the mean over all ranks' tokens.

    Example::

        def training_step(self, batch, batch_idx):
            tokens = TokenCount(batch.mask.sum())  # travels during the forward pass
            losses = cross_entropy(self(batch), batch.targets, reduction="none") * batch.mask
            return token_weighted_mean(losses.sum(), tokens)

    Args:
        loss_sum: the sum of the losses of this rank's tokens.
        tokens: how many these are, 0 or more; or a :class:`TokenCount` that was made earlier, so that no rank waits.

    Raises:
        InputError: see :meth:`TokenCount.total`.
    """
    count = tokens if isinstance(tokens, TokenCount) else TokenCount(tokens)
    return count.mean(loss_sum)


def _count_of(tokens: object) -> torch.Tensor:
    """A float64 tensor of one element."""
    try:
        count = torch.as_tensor(tokens).detach().reshape(-1)
    except (TypeError, ValueError, RuntimeError) as error:
        raise InputError(
            f"the number of tokens is {tokens!r}, a {type(tokens).__name__}; needed is one number, as"
            " tensor.sum() gives"
        ) from error
    if len(count) != 1 or count.is_complex():
        kind = "is complex" if count.is_complex() else f"has {len(count)} elements"
        raise InputError(f"the number of tokens {kind}; needed is one number, as tensor.sum() gives")
    return count.to(torch.float64)


def _own_group() -> dist.ProcessGroup | None:
    world = dist.group.WORLD if dist.is_available() and dist.is_initialized() else None
    if world is None or world.size() == 1:
        return None
    if world not in _groups:
        _groups[world] = new_group()
    return _groups[world]
