"""Collective check that the loss is finite."""

from __future__ import annotations

import torch
import torch.distributed as dist

from lightning_pipe.engine.common.errors import InputError
from lightning_pipe.engine.ranks.object_collectives import collective_device


def check_finite_loss(loss: torch.Tensor | None, group: dist.ProcessGroup | None) -> None:
    """Raise on every rank if the loss of any rank is NaN or infinite. Every rank of the group calls it."""
    device = torch.device("cpu") if loss is None else loss.device
    if group is not None:
        device = collective_device(group, device)
    bad = torch.zeros(group.size() if group is not None else 1, device=device)
    rank = group.rank() if group is not None else 0
    if loss is not None:
        bad[rank] = (~torch.isfinite(loss.detach())).any().to(bad.dtype)
    if group is not None and group.size() > 1:
        dist.all_reduce(bad, group=group)
    if bad.any():
        ranks = [index for index, value in enumerate(bad.tolist()) if value]
        local_loss = None if loss is None else loss.detach().tolist()
        raise InputError(
            f"expected a finite loss, but it is not finite on rank(s) {ranks} (this rank has {local_loss}). Look for"
            " a division by zero, the logarithm of 0, a learning rate that is too high, or NaNs in the batch."
        )
