"""Constructors for the tensors in a pickle of ``torch.save``: views of storages with checked sizes and strides.

Sparse, quantised and nested tensors are refused, because no checkpoint of this project holds them.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from lightning_pipe.checkpoints.inert_values import Call, _Refused, described, whole_size

# Maximum size in bytes of a tensor that is larger than its storage. Expanded tensors are.
_EXPANDED = 2**20
_STORAGES = {
    **dict.fromkeys(("UntypedStorage", "ByteStorage"), torch.uint8),
    **{"DoubleStorage": torch.float64, "FloatStorage": torch.float32, "HalfStorage": torch.float16},
    **{"LongStorage": torch.int64, "IntStorage": torch.int32, "ShortStorage": torch.int16, "CharStorage": torch.int8},
    **{"BFloat16Storage": torch.bfloat16, "BoolStorage": torch.bool},
    **{"ComplexFloatStorage": torch.complex64, "ComplexDoubleStorage": torch.complex128},
}
DTYPES: dict[str, torch.dtype] = {
    f"torch.{name}": value
    for name in (
        *("float64", "float32", "float16", "bfloat16", "complex64", "complex128", "complex32"),
        *("float8_e4m3fn", "float8_e5m2", "float8_e4m3fnuz", "float8_e5m2fnuz", "float8_e8m0fnu"),
        *("int64", "int32", "int16", "int8", "uint64", "uint32", "uint16", "uint8", "bool"),
    )
    if isinstance(value := getattr(torch, name, None), torch.dtype)
}


class InertStorage:
    """Bytes of a file with the dtype that a pickle gives them."""

    def __init__(self, dtype: torch.dtype, content: torch.UntypedStorage) -> None:
        self.dtype, self.content = dtype, content


def _tensor(
    storage: Any, offset: Any, size: Any, stride: Any, requires_grad: Any, hooks: Any, metadata: Any = None
) -> Tensor:
    """Checked version of ``torch._utils._rebuild_tensor_v2``."""
    if type(storage) is not InertStorage:
        raise _Refused(f"a tensor is made of {described(storage)}, expected a storage")
    return _view(storage.content, storage.dtype, offset, size, stride, requires_grad, hooks, metadata)


def _tensor_of_dtype(
    storage: Any, offset: Any, size: Any, stride: Any, requires_grad: Any, hooks: Any, dtype: Any, metadata: Any = None
) -> Tensor:
    """Checked version of ``torch._utils._rebuild_tensor_v3``."""
    if type(storage) is not InertStorage or dtype not in DTYPES.values() or dtype is torch.bool:
        raise _Refused(f"a tensor of {described(dtype)} is made of {described(storage)}, expected a storage")
    return _view(storage.content, dtype, offset, size, stride, requires_grad, hooks, metadata)


def _view(
    content: torch.UntypedStorage,
    dtype: torch.dtype,
    offset: Any,
    size: Any,
    stride: Any,
    requires_grad: Any,
    hooks: Any,
    metadata: Any,
) -> Tensor:
    size, stride = whole_size("a tensor's size", size), _strides(stride)
    if type(offset) is not int or not 0 <= offset < 2**48 or len(size) != len(stride):
        raise _Refused(f"a tensor of size {size} has the stride {stride} and the offset {described(offset)}")
    if type(requires_grad) is not bool or hooks or type(metadata) not in (dict, type(None)):
        raise _Refused("a tensor has hooks, a requires_grad that is not a bool, or metadata that is not a dict")
    bytes_there, count = content.nbytes(), math.prod(size)
    needed = offset + 1 + sum((one - 1) * step for one, step in zip(size, stride, strict=True)) if count else 0
    if needed * dtype.itemsize > bytes_there:
        raise _Refused(
            f"a tensor of size {size}, stride {stride} and offset {offset} needs {needed} elements of {dtype}, got a"
            f" storage of {bytes_there} bytes"
        )
    if count * dtype.itemsize > max(bytes_there, _EXPANDED):
        raise _Refused(
            f"a tensor of size {size} is expanded from a storage of {bytes_there} bytes, expected a larger storage"
        )
    flags = {key for key, value in (metadata or {}).items() if value}
    if flags - {"conj"}:
        raise _Refused(f"a tensor has the flag {described(min(map(str, flags)))}, expected conj or none")
    made: Tensor = torch.empty(0, dtype=dtype, device="cpu")
    made.set_(content, offset if count else 0, size, stride)
    if flags:
        made = made.conj()
    return made.requires_grad_() if requires_grad else made


def _strides(value: Any) -> tuple[int, ...]:
    if type(value) is not tuple or not all(type(one) is int and 0 <= one < 2**48 for one in value):
        raise _Refused(f"a tensor's stride is {described(value)}, expected a tuple of integers of at least 0")
    return value


def _parameter(data: Any, requires_grad: Any, hooks: Any) -> Tensor:
    """Checked version of ``torch._utils._rebuild_parameter``."""
    if type(data) is not Tensor or type(requires_grad) is not bool or hooks:
        raise _Refused(f"a parameter is made of {described(data)}, expected a tensor without hooks")
    return torch.nn.Parameter(data.detach(), requires_grad)


def _parameter_with_state(data: Any, requires_grad: Any, hooks: Any, state: Any) -> Tensor:
    return _with_attributes(_parameter(data, requires_grad, hooks), state)


def _of_type(function: Any, kind: Any, args: Any, state: Any) -> Any:
    """Checked version of ``torch._tensor._rebuild_from_type_v2``, which makes a tensor with attributes."""
    if type(function) is not Call or type(args) is not tuple:
        raise _Refused(f"a tensor is made by {described(function)}, expected one of torch's functions")
    tensor = function.make(*args)
    if not isinstance(tensor, Tensor):
        raise _Refused(f"a tensor is made by {function.name}, expected one of torch's functions that make tensors")
    if isinstance(kind, type) and issubclass(kind, Tensor):  # a class that the user allows
        tensor = tensor.as_subclass(kind)
    elif type(kind) is not Call or kind.name not in _TENSOR_KINDS:
        raise _Refused(f"a tensor is of the class {described(kind)}, expected torch.Tensor")
    return _with_attributes(tensor, state)


def _with_attributes(tensor: Tensor, state: Any) -> Tensor:
    if type(state) is tuple and len(state) == 2 and not state[1]:
        state = state[0]
    for name, value in (state or {}).items():
        if type(name) is not str or hasattr(torch.nn.Parameter, name):
            raise _Refused(
                f"a tensor has the attribute {described(name)}, which would hide an attribute of torch.nn.Parameter"
            )
        if name.startswith("__"):  # for example, NumPy reads memory at the address in __array_interface__
            raise _Refused(f"a tensor has the attribute {described(name)}, expected no name that begins with '__'")
        setattr(tensor, name, value)
    return tensor


def _token(name: str) -> Call:
    """Entry for a class that a pickle refers to but does not instantiate."""

    def make(*args: Any) -> Any:
        raise _Refused(f"it makes a {name} of {len(args)} values, expected one made of a storage")

    return Call(name, make)


STORAGE_KINDS = {
    f"{module}.{name}": dtype for name, dtype in _STORAGES.items() for module in ("torch", "torch.storage")
}
_TENSOR_KINDS = ("torch.Tensor", "torch._tensor.Tensor", "torch.nn.parameter.Parameter")
_MAKERS: dict[str, Callable[..., Any]] = {
    "torch._utils._rebuild_tensor_v2": _tensor,
    "torch._utils._rebuild_tensor_v3": _tensor_of_dtype,
    "torch._utils._rebuild_parameter": _parameter,
    "torch._utils._rebuild_parameter_with_state": _parameter_with_state,
    "torch._tensor._rebuild_from_type_v2": _of_type,
}
# Functions that make tensors, by their full names.
TENSOR_CALLS = {name: Call(name, make) for name, make in _MAKERS.items()}
# Classes of tensors and storages, by their full names.
TOKENS = {name: _token(name) for name in (*_TENSOR_KINDS, *STORAGE_KINDS)}
