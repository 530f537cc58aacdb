"""Order of the gradients in the buckets in which ``DistributedDataParallel`` sums them over ranks.

The first backward pass of a process uses the order of the parameters; every later pass uses the order in which the
first pass produced the gradients. With three or more ranks, the position of a gradient in its bucket determines the
order of summation over ranks, and therefore the last bit of the sum. A resumed run must use the order of the
interrupted run.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch.nn.parallel import DistributedDataParallel

from lightning_pipe._compat.torch import get_ddp_bucket_parameters, rebuild_buckets
from lightning_pipe.checkpoints.compiled_names import CompiledNameMap


def gradient_order(model: DistributedDataParallel) -> list[str]:
    """Names of the parameters in the order of their gradients, bucket after bucket."""
    names = {id(parameter): name for name, parameter in model.module.named_parameters()}
    return [names[id(parameter)] for bucket in get_ddp_bucket_parameters(model) for parameter in bucket]


def set_gradient_order(model: DistributedDataParallel, order: Sequence[str]) -> None:
    """Set the order of gradients by a backward pass of zeros in that order, before the first real backward pass.

    Every rank calls this function. An order that does not name exactly the trained parameters is ignored.
    """
    trained = {name: parameter for name, parameter in model.module.named_parameters() if parameter.requires_grad}
    order = [*map(CompiledNameMap(trained), order)]
    if sorted(order) != sorted(trained):
        return
    before = {name: parameter.grad for name, parameter in trained.items()}
    model.reducer.prepare_for_backward([])
    for name in order:
        torch.autograd.backward(trained[name], torch.zeros_like(trained[name]))
    rebuild_buckets(model)
    for name, gradient in before.items():
        trained[name].grad = gradient
