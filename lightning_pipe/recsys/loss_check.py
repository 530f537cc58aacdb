"""A loss that is not a number, found by all ranks together."""

from __future__ import annotations

import torch
import torch.distributed as dist

from lightning_pipe.engine import InputError


def check_finite_loss(loss: torch.Tensor, group: dist.ProcessGroup | None) -> None:
    """Raise on every rank if the loss of any rank is NaN or infinite.

    Args:
        loss: scalar.
        group: the ranks that check together, none where there is one.

    Raises:
        InputError: naming this rank's loss and the ranks whose loss is not finite.
    """
    bad = torch.zeros(group.size() if group is not None else 1, device=loss.device)
    rank = group.rank() if group is not None else 0
    bad[rank] = (~torch.isfinite(loss.detach())).all().to(bad.dtype)
    if group is not None and group.size() > 1:
        dist.all_reduce(bad, group=group)
    if bad.any():
        ranks = [index for index, value in enumerate(bad.tolist()) if value]
        raise InputError(
            f"the loss is not finite on rank(s) {ranks} (this rank has {loss.item()}); needed is a finite loss. Look for"
            " a division by zero, a logarithm of 0, too high a learning rate, or NaNs in the batch"
        )
