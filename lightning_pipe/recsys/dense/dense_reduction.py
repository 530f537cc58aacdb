"""Average of dense gradients over ranks, started during backward and waited for on request.

DistributedDataParallel waits inside backward. Here the wait is a separate call, so that the tables' backward can
overlap with the reduction.

    backward         gradients arrive, last layers first                layer 3   layer 2   layer 1   layer 0
    hooks        1.  a bucket with all its gradients is filled          [-- bucket 0 --]    [-- bucket 1 --]
                 2.  and launched, after all earlier buckets            all-reduce ......   all-reduce ......
    finalize     3.  the remaining buckets are launched; parameters without a gradient send zeros
                 4.  each bucket is waited for, and its averages are copied to `.grad`

Parameters are divided into buckets in reverse order, and every rank launches the buckets in that order, independent of
the order in which gradients arrive. Collectives therefore match between ranks, and sums do not depend on timing.
"""

from __future__ import annotations

import threading
from collections import Counter
from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager
from functools import partial
from typing import Any

import torch
import torch.distributed as dist
from torch.nn import Parameter
from torch.utils.hooks import RemovableHandle

from lightning_pipe.engine.common.errors import SetupError
from lightning_pipe.engine.ranks.agreement import check_agreement
from lightning_pipe.engine.runtime.devices import current_stream


class DenseGradientReducer:
    """Averages the gradients of parameters over the ranks of a process group.

    A step is ``prepare_for_backward()``, one backward and ``finalize()``, on every rank. A parameter that a rank
    does not use counts as zero on that rank; a parameter that no rank uses keeps ``grad`` None. Gradients
    accumulated before the backward are averaged together with the new ones, as one sum. Sparse gradients are
    averaged as dense ones. A group of one rank adds no hooks, copies or collectives.

    Frozen parameters are excluded. Parameters may be frozen and unfrozen between steps, in the same way on all ranks.
    """

    def __init__(
        self,
        parameters: Sequence[tuple[str, Parameter]],
        group: dist.ProcessGroup,
        bucket_bytes: int = 25 * 2**20,
    ) -> None:
        self._parameters = list(parameters) if group.size() > 1 else []
        self._group = group
        self._bucket_bytes = bucket_bytes
        # None instead of an empty list, so that the ranks compare their parameters at least once.
        self._trained: list[str] | None = None
        self._buckets: list[_Bucket] = []
        self._hooks: list[RemovableHandle] = []
        # Autograd calls hooks on one thread per device.
        self._lock = threading.Lock()
        self._sync = True
        self._armed = False
        self._launched = 0
        self._pending_works: list[dist.Work] = []
        self._follow_requires_grad()

    def prepare_for_backward(self) -> None:
        """Prepare for a backward, during which full buckets are launched.

        If an earlier backward raised, its reductions are finished first, as by :meth:`reset`.
        """
        self.finish_failed_backward()
        pending_works, self._pending_works = self._pending_works, []
        for work in pending_works:
            work.wait()
        if self._sync:
            self._follow_requires_grad()
            self._armed = True

    def finalize(self) -> None:
        """Wait for all averages and copy them to ``.grad``. No effect inside :meth:`no_sync`."""
        if not (self._armed or self._sync):
            return
        try:
            self._launch_rest()
            for bucket in self._buckets:
                bucket.finish()
        finally:
            self._disarm()

    def mark_gradients_ready(self, parameters: Iterable[Parameter]) -> None:
        """Instead of a backward after :meth:`prepare_for_backward`, take existing gradients as its results."""
        if not (self._armed and self._sync):
            return
        ready_ids = {id(parameter) for parameter in parameters if parameter.grad is not None}
        for bucket in self._buckets:
            bucket.missing.difference_update(
                [name for name, parameter in bucket.parameters if id(parameter) in ready_ids]
            )
        self._launch_full()

    def discard_averaged_gradients(self) -> None:
        """Replace :meth:`finalize`: leave ``.grad`` unchanged, and wait only when the next step begins."""
        if not self._armed:
            return
        self._launch_rest()
        self._pending_works = [bucket.work for bucket in self._buckets if bucket.work is not None]
        self._disarm()

    def finish_failed_backward(self) -> None:
        """Replace :meth:`finalize` after a backward that raised: leave ``.grad`` of this rank unchanged.

        Buckets that were not launched are sent with their current contents. Every rank calls ``reset`` or ``finalize``,
        so no rank waits for a collective that another rank does not join.
        """
        if not self._armed:
            return
        try:
            self._launch_rest()
            for bucket in self._buckets:
                bucket.wait()
        finally:
            self._disarm()

    @contextmanager
    def no_sync(self) -> Iterator[None]:
        """Context in which gradients accumulate on this rank; the next step outside it averages the accumulated sum."""
        previous, self._sync = self._sync, False
        try:
            yield
        finally:
            self._sync = previous

    def close(self) -> None:
        """Remove all hooks and drop the parameters, without waiting. Further calls have no effect."""
        self._parameters = []
        self._forget_buckets()
        self._disarm()

    # ------------------------------------------------------------------ buckets

    def _follow_requires_grad(self) -> None:
        """Rebuild the buckets if the set of trained parameters has changed since the last step."""
        parameters = [(name, parameter) for name, parameter in self._parameters if parameter.requires_grad]
        names = [name for name, _ in parameters]
        if names == self._trained:
            return
        description = [(name, f"{list(parameter.shape)} {parameter.dtype}") for name, parameter in parameters]
        check_agreement(description, "list of trained dense parameters", self._group, error_class=SetupError)
        self._forget_buckets()
        self._trained = names
        parts = _split_into_buckets(parameters, self._bucket_bytes)
        self._buckets = [_Bucket(part, self._group) for part in parts]
        for bucket in self._buckets:
            for name, parameter in bucket.parameters:
                hook = partial(self._mark_gradient_arrived, bucket, name)
                self._hooks.append(parameter.register_post_accumulate_grad_hook(hook))

    def _forget_buckets(self) -> None:
        for hook in self._hooks:
            hook.remove()
        self._hooks, self._buckets, self._trained = [], [], []

    # ------------------------------------------------------------------ one step

    def _mark_gradient_arrived(self, bucket: _Bucket, name: str, parameter: torch.Tensor) -> None:
        """Mark a gradient as arrived and launch full buckets."""
        if not self._armed:
            return
        with self._lock:
            if bucket.launched:
                raise SetupError(
                    f"parameter {name!r} got a gradient again after it was sent to the other ranks: backward ran twice"
                    " in one step, or the parameter is used in several reentrant activation checkpoints. Call backward"
                    " once, on the sum of the losses, or run all but the last backward in no_sync() (the strategy's"
                    " block_backward_sync()), and use activation checkpoints with use_reentrant=False"
                )
            if self._sync:
                bucket.arrived(name)
                self._launch_full()

    def _launch_full(self) -> None:
        while self._launched < len(self._buckets) and not self._buckets[self._launched].missing:
            self._launch_next()

    def _launch_rest(self) -> None:
        while self._launched < len(self._buckets):
            self._launch_next()

    def _launch_next(self) -> None:
        self._buckets[self._launched].launch()
        self._launched += 1

    def _disarm(self) -> None:
        self._armed = False
        self._launched = 0
        for bucket in self._buckets:
            bucket.clear()


class _Bucket:
    """Gradients that are reduced together in one flat buffer: the gradients, then a flag for each parameter.

    A flag is 1 if this rank has a gradient, otherwise 0. The sum over ranks is 0 if no rank has one.
    """

    def __init__(self, parameters: list[tuple[str, Parameter]], group: dist.ProcessGroup) -> None:
        self.parameters = parameters
        self._group = group
        _, first = parameters[0]
        sizes = [parameter.numel() for _, parameter in parameters]
        self._buffer = torch.zeros(sum(sizes) + len(sizes), dtype=first.dtype, device=first.device)
        *views, self._flags = self._buffer.split([*sizes, len(sizes)])
        self._views = [view.view(parameter.shape) for view, (_, parameter) in zip(views, parameters, strict=True)]
        self._have: list[bool] = []
        self._device = first.device if first.is_cuda else None
        # Streams that gradients of this step have arrived on: autograd runs a hook on a stream of the forward.
        self._streams: set[Any] = set()
        self.work: dist.Work | None = None  # the all-reduce
        self.missing: set[str] = set()  # parameters whose gradient has not arrived in this step
        self.clear()

    @property
    def launched(self) -> bool:
        return self.work is not None

    def clear(self) -> None:
        """Reset for the next step."""
        self.work = None
        self.missing = {name for name, _ in self.parameters}
        self._streams.clear()

    def arrived(self, name: str) -> None:
        """Mark a gradient as arrived on the current stream."""
        self.missing.discard(name)
        if self._device is not None:
            self._streams.add(current_stream(self._device))

    @torch.no_grad()
    def launch(self) -> None:
        """Start the all-reduce of the current gradients, with zeros for missing ones."""
        if self._device is not None:
            stream = current_stream(self._device)
            for producer in self._streams - {stream}:
                stream.wait_stream(producer)
        self._have = [parameter.grad is not None for _, parameter in self.parameters]
        for (_, parameter), view in zip(self.parameters, self._views, strict=True):
            if parameter.grad is None:
                view.zero_()
            else:
                view.copy_(parameter.grad.to_dense())
        if all(self._have):
            self._flags.fill_(1)
        else:
            self._flags.copy_(torch.tensor(self._have, dtype=self._flags.dtype))
        self.work = dist.all_reduce(self._buffer, group=self._group, async_op=True)

    def wait(self) -> None:
        if self.work is not None:
            self.work.wait()

    @torch.no_grad()
    def finish(self) -> None:
        """Wait, and copy the averages to ``.grad``."""
        self.wait()
        self._buffer.div_(self._group.size())
        # Reading the flags from a GPU makes the host wait, which a step with all gradients does without.
        have = self._have if all(self._have) else self._flags.tolist()
        for (_, parameter), view, has in zip(self.parameters, self._views, have, strict=True):
            if has:
                if parameter.grad is None or parameter.grad.layout != torch.strided:
                    parameter.grad = torch.empty_like(parameter)
                parameter.grad.copy_(view)


def _split_into_buckets(
    parameters: list[tuple[str, Parameter]], bucket_bytes: int
) -> list[list[tuple[str, Parameter]]]:
    """Divide parameters into buckets, in reverse order: roughly the order in which backward produces gradients."""
    full = []
    filling: dict[tuple[torch.dtype, torch.device], list[tuple[str, Parameter]]] = {}
    filled = Counter[tuple[torch.dtype, torch.device]]()
    for name, parameter in reversed(parameters):
        kind = (parameter.dtype, parameter.device)
        filling.setdefault(kind, []).append((name, parameter))
        filled[kind] += parameter.nbytes
        if filled[kind] >= bucket_bytes:
            full.append(filling.pop(kind))
            filled[kind] = 0
    return full + list(filling.values())
