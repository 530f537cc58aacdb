"""Sources of the arguments of a sharded module's call in a batch: the common result of record, direct and fx.

A source is a tree: pieces of the batch at a path, constants, collections of sources, and results of post-processing
modules. Sources are plain data with the same text on every rank, so ranks can compare them.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

from lightning_pipe.recsys.batches.traversal import BatchPath, format_path, get_at_path, is_same_leaf

Arguments = tuple[tuple[Any, ...], dict[str, Any]]  # arguments of one call: positional, named


@dataclass(frozen=True)
class BatchArgument:
    """The object at a path of the batch."""

    path: BatchPath

    def resolve(self, batch: Any, results: PostprocessResults) -> Any:
        return get_at_path(self.path, batch)

    def __str__(self) -> str:
        return format_path(self.path)


@dataclass(frozen=True)
class ConstantArgument:
    """The same value for every batch."""

    value: Any

    def resolve(self, batch: Any, results: PostprocessResults) -> Any:
        return self.value

    def __str__(self) -> str:
        return repr(self.value)


@dataclass(frozen=True)
class ContainerArgument:
    """A list, tuple or dict of sources."""

    kind: type
    keys: tuple[Any, ...]
    sources: tuple[Source, ...]

    def resolve(self, batch: Any, results: PostprocessResults) -> Any:
        values = [source.resolve(batch, results) for source in self.sources]
        return dict(zip(self.keys, values, strict=True)) if self.kind is dict else self.kind(values)

    def __str__(self) -> str:
        return f"{self.kind.__name__}({', '.join(map(str, self.sources))})"


@dataclass(frozen=True)
class Postprocessed:
    """A part of the result of a post-processing module, which runs once per batch."""

    name: str
    arguments: CallArguments
    path: BatchPath = ()

    def resolve(self, batch: Any, results: PostprocessResults) -> Any:
        return get_at_path(self.path, results.get(self.name, self.arguments, batch))

    def __str__(self) -> str:
        return f"{self.name}({self.arguments})" + format_path(self.path).removeprefix("batch")


Source = BatchArgument | ConstantArgument | ContainerArgument | Postprocessed


@dataclass(frozen=True)
class CallArguments:
    """The arguments of one call."""

    positional: tuple[Source, ...] = ()
    named: dict[str, Source] = field(default_factory=dict)

    def resolve(self, batch: Any, results: PostprocessResults) -> Arguments:
        """Return the call's arguments for ``batch``. Post-processing runs at first use and is cached in ``results``."""
        positional = tuple(source.resolve(batch, results) for source in self.positional)
        return positional, {name: source.resolve(batch, results) for name, source in self.named.items()}

    def collect_postprocess_calls(self) -> dict[str, CallArguments]:
        """Return the post-processing modules that these arguments need, innermost first, with their arguments."""
        arguments_by_name: dict[str, CallArguments] = {}
        pending: list[Source] = [*self.positional, *self.named.values()]
        while pending:
            source = pending.pop()
            if isinstance(source, ContainerArgument):
                pending.extend(source.sources)
            elif isinstance(source, Postprocessed):
                arguments_by_name = {
                    **source.arguments.collect_postprocess_calls(),
                    **arguments_by_name,
                    source.name: source.arguments,
                }
        return arguments_by_name

    def __str__(self) -> str:
        named = (f"{name}={source}" for name, source in self.named.items())
        return ", ".join([*map(str, self.positional), *named])


class PostprocessResults:
    """Results of the post-processing modules for one batch. They are held per batch, because iterations overlap."""

    def __init__(self, modules: dict[str, Callable[..., Any]]) -> None:
        self._modules = modules
        self._calls: dict[str, tuple[tuple[Any, ...], dict[str, Any], Any]] = {}

    def get(self, name: str, arguments: CallArguments, batch: Any) -> Any:
        if name not in self._calls:
            positional, named = arguments.resolve(batch, self)
            self._calls[name] = positional, named, self._modules[name](*positional, **named)
        return self._calls[name][2]

    def matches(self, name: str, positional: tuple[Any, ...], named: dict[str, Any]) -> bool:
        """Return True if ``name`` was run on these very objects, so that its result can replace a second run."""
        return name in self._calls and same_arguments(self._calls[name][:2], (positional, named))

    def result(self, name: str) -> Any:
        return self._calls[name][2]

    def all_results(self) -> list[Any]:
        return [result for _, _, result in self._calls.values()]


def same_arguments(first: Arguments, second: Arguments) -> bool:
    """Return True if two calls pass the same pieces, no matter which of them by position and which by name."""
    return _same_value(_flatten_arguments(*first), _flatten_arguments(*second))


def _flatten_arguments(positional: tuple[Any, ...], named: dict[str, Any]) -> list[Any]:
    return [*positional, *(named[name] for name in sorted(named))]


def _same_value(first: Any, second: Any) -> bool:
    if isinstance(first, (list, tuple)) and type(first) is type(second):
        return len(first) == len(second) and all(map(_same_value, first, second))
    if isinstance(first, dict) and isinstance(second, dict):
        return first.keys() == second.keys() and all(_same_value(first[key], second[key]) for key in first)
    if first is None or isinstance(first, (bool, int, float, str)):
        return type(first) is type(second) and first == second
    return is_same_leaf(first, second)
