"""Private collectives and wrappers of PyTorch that language models use. Versions for recommenders alone lack some."""

from __future__ import annotations

from torch.distributed._composable.replicate_with_fsdp import replicate
from torch.distributed._functional_collectives import (
    all_gather_single_autograd,
    all_to_all_single,
    all_to_all_single_autograd,
    wait_tensor,
)

__all__ = [
    "all_gather_single_autograd",
    "all_to_all_single",
    "all_to_all_single_autograd",
    "replicate",
    "wait_tensor",
]
