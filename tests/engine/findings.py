"""Memory as the race detector sees it, and its reports."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

import torch

# Places of memory other than the devices, whose places are their indices.
PAGEABLE, PINNED = -1, -2


@dataclass(frozen=True)
class Site:
    """Where an access comes from: the task, the innermost function outside of PyTorch, and that of the package."""

    task: str
    function: str
    package: str

    def __str__(self) -> str:
        return f"{self.task or 'no task'}, {self.package}" + f" in {self.function}" * (self.package != self.function)


@dataclass(frozen=True)
class Finding:
    """A fault: its kind, and both sides of it. *kind* is 'race', 'wait without a record' or 'reused too early'."""

    kind: str
    what: str
    first: Site
    second: Site

    def __str__(self) -> str:
        return f"{self.kind}: {self.what}: [{self.first}] then [{self.second}]"


@dataclass(frozen=True)
class Sync:
    """The host waits for a stream, in a task, to read the result of *operator*."""

    site: Site
    operator: str
    stream: str


# First byte of a tensor in its storage, and the one after its last.
Span = tuple[int, int]


@dataclass(eq=False)
class Storage:
    """Memory of tensors, which views share."""

    place: int
    stream: Any
    made: Site
    spans: dict[Span, int] = field(default_factory=dict)
    uses: dict[int, tuple[int, Site]] = field(default_factory=dict)
    user: int = 0
    recorded: set[int] = field(default_factory=set)
    rows: list[tuple[int, int]] = field(default_factory=list)


# A storage that an operator uses, and the part of it.
Use = tuple[Storage, Span]


def span_of(tensor: torch.Tensor) -> Span:
    """The part of its storage that a tensor lies in. Tensors that interleave, such as columns, overlap."""
    size = tensor.element_size()
    start = int(tensor.storage_offset()) * size
    last = sum((length - 1) * stride for length, stride in zip(tensor.shape, tensor.stride(), strict=True))
    return start, start + (last + 1) * size if tensor.numel() else start


def overlap(one: Span, other: Span) -> bool:
    return one[0] < other[1] and other[0] < one[1]
