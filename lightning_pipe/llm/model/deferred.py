"""A model built without memory, of which each rank materialises its own parts with bit-identical initial values.

No rank holds the whole model, and initial values do not depend on the rank that holds a part. Inside `deferred_init`,
constructors run on fake tensors and an `OpRecord` records them. `DeferredInit.materialise` replays the record, in its
order and from its random state, for the requested parameters and buffers.
"""

from __future__ import annotations

import contextlib
import copy
import warnings
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor, nn
from torch._ops import OpOverload
from torch._subclasses.fake_tensor import (
    DynamicOutputShapeException,
    FakeTensor,
    FakeTensorMode,
    UnsupportedOperatorException,
    unset_fake_temporarily,
)
from torch.utils.weak import WeakIdKeyDictionary

from lightning_pipe._compat.torch import (
    TorchDispatchMode,
    dispatch_modes_disabled,
    is_traceable_wrapper_subclass,
    schema_of,
    tree_flatten,
    tree_leaves,
    tree_map,
    tree_map_only,
    tree_unflatten,
)
from lightning_pipe.engine import SetupError
from lightning_pipe.llm.model.op_record import OpRecord, View

_CPU = torch.device("cpu")


class DeferredInit:
    """Record of a model's construction, made by `deferred_init`."""

    def __init__(self) -> None:
        self._record = OpRecord()
        self._fakes = _Fakes(self._record)
        self._made = WeakIdKeyDictionary()  # tensors that `materialise` has put into models

    def materialise(self, model: nn.Module, keep: Callable[[str], bool], device: torch.device = _CPU) -> None:
        """Give the kept parameters and buffers of `model` the values that ordinary construction would have given.

        They are replaced by new tensors, one for a tensor with several names. Attributes, `requires_grad` and the type
        (parameter or not) are preserved. Tensors in plain attributes of modules (also inside lists, tuples and dicts)
        are included, under the attribute's name. Other tensors stay without memory, and can be kept in a later call.
        Real tensors made outside are not changed. Afterwards the random states of the CPU and of every generator used
        are those that ordinary construction would have left, whichever tensors are kept.

        Memory at any time holds the tensors kept so far and the tensors of the running operation.
        """
        if not self._fakes.closed:
            raise SetupError("materialise() was called inside deferred_init(). Call it after the block has ended")
        places = list(_places(model).values())
        kept = [place for place in places if any(keep(name) for name in place.names)]
        self._check(places, kept)
        kept = [place for place in kept if isinstance(place.tensor, FakeTensor)]
        views = [self._record.view(place.tensor) for place in kept]
        storages = self._record.replay({view.storage for view in views}, device)
        made: dict[int, Tensor] = {}
        for place, view in zip(kept, views, strict=True):
            tensor = made[id(place.tensor)] = like_tensor(place.tensor, view.of(storages[view.storage]))
            self._made[tensor] = None
        _replace(model, made)

    def _check(self, places: list[_Place], kept: list[_Place]) -> None:
        twice = [place.names[0] for place in kept if place.tensor in self._made]
        if twice:
            raise SetupError(f"{_some(twice)} would be materialised twice, expected once. Leave out these names")
        wanted = set(kept)
        needed = [place for place in places if place.registered or place in wanted]
        unknown = [
            place.names[0]
            for place in needed
            if isinstance(place.tensor, FakeTensor)
            and (place.tensor.fake_mode is not self._fakes or self._record.number(place.tensor) is None)
        ]
        if unknown:
            raise SetupError(
                f"{_some(unknown)} have no values and were not made in this deferred_init(). Build the model inside it,"
                " and convert or copy the model after materialise()"
            )
        hooked = [
            place.names[0]
            for place in kept
            if isinstance(place.tensor, FakeTensor)
            and (place.tensor._backward_hooks or getattr(place.tensor, "_post_accumulate_grad_hooks", None))
        ]
        if hooked:
            raise SetupError(f"{_some(hooked)} have hooks, which would be lost. Add the hooks after materialise()")


def tensors_are_fake() -> bool:
    """Return True if new tensors take no memory: inside `deferred_init`, or under another FakeTensorMode."""
    return torch._C._get_dispatch_mode(torch._C._TorchDispatchModeKey.FAKE) is not None


@contextlib.contextmanager
def deferred_init() -> Iterator[DeferredInit]:
    """Build a model without memory inside this context, and record its construction.

    Ordinary constructors and initialisers work on the CPU, including those that copy modules, tie or overwrite
    parameters, seed or fork the CPU's generator, or use other generators. If a value is needed (by `item()`,
    `tolist()`, a condition or a data-dependent shape), the operations that it depends on run immediately, and again
    each time a value is needed. For `nn.init.trunc_normal_`, which repeats until no number is out of bounds, this takes
    the memory of one tensor. Python's and NumPy's generators draw as usual inside the block, and their numbers are part
    of the record.

    After the block the model's tensors are fake: shape, dtype, `requires_grad` and ties are known, values are not. They
    must not be written to before `DeferredInit.materialise`. Until then the random state is the state before the block,
    so a second block entered in between would start from the same state.

    The method comes from torchdistx's `deferred_init`. Unlike there, values do not depend on which tensors are
    materialised.
    """
    if tensors_are_fake():
        raise SetupError(
            "deferred_init() was entered inside another deferred_init() or FakeTensorMode. Build the model in one block"
        )
    deferred = DeferredInit()
    with warnings.catch_warnings(), contextlib.ExitStack() as stack:
        # copy.deepcopy of a module reads the address of each tensor. Fake tensors have none and warn.
        warnings.filterwarnings("ignore", message="Accessing the data pointer of FakeTensor")
        stack.callback(deferred._fakes.close)
        stack.enter_context(deferred._fakes)
        stack.enter_context(_Recorder(deferred._record, deferred._fakes))
        yield deferred


def is_deferred(model: nn.Module) -> bool:
    """Return True if a parameter or buffer of `model` has no values: built in `deferred_init`, or a `fake_copy`."""
    return any(isinstance(tensor, FakeTensor) for tensor in [*model.parameters(), *model.buffers()])


def fake_copy(model: nn.Module) -> tuple[nn.Module, FakeTensorMode]:
    """Return a deep copy of `model`, real or deferred, whose tensors take no memory, and the mode to run it under.

    Inputs must be created under the mode, or with its `from_tensor`. Tensors keep shape, strides, dtype, device and
    ties, but views of each other become independent tensors.
    """
    mode = FakeTensorMode()
    memo: dict[int, Any] = {}
    for place in _places(model).values():
        tensor = place.tensor
        with mode:
            bare = torch.empty_strided(tensor.size(), tensor.stride(), dtype=tensor.dtype, device=tensor.device)
        memo[id(tensor)] = like_tensor(tensor, bare)
    return copy.deepcopy(model, memo), mode


class _Fakes(FakeTensorMode):
    """Mode of the tensors of a record. After `close`, these tensors must not be written to."""

    def __init__(self, record: OpRecord) -> None:
        super().__init__(allow_fallback_kernels=False)  # fallback kernels compute with zeros instead of values
        self._record = record
        self.closed = False

    def __deepcopy__(self, memo: dict[int, Any]) -> _Fakes:
        return self  # a copy of a tensor belongs to the same mode

    def close(self) -> None:
        self._record.close()
        self.closed = True

    def dispatch(self, func: OpOverload, types: Any, args: Any = (), kwargs: Any = None) -> object:
        if self.closed and torch.Tag.inplace_view not in func.tags:
            for tensor in _written(func, args, kwargs or {}):
                if isinstance(tensor, FakeTensor) and self._record.number(tensor) is not None:
                    raise SetupError(
                        f"{func} writes to a tensor of shape {tuple(tensor.shape)} that was built in deferred_init()"
                        " and has no values yet. Write inside the block, or after materialise()"
                    )
        outputs = super().dispatch(func, types, args, kwargs or {})
        # Module.to() swaps a fake parameter with its conversion, and rejects parameters with weak references.
        self.fake_tensor_converter.meta_converter.tensor_memo.clear()
        return outputs


class _Recorder(TorchDispatchMode):
    """Mode that records every operation before the fake mode runs it."""

    def __init__(self, record: OpRecord, fakes: _Fakes) -> None:
        super().__init__()
        self._record = record
        self._fakes = fakes

    def __torch_dispatch__(self, func: OpOverload, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        given, structure = tree_flatten((args, kwargs or {}))
        self._check(func, args, kwargs or {}, given)
        flat = [self._fake(value) if isinstance(value, Tensor) else value for value in given]
        views = [self._record.view(value) if isinstance(value, Tensor) else value for value in flat]
        if torch.Tag.data_dependent_output in func.tags:
            return self._read(func, tree_unflatten(views, structure))
        if func is torch.ops.aten.lift_fresh.default and flat[0] is not given[0]:
            # From torch.tensor(...). Each replay needs new memory, since the tensor may be written to.
            func = torch.ops.aten.clone.default
        track = self._record.before_random(func, flat)
        fake_args, fake_kwargs = tree_unflatten(flat, structure)
        try:
            outputs = func(*fake_args, **fake_kwargs)
        except (DynamicOutputShapeException, UnsupportedOperatorException) as error:
            if track is not None or schema_of(func).is_mutable:
                raise SetupError(
                    f"{func} cannot run inside deferred_init(): it draws random numbers or writes to a tensor, and the"
                    " shape of its result depends on values, which tensors do not have there. Build this part before"
                    " deferred_init() and use it inside. Real tensors are not changed"
                ) from error
            outputs = tree_map_only(Tensor, self._fakes.from_tensor, self._read(func, tree_unflatten(views, structure)))
        tensors = [value for value in flat if isinstance(value, Tensor)]
        self._record.add(func, tree_unflatten(views, structure), tensors, outputs, track)
        return outputs

    def _check(self, func: OpOverload, args: Any, kwargs: Any, given: list[Any]) -> None:
        for value in given:
            if isinstance(value, torch.device) and value.type != "cpu":
                raise SetupError(
                    f"{func} uses the device {value} inside deferred_init(); expected the CPU. Pass the model's device"
                    " to materialise() instead"
                )
            if isinstance(value, FakeTensor) and value.fake_mode is not self._fakes:
                raise SetupError(
                    f"{func} uses a tensor of another deferred_init() or fake mode, expected one of this block."
                    " Materialise the tensor first"
                )
            if isinstance(value, Tensor) and (
                value.layout is not torch.strided or value.is_quantized or is_traceable_wrapper_subclass(value)
            ):
                raise SetupError(
                    f"{func} uses a {type(value).__name__} of layout {value.layout} inside deferred_init();"
                    " expected plain dense tensors. Make a dense tensor before deferred_init() instead"
                )
            if isinstance(value, FakeTensor) and self._record.number(value) is None:
                raise SetupError(
                    f"{func} uses a tensor of shape {tuple(value.shape)} whose origin is unknown, such as a result of"
                    " torch.load inside deferred_init(). Load or make it before the block, and use it inside"
                )
        for tensor in _written(func, args, kwargs):
            if not isinstance(tensor, FakeTensor) or self._record.is_outside(self._record.view(tensor).storage):
                raise SetupError(
                    f"{func} inside deferred_init() writes to a real tensor of shape {tuple(tensor.shape)} that was"
                    " made outside. Call clone() on it inside, and write to the clone"
                )

    def _fake(self, tensor: Tensor) -> Tensor:
        if isinstance(tensor, FakeTensor):
            return tensor
        with dispatch_modes_disabled():
            bare = tensor.detach()
        fake = self._fakes.from_tensor(bare)
        self._record.add_outside(fake, tensor)
        return fake

    def _read(self, func: OpOverload, arguments: Any) -> Any:
        """Run `func` on real tensors, for results that are values (as of `item()`) or have value-dependent shapes."""
        views = [leaf for leaf in tree_leaves(arguments) if isinstance(leaf, View)]
        values = self._record.values(views)
        args, kwargs = tree_map_only(View, lambda view: values[views.index(view)], arguments)
        with unset_fake_temporarily():
            return func(*args, **kwargs)


@dataclass(eq=False)
class _Place:
    """Tensor of a model, with all its names. `registered` is True if it is a parameter or buffer under any name."""

    tensor: Tensor
    names: list[str] = field(default_factory=list)
    registered: bool = False


def _places(model: nn.Module) -> dict[int, _Place]:
    """Return the tensors of `model` by id, in the model's order."""
    places: dict[int, _Place] = {}
    for prefix, module in model.named_modules(remove_duplicate=False):
        registered = [*module._parameters.items(), *module._buffers.items()]
        for key, value in [*registered, *_attributes(module).items()]:
            for tensor in tree_leaves(value):
                if isinstance(tensor, Tensor):
                    place = places.setdefault(id(tensor), _Place(tensor))
                    place.names.append(f"{prefix}.{key}" if prefix else key)
                    place.registered |= key in module._parameters or key in module._buffers
    return places


def _attributes(module: nn.Module) -> dict[str, Any]:
    """Return the attributes of `module` other than parameters, buffers and modules."""
    return {key: value for key, value in vars(module).items() if key not in ("_parameters", "_buffers", "_modules")}


def _replace(model: nn.Module, made: dict[int, Tensor]) -> None:
    """Replace tensors of `model`. `made` maps ids of old tensors to new tensors."""
    for module in model.modules():
        for registered in (module._parameters, module._buffers):
            for key, tensor in registered.items():
                registered[key] = made.get(id(tensor), tensor)  # type: ignore[assignment]
        for key, value in _attributes(module).items():
            if any(id(leaf) in made for leaf in tree_leaves(value)):
                vars(module)[key] = tree_map(lambda leaf: made.get(id(leaf), leaf), value)


def like_tensor(tensor: Tensor, bare: Tensor) -> Tensor:
    """Return `bare` with the type (parameter or not), `requires_grad` and attributes of `tensor`."""
    if isinstance(tensor, nn.Parameter):
        result: Tensor = nn.Parameter(bare, requires_grad=tensor.requires_grad)
    else:
        result = bare.requires_grad_(tensor.requires_grad and tensor.is_leaf)
    own = {*vars(tensor.detach()), "_is_param"} if isinstance(tensor, FakeTensor) else ()
    for key, value in vars(tensor).items():
        if key not in own:
            setattr(result, key, value)
    return result


def _written(func: OpOverload, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Iterator[Tensor]:
    """Yield the tensors that a call writes to."""
    for position, argument in enumerate(schema_of(func).arguments):
        if argument.alias_info is not None and argument.alias_info.is_write:
            value = args[position] if position < len(args) else kwargs.get(argument.name)
            yield from (leaf for leaf in tree_leaves(value) if isinstance(leaf, Tensor))


def _some(names: list[str]) -> str:
    return ", ".join(names[:3]) + (f" and {len(names) - 3} more" if len(names) > 3 else "")
