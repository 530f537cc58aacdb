"""Moving a batch: what is moved, what keeps its type, what is refused and how."""

from __future__ import annotations

import logging
from collections import defaultdict, namedtuple
from collections.abc import Callable
from dataclasses import dataclass, field
from types import MappingProxyType
from typing import Any

import pytest
import torch

from lightning_pipe.engine import InputError
from lightning_pipe.recsys.batches.transfer import check_movable, move_batch

# A device that every machine has, and that shows what has been moved.
META = torch.device("meta")

Pair = namedtuple("Pair", ["one", "other"])


def tensor() -> torch.Tensor:
    return torch.ones(2)


@dataclass(frozen=True)
class Frozen:
    part: Any


@dataclass
class Checked:
    """Counts the times it is made; one of its fields is no argument."""

    part: Any
    made: int = field(init=False, default=0)

    def __post_init__(self) -> None:
        self.made += 1


@dataclass
class Slotted:
    __slots__ = ("part",)
    part: Any


class Own:
    """Moves itself."""

    def __init__(self, part: torch.Tensor, asked: tuple[Any, ...] = ()) -> None:
        self.part = part
        self.asked = asked

    def to(self, device: torch.device, non_blocking: bool = False) -> Own:
        return Own(self.part.to(device), (device, non_blocking))


HOLDERS: dict[str, tuple[Callable[[torch.Tensor], Any], Callable[[Any], torch.Tensor]]] = {
    "tensor": (lambda part: part, lambda moved: moved),
    "tuple": (lambda part: (part, "text"), lambda moved: moved[0]),
    "named tuple": (lambda part: Pair(None, part), lambda moved: moved.other),
    "dict": (lambda part: {"a": part, "b": 2.5}, lambda moved: moved["a"]),
    "default dict": (lambda part: defaultdict(list, a=part), lambda moved: moved["a"]),
    "read-only mapping": (lambda part: MappingProxyType({"a": part}), lambda moved: moved["a"]),
    "dataclass": (Checked, lambda moved: moved.part),
    "dataclass with slots": (Slotted, lambda moved: moved.part),
    "nested": (lambda part: Frozen([{"a": (part,)}]), lambda moved: moved.part[0]["a"][0]),
    "an object that moves itself": (Own, lambda moved: moved.part),
}


@pytest.mark.parametrize("holder", HOLDERS)
def test_every_tensor_is_moved_and_what_holds_it_keeps_its_type(holder: str) -> None:
    hold, part_of = HOLDERS[holder]
    part = tensor()
    batch = hold(part)
    moved = move_batch(batch, META)
    assert type(moved) is type(batch)
    assert part_of(moved).device == META
    assert part_of(batch) is part
    assert part.device.type == "cpu"


def test_an_object_that_moves_itself_is_asked_not_to_wait() -> None:
    assert move_batch(Own(tensor()), META).asked == (META, True)


def test_a_dataclass_is_not_made_anew() -> None:
    assert move_batch(Checked(tensor()), META).made == 1


def test_a_default_dict_keeps_its_factory_and_its_order() -> None:
    moved = move_batch(defaultdict(list, b=tensor(), a=1), META)
    assert moved.default_factory is list
    assert list(moved) == ["b", "a"]


class Opaque:
    pass


@pytest.mark.parametrize(
    ("batch", "where"),
    [
        (Opaque(), "batch"),
        ([tensor(), Opaque()], r"batch\[1\]"),
        ({"a": {"b": Opaque()}}, r"batch\['a'\]\['b'\]"),
        (Pair(tensor(), Opaque()), r"batch\[1\]"),
        (Frozen((Opaque(),)), r"batch.part\[0\]"),
    ],
)
def test_a_part_that_nobody_can_move_is_refused_with_its_place_and_its_type(batch: Any, where: str) -> None:
    says = rf"^{where} is of type Opaque, which cannot be moved to a device; expected a tensor"
    with pytest.raises(InputError, match=says):
        move_batch(batch, META)
    with pytest.raises(InputError, match=says):
        check_movable(batch)


def test_attributes_that_are_no_fields_stay_as_they_are() -> None:
    batch: Any = Checked(tensor())
    batch.log = logging.getLogger("batches")  # its references form a cycle
    moved = move_batch(batch, META)
    assert moved.part.device == META
    assert moved.log is batch.log
