"""Skip connections: one layer of a Sequential stashes a value, and a later layer pops it.

A layer with skips is a decorated class whose ``forward`` is a generator::

    @skippable(stash=["features"])
    class Down(nn.Module):
        def forward(self, x):
            yield stash("features", x)
            return self.layer(x)

    @skippable(pop=["features"])
    class Up(nn.Module):
        def forward(self, x):
            features = yield pop("features")
            return self.layer(torch.cat([x, features], dim=1))

The same layers work in a plain ``nn.Sequential``. The notation is that of torchgpipe.
"""

from __future__ import annotations

import inspect
import threading
import uuid
from collections.abc import Callable, Generator, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from functools import wraps
from typing import Any, NamedTuple, TypeVar

from torch import nn

from lightning_pipe.engine import SetupError

T = TypeVar("T", bound=nn.Module)


class Namespace:
    """Scope of skip names, so that two parts of a model can use the same names.

    A namespace equals its copies, so that the skips of separately copied layers still match.
    """

    def __init__(self) -> None:
        self._id = uuid.uuid4()

    def __eq__(self, other: object) -> bool:
        return isinstance(other, Namespace) and self._id == other._id

    def __hash__(self) -> int:
        return hash(self._id)


class SkipKey(NamedTuple):
    """One skip connection."""

    namespace: Namespace | None
    name: str

    def __repr__(self) -> str:
        return repr(self.name)


class stash:
    """Request of a generator, ``yield stash(name, value)``, to store a value for a later layer."""

    __slots__ = ("name", "value")

    def __init__(self, name: str, value: Any) -> None:
        self.name, self.value = name, value


class pop:
    """Request of a generator, ``value = yield pop(name)``, to remove and return the value of an earlier layer."""

    __slots__ = ("name",)

    def __init__(self, name: str) -> None:
        self.name = name


class Skips:
    """Values that were stashed and not popped yet."""

    def __init__(self, values: Mapping[SkipKey, Any] | None = None) -> None:
        self.values: dict[SkipKey, Any] = dict(values or {})

    def stash(self, key: SkipKey, value: Any) -> None:
        """Store *value* until :meth:`pop`."""
        self.values[key] = value

    def pop(self, key: SkipKey) -> Any:
        """Remove and return the value."""
        if key not in self.values:
            raise SetupError(f"the skip {key} is popped but was not stashed. Stash it in an earlier layer")
        return self.values.pop(key)


class _CurrentSkips(threading.local):
    """Skips of each thread."""

    def __init__(self) -> None:
        self.skips = Skips()  # used outside of a pipe


_current = _CurrentSkips()


@contextmanager
def set_current_skips(skips: Skips) -> Iterator[None]:
    """Context in which layers of this thread use *skips*."""
    before, _current.skips = _current.skips, skips
    try:
        yield
    finally:
        _current.skips = before


def skippable(stash: Iterable[str] = (), pop: Iterable[str] = ()) -> Callable[[type[T]], type[T]]:
    """Declare the skips that a layer's generator stashes and pops in every forward.

    Args:
        stash: names for which ``forward`` yields a :class:`stash` (default none).
        pop: names for which ``forward`` yields a :class:`pop` (default none).

    Returns:
        class decorator.

    Raises:
        SetupError: a name is in both lists, a list is a single string, or ``forward`` is not a generator function.
    """
    for parameter, names in (("stash", stash), ("pop", pop)):
        if isinstance(names, str):
            raise SetupError(f"{parameter} is the single name {names!r}; expected a list: [{names!r}]")
    stashes, pops = tuple(stash), tuple(pop)
    if both := sorted({*stashes} & {*pops}):
        raise SetupError(
            f"a layer stashes and pops {', '.join(map(repr, both))}; expected a stash in one layer and a pop in a later"
            " layer"
        )

    def decorate(layer: type[T]) -> type[T]:
        generate = layer.forward
        if not inspect.isgeneratorfunction(generate):
            raise SetupError(
                f"forward of the skippable layer {layer.__name__} has no yield; expected 'yield stash(name, value)' or"
                " 'value = yield pop(name)'"
            )

        @wraps(generate)
        def forward(self: Any, *inputs: Any) -> Any:
            return _run_skippable_forward(self, generate(self, *inputs), {*stashes}, {*pops})

        layer.forward = forward
        layer.pipe_stashes = stashes  # type: ignore[attr-defined]
        layer.pipe_pops = pops  # type: ignore[attr-defined]
        layer.pipe_namespaces = {}  # type: ignore[attr-defined]
        return layer

    return decorate


def isolate(layer: T, namespace: Namespace, only: Iterable[str] | None = None) -> T:
    """Move the skip names of a layer, and of all layers in it, into *namespace*.

    Args:
        layer: skippable layer, or a module that contains skippable layers.
        namespace: namespace of the names.
        only: names to move (default: all names).

    Returns:
        *layer*, changed in place.
    """
    selected = None if only is None else {*only}
    for module in layer.modules():
        if declared := {*_get_stash_and_pop_names(module)}:
            names = declared if selected is None else declared & selected
            module.pipe_namespaces = {**module.pipe_namespaces, **dict.fromkeys(names, namespace)}  # type: ignore[dict-item, assignment]
    return layer


def collect_stash_and_pop_keys(layer: nn.Module) -> tuple[list[SkipKey], list[SkipKey]]:
    """Return the keys that a layer, and all layers in it, stash and pop."""
    stashed, popped = [], []
    for module in layer.modules():
        stashed += [_make_skip_key(module, name) for name in getattr(module, "pipe_stashes", ())]
        popped += [_make_skip_key(module, name) for name in getattr(module, "pipe_pops", ())]
    return stashed, popped


def _get_stash_and_pop_names(layer: nn.Module) -> tuple[str, ...]:
    return (*getattr(layer, "pipe_stashes", ()), *getattr(layer, "pipe_pops", ()))


def _make_skip_key(layer: Any, name: str) -> SkipKey:
    return SkipKey(layer.pipe_namespaces.get(name), name)


def _run_skippable_forward(layer: nn.Module, steps: Generator[Any, Any, Any], stashes: set[str], pops: set[str]) -> Any:
    """Serve the requests that a layer yields, and return the layer's result."""
    skips = _current.skips
    name = type(layer).__name__
    answer: Any = None
    while True:
        try:
            request = steps.send(answer)
        except StopIteration as end:
            if stashes or pops:
                missing = [f"stash {skip!r}" for skip in sorted(stashes)] + [f"pop {skip!r}" for skip in sorted(pops)]
                raise SetupError(
                    f"{name}.forward ended and did not {', '.join(missing)}, which it declares. Stash and pop every"
                    " declared skip in every forward"
                ) from None
            return end.value
        if isinstance(request, stash) and request.name in stashes:
            stashes.discard(request.name)
            skips.stash(_make_skip_key(layer, request.name), request.value)
            answer = None
        elif isinstance(request, pop) and request.name in pops:
            pops.discard(request.name)
            answer = skips.pop(_make_skip_key(layer, request.name))
        else:
            description = (
                f"{type(request).__name__}({request.name!r})" if isinstance(request, stash | pop) else type(request)
            )
            raise SetupError(
                f"{name}.forward yields {description}, which it does not declare or has already yielded; expected"
                " stash(name, value) or pop(name), once for each declared name"
                f" ({', '.join(_get_stash_and_pop_names(layer))})"
            )


class SkipRoute(NamedTuple):
    """Skip between two partitions, with the indices of its source and target."""

    key: SkipKey
    source: int
    target: int


def find_skip_routes(partitions: Sequence[Sequence[nn.Module]]) -> list[SkipRoute]:
    """Return all skips that lead from one partition to another."""
    stashed: dict[SkipKey, list[int]] = {}  # numbers of the layers
    popped: dict[SkipKey, list[int]] = {}
    partition_of = [partition for partition, layers in enumerate(partitions) for _ in layers]
    for number, layer in enumerate(layer for layers in partitions for layer in layers):
        stashes, pops = collect_stash_and_pop_keys(layer)
        for key in stashes:
            stashed.setdefault(key, []).append(number)
        for key in pops:
            popped.setdefault(key, []).append(number)
    for key in dict.fromkeys((*stashed, *popped)):
        sources, targets = stashed.get(key, []), popped.get(key, [])
        if len(sources) != 1 or len(targets) != 1 or sources > targets:
            raise SetupError(
                f"the skip {key} is stashed by {_format_layer_numbers(sources)} and popped by"
                f" {_format_layer_numbers(targets)}; expected one stash"
                " and one pop, in a later layer. Rename a second skip, or isolate() it in a Namespace"
            )
    routes = [SkipRoute(key, partition_of[source], partition_of[popped[key][0]]) for key, (source,) in stashed.items()]
    return [route for route in routes if route.source != route.target]


def _format_layer_numbers(numbers: Sequence[int]) -> str:
    return f"layer {' and '.join(map(str, numbers))}" if numbers else "no layer"
