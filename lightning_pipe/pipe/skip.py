"""Skip connections: a value that one layer of a Sequential leaves, and a later one takes, past those in between.

A layer with skips is a class with a decorator, whose ``forward`` is a generator::

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

__all__ = [
    "Namespace",
    "SkipKey",
    "SkipRoute",
    "Skips",
    "isolate",
    "pop",
    "skip_keys",
    "skip_routes",
    "skippable",
    "stash",
]

T = TypeVar("T", bound=nn.Module)


class Namespace:
    """Where names of skips are looked up, so that two parts of a model can use the same ones.

    Equal to itself and to its copies, so that layers that are copied one by one still find each other.
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
    """``yield stash(name, value)``: leave a value for a later layer."""

    __slots__ = ("name", "value")

    def __init__(self, name: str, value: Any) -> None:
        self.name, self.value = name, value


class pop:
    """``value = yield pop(name)``: take what an earlier layer has left."""

    __slots__ = ("name",)

    def __init__(self, name: str) -> None:
        self.name = name


class Skips:
    """What has been left and not yet taken.

    Args:
        values: that were left elsewhere.
        once: refuse to leave a second value under a name.
    """

    def __init__(self, values: Mapping[SkipKey, Any] | None = None, *, once: bool = True) -> None:
        self.values: dict[SkipKey, Any] = dict(values or {})
        self._once = once

    def leave(self, key: SkipKey, value: Any) -> None:
        """Keep *value* until it is taken."""
        if self._once and key in self.values:
            raise SetupError(f"the skip {key} was stashed twice before it was popped; give the second another name")
        self.values[key] = value

    def take(self, key: SkipKey) -> Any:
        """Give back what was left, once."""
        if key not in self.values:
            raise SetupError(f"the skip {key} is popped, and was not stashed before; stash it in an earlier layer")
        return self.values.pop(key)


class _CurrentSkips(threading.local):
    """Of each thread: where layers leave what they stash."""

    def __init__(self) -> None:
        # Outside of a pipe: what an exception has left there must not be in the way of the next forward.
        self.skips = Skips(once=False)


_current = _CurrentSkips()


@contextmanager
def using(skips: Skips) -> Iterator[None]:
    """In the body, layers of this thread leave and take skips there."""
    before, _current.skips = _current.skips, skips
    try:
        yield
    finally:
        _current.skips = before


def skippable(stash: Iterable[str] = (), pop: Iterable[str] = ()) -> Callable[[type[T]], type[T]]:
    """Say which skips a layer's generator stashes and pops; each of them in every forward.

    Args:
        stash: names that ``forward`` yields a :class:`stash` for.
        pop: names that it yields a :class:`pop` for.

    Raises:
        SetupError: a name is in both, none is given, a single string, or ``forward`` is no generator.
    """
    if isinstance(stash, type):
        raise SetupError(
            f"@skippable stands bare on {stash.__name__}; say what it leaves or takes: @skippable(stash=['features'])"
        )
    for what, names in (("stash", stash), ("pop", pop)):
        if isinstance(names, str):
            raise SetupError(f"{what} is the single name {names!r}; give a list, [{names!r}]")
    stashes, pops = tuple(stash), tuple(pop)
    if not stashes and not pops:
        raise SetupError("a skippable layer stashes and pops nothing; give names, as in @skippable(stash=['features'])")
    if both := sorted({*stashes} & {*pops}):
        raise SetupError(f"a layer stashes and pops {', '.join(map(repr, both))}; needed are two layers for a skip")

    def decorate(layer: type[T]) -> type[T]:
        generate = layer.forward
        if not inspect.isgeneratorfunction(generate):
            raise SetupError(
                f"forward of the skippable layer {layer.__name__} has no yield; needed are yield stash(name, value) and"
                " value = yield pop(name)"
            )

        @wraps(generate)
        def forward(self: Any, *inputs: Any) -> Any:
            return _drive(self, generate(self, *inputs), {*stashes}, {*pops})

        layer.forward = forward
        layer._stashes = stashes  # type: ignore[attr-defined]
        layer._pops = pops  # type: ignore[attr-defined]
        layer._namespaces = {}  # type: ignore[attr-defined]
        return layer

    return decorate


def isolate(layer: T, namespace: Namespace, only: Iterable[str] | None = None) -> T:
    """Look up the names of a layer, and of all layers in it, in *namespace*; returns the layer.

    Args:
        layer: or a module that holds skippable layers.
        namespace: where.
        only: these names; all by default.

    Raises:
        SetupError: no layer there has skips, or none of a name in *only*.
    """
    wanted = None if only is None else {*only}
    found: set[str] = set()
    for one in layer.modules():
        if declared := {*_declared(one)}:
            names = declared if wanted is None else declared & wanted
            one._namespaces = {**one._namespaces, **dict.fromkeys(names, namespace)}  # type: ignore[dict-item, assignment]
            found |= names
    if not found or (wanted is not None and wanted - found):
        missing = "" if wanted is None else f" named {', '.join(map(repr, sorted(wanted - found)))}"
        raise SetupError(f"{type(layer).__name__} holds no layer with skips{missing}; needed is one with @skippable")
    return layer


def skip_keys(layer: nn.Module) -> tuple[list[SkipKey], list[SkipKey]]:
    """What a layer, and all layers in it, stash and pop."""
    stashed, popped = [], []
    for one in layer.modules():
        stashed += [_key(one, name) for name in getattr(one, "_stashes", ())]
        popped += [_key(one, name) for name in getattr(one, "_pops", ())]
    return stashed, popped


def _declared(layer: nn.Module) -> tuple[str, ...]:
    return (*getattr(layer, "_stashes", ()), *getattr(layer, "_pops", ()))


def _key(layer: Any, name: str) -> SkipKey:
    return SkipKey(layer._namespaces.get(name), name)


def _drive(layer: nn.Module, steps: Generator[Any, Any, Any], stashes: set[str], pops: set[str]) -> Any:
    """Answer what a layer yields until it returns."""
    skips = _current.skips
    name = type(layer).__name__
    answer: Any = None
    while True:
        try:
            asked = steps.send(answer)
        except StopIteration as end:
            if stashes or pops:
                left = [f"stash {one!r}" for one in sorted(stashes)] + [f"pop {one!r}" for one in sorted(pops)]
                raise SetupError(f"{name}.forward ended and did not {', '.join(left)}, which it declares") from None
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
            declared = ", ".join(map(repr, getattr(layer, "_stashes" if what == "stash" else "_pops"))) or "none"
            raise SetupError(
                f"{name}.forward yields {what}({asked.name!r}) which it does not declare, or for a second time;"
                f" declared are: {declared}"
            )
        else:
            raise SetupError(
                f"{name}.forward yields a {type(asked).__name__}; needed is stash(name, value) or pop(name)"
            )


class SkipRoute(NamedTuple):
    """A skip, and the partitions that it leads from and to."""

    key: SkipKey
    source: int
    target: int


def skip_routes(partitions: Sequence[Sequence[nn.Module]]) -> list[SkipRoute]:
    """All skips that lead from one partition to another.

    Args:
        partitions: the layers of each.

    Raises:
        SetupError: a skip that is stashed or popped twice, never popped, never stashed, or popped before that.
    """
    left: dict[SkipKey, tuple[int, int]] = {}
    taken: dict[SkipKey, tuple[int, int]] = {}
    number = 0
    for partition, layers in enumerate(partitions):
        for layer in layers:
            stashed, popped = skip_keys(layer)
            # A layer takes before it leaves, or holds layers of its own, in their order.
            for key in popped:
                if key in taken:
                    raise SetupError(
                        f"the skip {key} is popped by layers {taken[key][1]} and {number}; a skip is popped once: stash"
                        " it under a second name, or isolate() one of them in a Namespace"
                    )
                taken[key] = partition, number
            for key in stashed:
                if key in left:
                    raise SetupError(
                        f"the skip {key} is stashed by layers {left[key][1]} and {number}; give one another name, or"
                        " isolate() it in a Namespace"
                    )
                left[key] = partition, number
            number += 1
    if lost := [key for key in left if key not in taken]:
        layers_of = ", ".join(f"{key} (by layer {left[key][1]})" for key in lost)
        raise SetupError(f"skips are stashed and never popped: {layers_of}; pop each in a later layer, or leave it out")
    if missing := [key for key in taken if key not in left]:
        layers_of = ", ".join(f"{key} (by layer {taken[key][1]})" for key in missing)
        raise SetupError(f"skips are popped and never stashed: {layers_of}; stash each in an earlier layer")
    if early := [key for key in taken if taken[key][1] < left[key][1]]:
        key = early[0]
        raise SetupError(
            f"the skip {key} is popped by layer {taken[key][1]}, before layer {left[key][1]} stashes it; a skip leads"
            " to a later layer"
        )
    return [SkipRoute(key, source, taken[key][0]) for key, (source, _) in left.items() if source != taken[key][0]]
