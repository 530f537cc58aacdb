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

    def __init__(self, values: Mapping[SkipKey, Any] | None = None, *, once: bool = True) -> None:
        self.values: dict[SkipKey, Any] = dict(values or {})
        self._once = once

    def leave(self, key: SkipKey, value: Any) -> None:
        """Store *value* until :meth:`take`."""
        if self._once and key in self.values:
            raise SetupError(f"the skip {key} was stashed twice before it was popped. Rename the second skip")
        self.values[key] = value

    def take(self, key: SkipKey) -> Any:
        """Remove and return the value."""
        if key not in self.values:
            raise SetupError(f"the skip {key} is popped but was not stashed. Stash it in an earlier layer")
        return self.values.pop(key)


class _CurrentSkips(threading.local):
    """Skips of each thread."""

    def __init__(self) -> None:
        # Used outside of a pipe. Values that an exception has left there must not break the next forward.
        self.skips = Skips(once=False)


_current = _CurrentSkips()


@contextmanager
def using(skips: Skips) -> Iterator[None]:
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
        SetupError: a name is in both lists, both are empty, a list is a single string, or ``forward`` is not a
            generator function.
    """
    for what, names in (("stash", stash), ("pop", pop)):
        if isinstance(names, str):
            raise SetupError(f"{what} is the single name {names!r}; expected a list: [{names!r}]")
    stashes, pops = tuple(stash), tuple(pop)
    if not stashes and not pops:
        raise SetupError(
            "a skippable layer declares no skips; expected at least one name, for example"
            " @skippable(stash=['features'])"
        )
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
            return _drive(self, generate(self, *inputs), {*stashes}, {*pops})

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

    Raises:
        SetupError: the module contains no skippable layer, or no skip with a name in *only*.
    """
    wanted = None if only is None else {*only}
    found: set[str] = set()
    for one in layer.modules():
        if declared := {*_declared(one)}:
            names = declared if wanted is None else declared & wanted
            one.pipe_namespaces = {**one.pipe_namespaces, **dict.fromkeys(names, namespace)}  # type: ignore[dict-item, assignment]
            found |= names
    if not found or (wanted is not None and wanted - found):
        missing = "" if wanted is None else f" named {', '.join(map(repr, sorted(wanted - found)))}"
        raise SetupError(
            f"{type(layer).__name__} contains no layer with skips{missing}; expected a layer decorated with @skippable"
        )
    return layer


def skip_keys(layer: nn.Module) -> tuple[list[SkipKey], list[SkipKey]]:
    """Return the keys that a layer, and all layers in it, stash and pop."""
    stashed, popped = [], []
    for one in layer.modules():
        stashed += [_key(one, name) for name in getattr(one, "pipe_stashes", ())]
        popped += [_key(one, name) for name in getattr(one, "pipe_pops", ())]
    return stashed, popped


def _declared(layer: nn.Module) -> tuple[str, ...]:
    return (*getattr(layer, "pipe_stashes", ()), *getattr(layer, "pipe_pops", ()))


def _key(layer: Any, name: str) -> SkipKey:
    return SkipKey(layer.pipe_namespaces.get(name), name)


def _drive(layer: nn.Module, steps: Generator[Any, Any, Any], stashes: set[str], pops: set[str]) -> Any:
    """Serve the requests that a layer yields, and return the layer's result."""
    skips = _current.skips
    name = type(layer).__name__
    answer: Any = None
    while True:
        try:
            asked = steps.send(answer)
        except StopIteration as end:
            if stashes or pops:
                left = [f"stash {one!r}" for one in sorted(stashes)] + [f"pop {one!r}" for one in sorted(pops)]
                raise SetupError(
                    f"{name}.forward ended and did not {', '.join(left)}, which it declares. Stash and pop every"
                    " declared skip in every forward"
                ) from None
            return end.value
        if isinstance(asked, stash) and asked.name in stashes:
            stashes.discard(asked.name)
            skips.leave(_key(layer, asked.name), asked.value)
            answer = None
        elif isinstance(asked, pop) and asked.name in pops:
            pops.discard(asked.name)
            answer = skips.take(_key(layer, asked.name))
        elif isinstance(asked, stash | pop):
            what = type(asked).__name__
            declared = (
                ", ".join(map(repr, getattr(layer, "pipe_stashes" if what == "stash" else "pipe_pops"))) or "none"
            )
            raise SetupError(
                f"{name}.forward yields {what}({asked.name!r}), which it does not declare or has already yielded."
                f" Declared names: {declared}"
            )
        else:
            raise SetupError(
                f"{name}.forward yields a {type(asked).__name__}; expected stash(name, value) or pop(name)"
            )


class SkipRoute(NamedTuple):
    """Skip between two partitions, with the indices of its source and target."""

    key: SkipKey
    source: int
    target: int


def skip_routes(partitions: Sequence[Sequence[nn.Module]]) -> list[SkipRoute]:
    """Return all skips that lead from one partition to another."""
    left: dict[SkipKey, tuple[int, int]] = {}
    taken: dict[SkipKey, tuple[int, int]] = {}
    number = 0
    for partition, layers in enumerate(partitions):
        for layer in layers:
            stashed, popped = skip_keys(layer)
            # A layer pops before it stashes, or contains several layers.
            for key in popped:
                if key in taken:
                    raise SetupError(
                        f"the skip {key} is popped by layers {taken[key][1]} and {number}; expected one pop. Stash the"
                        " value under a second name, or isolate() one of the two skips in a Namespace"
                    )
                taken[key] = partition, number
            for key in stashed:
                if key in left:
                    raise SetupError(
                        f"the skip {key} is stashed by layers {left[key][1]} and {number}; expected one stash. Rename"
                        " one of the two skips, or isolate() it in a Namespace"
                    )
                left[key] = partition, number
            number += 1
    if lost := [key for key in left if key not in taken]:
        layers_of = ", ".join(f"{key} (by layer {left[key][1]})" for key in lost)
        raise SetupError(f"skips are stashed and never popped: {layers_of}. Pop each in a later layer, or remove it")
    if missing := [key for key in taken if key not in left]:
        layers_of = ", ".join(f"{key} (by layer {taken[key][1]})" for key in missing)
        raise SetupError(f"skips are popped and never stashed: {layers_of}. Stash each in an earlier layer")
    if early := [key for key in taken if taken[key][1] < left[key][1]]:
        key = early[0]
        raise SetupError(
            f"the skip {key} is popped by layer {taken[key][1]}, before layer {left[key][1]} stashes it. Pop it in a"
            " later layer"
        )
    return [SkipRoute(key, source, taken[key][0]) for key, (source, _) in left.items() if source != taken[key][0]]
