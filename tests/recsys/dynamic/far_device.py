"""A double of a GPU, on the CPU: its tensors cannot be read, only copied, and every copy is recorded."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_flatten, tree_map

FAR = torch.device("cuda", 0)
# They wait for a GPU: sizes or values that the host must know.
_WAITING = ("_local_scalar_dense", "nonzero", "_unique", "unique_", "masked_select", "item", "equal", "is_nonzero")


class FarTensor(Tensor):
    """What is on the double. It has no memory that ``numpy`` or ``tolist`` could read."""

    near: Tensor

    @staticmethod
    def __new__(cls, near: Tensor) -> FarTensor:
        made: FarTensor = Tensor._make_wrapper_subclass(
            cls, near.shape, strides=near.stride(), dtype=near.dtype, device=FAR
        )
        made.near = near
        return made

    @classmethod
    def __torch_dispatch__(  # type: ignore[override]  # as PyTorch documents it
        cls, function: Any, types: Any, args: Any = (), kwargs: Any = None
    ) -> Any:
        raise AssertionError(f"{function} was called on another thread or outside of `far`")


class Traffic(TorchDispatchMode):
    """Runs operations on the double, and records what crosses.

    Attributes:
        to_host: number of elements of each copy to the host.
        to_device: number of elements of each copy to the double.
    """

    def __init__(self) -> None:
        super().__init__()
        self.to_host: list[int] = []
        self.to_device: list[int] = []

    def __torch_dispatch__(self, function: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = dict(kwargs or {})
        name = function.overloadpacket.__name__
        # Memory of the host that a GPU can read.
        kwargs.pop("pin_memory", None)
        if name in ("_pin_memory", "is_pinned"):
            return args[0] if name == "_pin_memory" else False
        tensors = [one for one in tree_flatten((args, kwargs))[0] if isinstance(one, Tensor)]
        far = [one for one in tensors if isinstance(one, FarTensor)]
        target = torch.device(kwargs["device"]) if kwargs.get("device") is not None else None
        if target is not None and target.type == "cuda":
            kwargs["device"] = torch.device("cpu")
        if name == "copy_" and isinstance(args[0], FarTensor) != isinstance(args[1], FarTensor):
            (self.to_device if isinstance(args[0], FarTensor) else self.to_host).append(args[0].numel())
            assert kwargs.get("non_blocking") or (len(args) > 2 and args[2]), "a copy that waits"
            _near(args[0]).copy_(_near(args[1]))
            return args[0]
        if name == "_to_copy" and target is not None and (target.type == "cuda") != bool(far):
            (self.to_host if far else self.to_device).append(args[0].numel())
            assert kwargs.get("non_blocking"), "a copy that waits"
            return _wrap(function(*tree_map(_near, args), **kwargs), target.type == "cuda")
        if far:
            assert not name.startswith(_WAITING), f"{name} waits for the device"
            mixed = [one for one in tensors if not isinstance(one, FarTensor) and one.dim()]
            assert not mixed, f"{name} has tensors of two devices"
            assert not (name.startswith("index") and any(_is_mask(one) for one in tensors)), "a mask is an index"
        on_far = bool(far) if target is None else target.type == "cuda"
        found = function(*tree_map(_near, args), **kwargs)
        if name.endswith("_") and not name.endswith("__"):
            return args[0]
        return tree_map(lambda one: _wrap(one, on_far), found)


def _near(one: Any) -> Any:
    return one.near if isinstance(one, FarTensor) else one


def _wrap(one: Any, far: bool) -> Any:
    return FarTensor(one) if far and isinstance(one, Tensor) else one


def _is_mask(one: Tensor) -> bool:
    return one.dtype == torch.bool


class _Event:
    """Of work that has been done."""

    def record(self, *_: Any) -> None: ...

    def synchronize(self) -> None: ...


class _Stream:
    def record_event(self) -> _Event:
        return _Event()

    def wait_event(self, event: _Event) -> None: ...


@contextmanager
def far() -> Iterator[Traffic]:
    """The double is there, which a GPU must not be."""
    assert not torch.cuda.is_available()
    # As for fake tensors of a GPU that is not there: nothing is to be done when the device changes.
    torch._C._ensureCUDADeviceGuardSet()
    with pytest.MonkeyPatch.context() as patch, Traffic() as traffic:
        patch.setattr(torch.cuda, "_lazy_init", lambda: None)
        patch.setattr(torch.cuda, "Event", _Event)
        patch.setattr(torch.cuda, "current_stream", lambda *_: _Stream())
        patch.setattr(FarTensor, "record_stream", lambda *_: None, raising=False)
        yield traffic


def on_far(near: Tensor) -> FarTensor:
    """A tensor of the double."""
    return FarTensor(near.clone())
