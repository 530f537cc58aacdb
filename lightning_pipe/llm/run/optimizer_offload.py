"""Optimiser state that rests in the host's memory, and is on the accelerator for its own part of a step only.

The step stays where the parameters are, with the same kernels, so results do not change. It is run for some parameters
at a time::

    for each bucket:   host ──► device   state of the bucket        (first step: there is none yet)
                       step of the bucket's parameters alone
                       device ──► host   state of the bucket

The optimiser is the user's own, and stays what schedulers, checkpoints and Lightning know: its groups, its state and
its ``state_dict`` have the same keys, only that tensors are the host's. Where FSDP's ``CPUOffloadPolicy`` is used,
parameters, gradients and state are the host's anyway, and there is nothing to move.
"""

from __future__ import annotations

from collections.abc import Callable, Generator, Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor
from torch.distributed.tensor import DTensor
from torch.optim import LBFGS, Optimizer

from lightning_pipe._compat.torch import tree_flatten, tree_unflatten
from lightning_pipe.engine.common.errors import SetupError

__all__ = ["OffloadedState"]


class OffloadedState:
    """Keeps an optimiser's state on the host, from now on until :meth:`close`.

    While a bucket is stepped its state is on the device, and that of no other. Optimisers of ``torch.optim`` step each
    parameter by itself, so nothing changes for them; of another's, which may look at all parameters together, all
    state is moved at once. A closure runs before any state is moved.

    Args:
        optimizer: over parameters of any device, DTensors included. State on the host already (a count of steps, say)
            stays there during the step, too.
        bucket_bytes: how many bytes of this rank's parameters make a bucket; a larger one is a bucket by itself. AdamW
            in 32 bits has twice these in state.

    Raises:
        SetupError: the optimiser is LBFGS, which evaluates its closure in the middle of a step.
    """

    def __init__(self, optimizer: Optimizer, bucket_bytes: int = 2**28) -> None:
        if isinstance(optimizer, LBFGS):
            raise SetupError(
                "the state of LBFGS cannot be offloaded, since it runs forward and backward in the middle of its step;"
                " needed is an optimiser that steps with gradients that are there, such as AdamW"
            )
        self._optimizer = optimizer
        self._bucket_bytes = bucket_bytes if type(optimizer).__module__.startswith("torch.optim.") else float("inf")
        self._homes: dict[int, list[Tensor | None]] = {}
        self._all: list[list[Tensor]] | None = None
        self._handles = [
            optimizer.register_step_pre_hook(self._step),
            optimizer.register_step_post_hook(lambda *_: self._show_all()),
            optimizer.register_state_dict_pre_hook(lambda *_: self._show_all()),
            optimizer.register_load_state_dict_post_hook(lambda *_: self.rest()),
        ]
        self.rest()

    def rest(self) -> None:
        """Move to the host whatever state is elsewhere: once something else than a step has put it there."""
        self._move(list(self._optimizer.state), self._to_host)
        self._finish_copies()

    def close(self) -> None:
        """Let the optimiser go on by itself, with its state on its parameters' devices."""
        self._show_all()
        for handle in self._handles:
            handle.remove()
        self._move(list(self._optimizer.state), self._to_device)
        self._homes.clear()

    # ------------------------------------------------------------------ the step

    def _step(self, optimizer: Optimizer, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """Do all of the step, before the one that was called: which then finds no parameters, and does nothing."""
        if self._all is not None:
            return None  # a step that calls its base class's
        closure = kwargs.get("closure", args[1] if len(args) > 1 else None)
        loss = None
        if closure is not None:
            with torch.enable_grad():
                loss = closure()
        step = type(optimizer).step
        step = getattr(step, "__wrapped__", step)  # without hooks, which run around the step that was called
        try:
            for bucket in list(self._buckets()):
                with self._only(bucket):
                    self._move(bucket, self._to_device)
                    try:
                        step(optimizer)
                    finally:
                        self._move(bucket, self._to_host)
        finally:
            self._finish_copies()
        self._show([])
        return (optimizer, None if closure is None else lambda: loss), {}

    def _buckets(self) -> Iterator[list[Tensor]]:
        bucket: list[Tensor] = []
        taken = 0
        for group in self._optimizer.param_groups:
            for parameter in group["params"]:
                if parameter.grad is None:
                    continue
                size = _local_bytes(parameter)
                if bucket and taken + size > self._bucket_bytes:
                    yield bucket
                    bucket, taken = [], 0
                bucket.append(parameter)
                taken += size
        if bucket:
            yield bucket

    @contextmanager
    def _only(self, bucket: Sequence[Tensor]) -> Generator[None, None, None]:
        self._show(bucket)
        try:
            yield
        finally:
            self._show_all()

    def _show(self, shown: Sequence[Tensor]) -> None:
        """Let the optimiser's groups have these parameters only."""
        groups = self._optimizer.param_groups
        self._all = [group["params"] for group in groups]
        ids = set(map(id, shown))
        for group in groups:
            group["params"] = [parameter for parameter in group["params"] if id(parameter) in ids]

    def _show_all(self) -> None:
        if self._all is not None:
            for group, parameters in zip(self._optimizer.param_groups, self._all, strict=True):
                group["params"] = parameters
            self._all = None

    # ------------------------------------------------------------------ where state is

    def _move(self, parameters: Sequence[Any], how: Callable[[Tensor, list[Any]], list[Any]]) -> None:
        state = self._optimizer.state
        with torch.no_grad():
            for parameter in parameters:
                if parameter in state and isinstance(parameter, Tensor):
                    values, structure = tree_flatten(state[parameter])
                    state[parameter] = tree_unflatten(how(parameter, values), structure)

    def _to_device(self, parameter: Tensor, values: list[Any]) -> list[Any]:
        homes = self._homes.get(id(parameter), [None] * len(values))
        return [
            value.to(parameter.device, non_blocking=True) if value is home and value is not None else value
            for value, home in zip(values, homes, strict=True)
        ]

    def _to_host(self, parameter: Tensor, values: list[Any]) -> list[Any]:
        before = self._homes.get(id(parameter), [])
        before = before if len(before) == len(values) else [None] * len(values)
        homes = self._homes[id(parameter)] = [_home(*pair) for pair in zip(values, before, strict=True)]
        return [value if home is None else home for value, home in zip(values, homes, strict=True)]

    def _finish_copies(self) -> None:
        """The host may read what the device has been asked to copy."""
        if torch.accelerator.is_available():
            torch.accelerator.synchronize()


def _home(value: Any, before: Tensor | None) -> Tensor | None:
    """The host's copy of a tensor on a device; None for what is the host's own."""
    if not isinstance(value, Tensor) or value.device.type == "cpu":
        return before if value is before else None
    if before is None or (before.shape, before.dtype) != (value.shape, value.dtype):
        before = torch.empty_like(value, device="cpu", pin_memory=torch.accelerator.is_available())
    return before.copy_(value, non_blocking=True)


def _local_bytes(parameter: Tensor) -> int:
    local = parameter.to_local() if isinstance(parameter, DTensor) else parameter
    return local.numel() * local.element_size()
