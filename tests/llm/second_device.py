"""A second device, of which there is none on a machine without an accelerator: memory apart from the host's.

Its tensors say that they are on ``lazy:0``, a kind of device that no build has, and compute on the CPU. As on a real
one, an operation on tensors of both is an error, and what is alive there can be counted.
"""

from __future__ import annotations

import weakref
from typing import Any

import torch
from torch import Tensor
from torch.distributed.tensor import DTensor
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves, tree_map, tree_map_only

DEVICE = torch.device("lazy:0")


class TensorThere(Tensor):
    """Stands for memory of the second device; *values_there* are what it holds."""

    values_there: Tensor
    __torch_function__ = torch._C._disabled_torch_function_impl  # type: ignore[assignment]

    @staticmethod
    def __new__(cls, inner: Tensor) -> TensorThere:
        made: TensorThere = Tensor._make_wrapper_subclass(
            cls, inner.shape, dtype=inner.dtype, device=DEVICE, strides=inner.stride()
        )
        made.values_there = inner
        return made

    @classmethod
    def __torch_dispatch__(cls, func: Any, *_: Any) -> Any:
        raise RuntimeError(f"{func} on the second device, outside of it")


class SecondDevice(TorchDispatchMode):
    """Entered, it is there; ``.to("lazy:0")`` and ``.to("cpu")`` copy.

    Args:
        delays_copies: what is copied to the host with ``non_blocking=True`` is NaN there until :meth:`synchronize`. The
            device itself, which does one thing after the other, reads what it has been asked to copy.
    """

    def __init__(self, delays_copies: bool = False) -> None:
        super().__init__()
        self._delays_copies = delays_copies
        # By the storage that they go to: the host's memory, and what it will hold.
        self._under_way: dict[int, tuple[Tensor, Tensor]] = {}
        self._alive: dict[int, tuple[weakref.ref[Tensor], int]] = {}
        self.peak = 0

    @property
    def bytes(self) -> int:
        """Of the memory that is in use there."""
        return sum(size for storage, size in self._alive.values() if storage() is not None)

    def synchronize(self) -> None:
        """Wait until everything that was asked of the device is done."""
        under_way, self._under_way = self._under_way, {}
        for target, value in under_way.values():
            target.copy_(value)

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = dict(kwargs or {})
        if "pin_memory" in kwargs:
            kwargs["pin_memory"] = False  # of which there is none without an accelerator
        given = [value for value in tree_leaves((args, kwargs)) if isinstance(value, Tensor)]
        if any(isinstance(value, DTensor) for value in given):
            return NotImplemented  # it comes again, with what each rank has of them
        there = [value for value in given if isinstance(value, TensorThere)]
        here = [value for value in given if not isinstance(value, TensorThere) and value.dim()]
        if there and here and func is not torch.ops.aten.copy_.default:
            raise RuntimeError(f"{func} was given tensors on lazy:0 and on cpu")
        target = kwargs.get("device")
        goes_there = bool(there) if target is None else torch.device(target).type == DEVICE.type
        if target is not None:
            kwargs["device"] = torch.device("cpu")
        inner_args, inner_kwargs = tree_map(_inner, (args, kwargs))
        if self._delays_copies:
            if not there and goes_there:
                inner_args = tree_map_only(Tensor, self._on_device, inner_args)
            elif func is torch.ops.aten.copy_.default and len(there) == 1 and (args[2:] or kwargs.get("non_blocking")):
                return self._copy_later(args[0], inner_args[1])
        result = func(*inner_args, **inner_kwargs)
        if func is torch.ops.aten.copy_.default:
            return args[0]
        known = {id(value.values_there): value for value in there}
        if not goes_there:
            return result
        return tree_map_only(Tensor, lambda value: known[id(value)] if id(value) in known else self._put(value), result)

    def _copy_later(self, target: Tensor, value: Tensor) -> Tensor:
        assert not isinstance(target, TensorThere)
        self._under_way[target.data_ptr()] = target, value.clone()
        return target.fill_(float("nan"))

    def _on_device(self, value: Tensor) -> Tensor:
        return self._under_way[value.data_ptr()][1] if value.data_ptr() in self._under_way else value

    def _put(self, inner: Tensor) -> TensorThere:
        storage = inner.untyped_storage()
        self._alive[storage._cdata] = (weakref.ref(inner), storage.nbytes())
        self.peak = max(self.peak, self.bytes)
        return TensorThere(inner)


def _inner(value: Any) -> Any:
    return value.values_there if isinstance(value, TensorThere) else value
