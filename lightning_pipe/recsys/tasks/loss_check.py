"""A loss that is not a number, found by all ranks together."""

from __future__ import annotations

import torch
import torch.distributed as dist

from lightning_pipe.engine import InputError


def check_finite_loss(loss: torch.Tensor | None, group: dist.ProcessGroup | None) -> None:
    """Raise on every rank if the loss of any rank is NaN or infinite. Every rank of the group calls it.

    Args:
        loss: scalar; None, for a rank that has none in this step, is nothing to complain of.
        group: the ranks that check together, none where there is one.

    Raises:
        InputError: naming this rank's loss and the ranks whose loss is not finite.
    """
    bad = torch.zeros(group.size() if group is not None else 1, device=_device(loss, group))
    rank = group.rank() if group is not None else 0
    if loss is not None:
        bad[rank] = (~torch.isfinite(loss.detach())).any().to(bad.dtype)
    if group is not None and group.size() > 1:
        dist.all_reduce(bad, group=group)
    if bad.any():
        ranks = [index for index, value in enumerate(bad.tolist()) if value]
        raise InputError(
            f"the loss is not finite on rank(s) {ranks} (this rank has {_value(loss)}); needed is a finite loss. Look"
            " for a division by zero, a logarithm of 0, too high a learning rate, or NaNs in the batch"
        )


def _value(loss: torch.Tensor | None) -> object:
    return None if loss is None else loss.detach().tolist()


def _device(loss: torch.Tensor | None, group: dist.ProcessGroup | None) -> torch.device:
    if loss is not None:
        return loss.device
    return torch.device("cuda" if group is not None and dist.get_backend(group) == "nccl" else "cpu")
