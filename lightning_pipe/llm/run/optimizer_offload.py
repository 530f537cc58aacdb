"""Offloading of optimizer state: it stays in host memory, and is on the accelerator only while it is stepped.

The step runs on the parameters' device with the same kernels, so results do not change. It runs for one bucket of
parameters at a time::

    for each bucket:   host ──► device   state of the bucket        (none yet in the first step)
                       step of the bucket's parameters
                       device ──► host   state of the bucket

The optimizer remains the user's own object, which schedulers, checkpoints and Lightning refer to. Its groups, state and
``state_dict`` keep their keys, but state tensors are on the host. With FSDP's ``CPUOffloadPolicy``, parameters,
gradients and state are on the host already, and offloading has no effect.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack
from typing import Any

import torch
from torch import Tensor
from torch.optim import LBFGS, Optimizer

from lightning_pipe._compat.torch import tree_flatten, tree_unflatten
from lightning_pipe.engine.common.errors import SetupError
from lightning_pipe.llm.parallel.gradients import local_tensor


class OptimizerStateOffload:
    """Keeps an optimizer's state on the host, from construction until :meth:`close`.

    While a bucket is stepped, only its state is on the device. Optimizers of ``torch.optim`` step each parameter
    independently, so results do not change. Other optimizers may combine parameters, so all of their state is moved
    together. A closure runs before any state is moved.
    """

    def __init__(self, optimizer: Optimizer, bucket_bytes: int = 2**28) -> None:
        if isinstance(optimizer, LBFGS):
            raise SetupError(
                "the state of LBFGS cannot be offloaded, since it runs forward and backward in the middle of its step."
                " Use an optimizer that steps with existing gradients, such as AdamW"
            )
        self._optimizer = optimizer
        self._bucket_bytes = bucket_bytes if type(optimizer).__module__.startswith("torch.optim.") else float("inf")
        self._host_copies: dict[int, list[Tensor | None]] = {}
        self._all: list[list[Tensor]] | None = None
        self._handles = [
            optimizer.register_step_pre_hook(self._step),
            optimizer.register_step_post_hook(lambda *_: self._restore_param_groups()),
            optimizer.register_state_dict_pre_hook(lambda *_: self._restore_param_groups()),
            optimizer.register_load_state_dict_post_hook(lambda *_: self.move_to_host()),
        ]
        self.move_to_host()

    def move_to_host(self) -> None:
        """Move all state to the host, after other code than a step has put it on the device."""
        self._move(list(self._optimizer.state), self._to_host)
        self._finish_copies()

    def stop_offloading(self) -> None:
        """Stop offloading: remove the hooks, and move the state to the parameters' devices."""
        self._restore_param_groups()
        for handle in self._handles:
            handle.remove()
        self._move(list(self._optimizer.state), self._to_device)
        self._host_copies.clear()

    # ------------------------------------------------------------------ the step

    def _step(self, optimizer: Optimizer, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """Run the whole step ahead of the called one, which then has no parameters and does nothing."""
        if self._all is not None:
            return None  # called from within a step, by a subclass
        closure = kwargs.get("closure", args[1] if len(args) > 1 else None)
        loss = None
        if closure is not None:
            with torch.enable_grad():
                loss = closure()
        step = type(optimizer).step
        step = getattr(step, "__wrapped__", step)  # without the hooks, which run around the called step
        try:
            for bucket in list(self._buckets()):
                with ExitStack() as stack:
                    self._restrict_param_groups(bucket)
                    stack.callback(self._restore_param_groups)
                    self._move(bucket, self._to_device)
                    stack.callback(self._move, bucket, self._to_host)
                    step(optimizer)
        finally:
            self._finish_copies()
        self._restrict_param_groups([])
        return (optimizer, None if closure is None else lambda: loss), {}

    def _buckets(self) -> Iterator[list[Tensor]]:
        bucket: list[Tensor] = []
        bucket_size = 0
        for group in self._optimizer.param_groups:
            for parameter in group["params"]:
                if parameter.grad is None:
                    continue
                size = local_tensor(parameter).nbytes
                if bucket and bucket_size + size > self._bucket_bytes:
                    yield bucket
                    bucket, bucket_size = [], 0
                bucket.append(parameter)
                bucket_size += size
        if bucket:
            yield bucket

    def _restrict_param_groups(self, parameters: Sequence[Tensor]) -> None:
        """Restrict the optimizer's groups to these parameters."""
        groups = self._optimizer.param_groups
        self._all = [group["params"] for group in groups]
        ids = set(map(id, parameters))
        for group in groups:
            group["params"] = [parameter for parameter in group["params"] if id(parameter) in ids]

    def _restore_param_groups(self) -> None:
        if self._all is not None:
            for group, parameters in zip(self._optimizer.param_groups, self._all, strict=True):
                group["params"] = parameters
            self._all = None

    # ------------------------------------------------------------------ moving state

    def _move(self, parameters: Sequence[Any], transfer: Callable[[Tensor, list[Any]], list[Any]]) -> None:
        state = self._optimizer.state
        with torch.no_grad():
            for parameter in parameters:
                if parameter in state and isinstance(parameter, Tensor):
                    values, structure = tree_flatten(state[parameter])
                    state[parameter] = tree_unflatten(transfer(parameter, values), structure)

    def _to_device(self, parameter: Tensor, values: list[Any]) -> list[Any]:
        host_copies = self._host_copies.get(id(parameter), [None] * len(values))
        return [
            value.to(parameter.device, non_blocking=True) if value is host_copy and value is not None else value
            for value, host_copy in zip(values, host_copies, strict=True)
        ]

    def _to_host(self, parameter: Tensor, values: list[Any]) -> list[Any]:
        previous = self._host_copies.get(id(parameter), [])
        previous = previous if len(previous) == len(values) else [None] * len(values)
        host_copies = self._host_copies[id(parameter)] = [
            _host_copy(*pair) for pair in zip(values, previous, strict=True)
        ]
        return [value if host_copy is None else host_copy for value, host_copy in zip(values, host_copies, strict=True)]

    def _finish_copies(self) -> None:
        """Wait until the copies to the host are complete."""
        if torch.accelerator.is_available():
            torch.accelerator.synchronize()


def _host_copy(value: Any, previous: Tensor | None) -> Tensor | None:
    """Host copy of a tensor on a device; None for a value that belongs on the host."""
    if not isinstance(value, Tensor) or value.device.type == "cpu":
        return previous if value is previous else None
    if previous is None or (previous.shape, previous.dtype) != (value.shape, value.dtype):
        previous = torch.empty_like(value, device="cpu", pin_memory=torch.accelerator.is_available())
    return previous.copy_(value, non_blocking=True)
