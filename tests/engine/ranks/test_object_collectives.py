"""What ranks do together: values from all of them, and errors on all of them."""

from __future__ import annotations

import threading
from collections.abc import Callable
from functools import partial
from typing import Any, cast

import pytest
import torch
import torch.distributed as dist

from lightning_pipe.engine.common.errors import InputError, PipelineError, SetupError
from lightning_pipe.engine.ranks.object_collectives import (
    all_gather_objects,
    all_gather_or_raise,
    all_reduce_any,
    collective_device,
    gather_objects_on_first_rank,
    is_alone,
    raise_together,
    run_on_all_ranks,
    run_on_rank,
)
from tests.distributed import run_ranks

FAILED = "the folder cannot be written"


class Wordless(Exception):
    def __str__(self) -> str:
        raise RuntimeError("no words")


def raised(work: Callable[[], object]) -> str:
    """What *work* returns, or the class and text of what it raises."""
    try:
        return str(work())
    except Exception as error:
        return f"{type(error).__name__}: {error}"


def failing(fails: bool, error: Exception) -> Callable[[], str]:
    def work() -> str:
        if fails:
            raise error
        return "done"

    return work


def shared(rank: int, world_size: int) -> dict[str, Any]:
    world = dist.group.WORLD

    def on_all(ranks: tuple[int, ...], error: Exception, kind: type[PipelineError] = SetupError) -> str:
        return raised(lambda: run_on_all_ranks(failing(rank in ranks, error), FAILED, world, kind))

    def of_one(result: object, fails: bool = False, kind: type[PipelineError] = SetupError) -> Any:
        def work() -> object:
            assert rank == 1, "the work is done on another rank"
            return failing(fails, ValueError("no such column"))() if fails else result

        return raised(lambda: run_on_rank(work, FAILED, world, 1, kind))

    pair: Any = dist.new_group([1, 2])
    alone: list[Any] = [dist.new_group([index]) for index in range(world_size)]
    return {
        "values": all_gather_objects(10 * rank, world),
        "to first": gather_objects_on_first_rank(10 * rank, world),
        "to first of a pair": gather_objects_on_first_rank(10 * rank, pair) if rank else [],
        "flags": all_reduce_any([rank == 2, False, True], world),
        "alone": is_alone(None) and is_alone(alone[rank]) and not is_alone(world),
        "of a group of one": [
            all_gather_objects(rank, alone[rank]),
            all_reduce_any([True], alone[rank]),
            gather_objects_on_first_rank(rank, None),
        ],
        "errors": [
            on_all((), ValueError()),
            on_all((1,), OSError("no space left")),
            on_all((0, 2), ValueError("no such column")),
            on_all((0, 1, 2), SetupError("it is a file")),
            on_all((1,), Wordless()),
        ],
        "a user's error": on_all((1,), KeyError("user"), InputError),
        "this project's": on_all((1,), InputError("no such key"), InputError),
        "from one": [of_one("the plan"), of_one(None, fails=True)],
        "from one, a user's error": of_one(None, fails=True, kind=InputError),
        "from one, not to be sent": of_one(threading.Lock()),
        "not to be sent": [
            raised(partial(function, threading.Lock() if rank == 1 else rank, world))
            for function in (all_gather_objects, gather_objects_on_first_rank)
        ],
        "with values": raised(lambda: all_gather_or_raise(rank, None, FAILED, world)),
        "with values and errors": raised(
            lambda: all_gather_or_raise(rank, SetupError("it is a file") if rank == 2 else None, FAILED, world)
        ),
        "after all": all_gather_objects(rank, world),
    }


@pytest.fixture(scope="module")
def ranks() -> list[dict[str, Any]]:
    return run_ranks(shared, 3)


def test_every_rank_has_the_values_of_all(ranks: list[dict[str, Any]]) -> None:
    assert [found["to first"] for found in ranks] == [[0, 10, 20], [10], [20]]
    assert [found["to first of a pair"] for found in ranks] == [[], [10, 20], [20]]
    for rank, found in enumerate(ranks):
        assert found["values"] == [0, 10, 20]
        assert found["flags"] == [True, False, True]
        assert found["alone"]
        assert found["of a group of one"] == [[rank], [True], [rank]]
        assert found["with values"] == "[0, 1, 2]"


def test_a_value_that_cannot_be_sent_is_an_error_on_every_rank(ranks: list[dict[str, Any]]) -> None:
    for found in ranks:
        expected = "SetupError: rank 1: a value cannot be sent to the other ranks: TypeError: "
        assert all(text.startswith(expected) for text in found["not to be sent"])


def test_every_rank_has_the_errors_of_all(ranks: list[dict[str, Any]]) -> None:
    for found in ranks:
        assert found["errors"] == [
            "done",
            "SetupError: rank 1: the folder cannot be written: no space left",
            "SetupError: rank 0, 2: the folder cannot be written: ValueError: no such column",
            "SetupError: it is a file",
            f"SetupError: rank 1: {FAILED}: Wordless: its text cannot be read: RuntimeError",
        ]
        assert found["this project's"] == "InputError: rank 1: no such key"
        assert found["with values and errors"] == "SetupError: rank 2: it is a file"
        assert found["after all"] == [0, 1, 2]


def test_a_user_s_error_is_raised_as_it_is_where_it_comes_from(ranks: list[dict[str, Any]]) -> None:
    others = "InputError: rank 1: the folder cannot be written: KeyError: 'user'"
    assert [found["a user's error"] for found in ranks] == [others, "KeyError: 'user'", others]
    others = "InputError: the folder cannot be written: ValueError: no such column"
    assert [found["from one, a user's error"] for found in ranks] == [others, "ValueError: no such column", others]


def test_one_rank_s_result_or_error_is_on_every_rank(ranks: list[dict[str, Any]]) -> None:
    for found in ranks:
        assert found["from one"] == [
            "the plan",
            "SetupError: the folder cannot be written: ValueError: no such column",
        ]
        assert found["from one, not to be sent"].startswith("SetupError: the folder cannot be written: TypeError: ")


def test_without_other_ranks_errors_are_raised_at_once() -> None:
    with pytest.raises(SetupError, match=r"^the folder cannot be written: ValueError: no such column$") as caught:
        run_on_all_ranks(failing(True, ValueError("no such column")), FAILED, None)
    assert isinstance(caught.value.__cause__, ValueError)
    with pytest.raises(KeyError):
        raise_together(KeyError("user"), "", None, InputError)
    with pytest.raises(InputError, match=r"^no such key$"):
        raise_together(InputError("no such key"), "", None, InputError)
    raise_together(None, FAILED, None)
    assert run_on_rank(lambda: 3, FAILED, None) == 3


@pytest.mark.parametrize(
    ("backends", "device"),
    [("cpu:gloo,cuda:gloo", "cpu"), ("cpu:gloo,cuda:nccl", "cpu"), ("cuda:nccl", "cuda")],
)
def test_small_things_travel_on_a_device_that_the_backend_takes(
    backends: str, device: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(dist, "get_backend_config", lambda group: backends)
    found = collective_device(cast(dist.ProcessGroup, object()), torch.device("cpu"))
    assert found == torch.device(device)
