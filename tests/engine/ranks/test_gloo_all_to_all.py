"""All-to-alls between machines: what Gloo's do, as messages that every rank is ready for before it sends any."""

from __future__ import annotations

import weakref
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor

from lightning_pipe.engine.ranks import object_collectives
from lightning_pipe.engine.ranks.gloo_all_to_all import is_multi_host_gloo_group, wrap_full_duplex_group
from lightning_pipe.engine.ranks.process_groups import new_group
from tests.distributed import run_ranks, with_detailed_debugging


def _apart(rank: int) -> None:
    """This rank takes itself for one of a machine of its own."""
    object_collectives.host_id = lambda: (f"machine {rank}", 0)


def _abandoned(group: Any) -> Any:
    return group._abandoned


def _exchanged(group: dist.ProcessGroup, tensor: Tensor, sent: list[int], received: list[int]) -> Tensor:
    output = torch.full((sum(received), *tensor.shape[1:]), -1, dtype=tensor.dtype)
    dist.all_to_all_single(output, tensor, received, sent, group=group)
    return output


def compared(rank: int, world_size: int) -> list[bool]:
    _apart(rank)
    plain = new_group()
    group = wrap_full_duplex_group(plain)
    assert group is not plain
    equal = []
    for seed in range(20):
        generator = torch.Generator().manual_seed(seed)  # all ranks know what all send
        rows = torch.randint(0, 4, (world_size, world_size), generator=generator) * (seed % 3 + 1)
        sent, received = rows[rank].tolist(), rows[:, rank].tolist()
        of_row: tuple[int, ...] = ((), (3,), (2, 2))[seed % 3]
        tensor = torch.arange(sum(sent) * 100).float()[: sum(sent)].reshape(-1, *(1 for _ in of_row)) + rank * 1000
        tensor = tensor.expand(-1, *of_row).contiguous().to((torch.int64, torch.int32, torch.float32)[seed % 3])
        equal.append(torch.equal(_exchanged(group, tensor, sent, received), _exchanged(plain, tensor, sent, received)))
    even = torch.arange(world_size * 2) + 10 * rank
    output = torch.empty_like(even)
    dist.all_to_all_single(output, even, group=group)
    equal.append(output.tolist() == [10 * other + 2 * rank + one for other in range(world_size) for one in range(2)])
    return equal


def test_they_move_what_gloos_do() -> None:
    for equal in run_ranks(compared, 3):
        assert equal == [True] * 21


def several(rank: int, world_size: int) -> None:
    _apart(rank)
    group = wrap_full_duplex_group(new_group())
    sizes = [100_000, 1, 0, 5000]
    sent = [torch.full((2 * size,), 10 * rank + index) for index, size in enumerate(sizes)]
    received = [torch.empty(2 * size, dtype=torch.int64) for size in sizes]
    works: list[Any] = [
        dist.all_to_all_single(*pair, group=group, async_op=True) for pair in zip(received, sent, strict=True)
    ]
    total = torch.tensor([rank + 1])
    dist.all_reduce(total, group=group)  # among them, on the same group
    # Each rank waits in another order; the second is never waited for.
    for index in ([0, 2, 3], [3, 0, 2])[rank]:
        assert isinstance(works[index], dist.Work)
        works[index].wait()
        assert works[index].is_completed()
        assert received[index].tolist() == [index] * sizes[index] + [10 + index] * sizes[index]
    assert int(total) == 3
    assert not works[1].is_completed()


def test_several_are_under_way_at_once_beside_other_collectives() -> None:
    run_ranks(several, 2)


class Waited:
    """One message of an exchange."""

    def __init__(self, work: Any, tensors: tuple[Tensor, ...], waits: list[bool]) -> None:
        self._work, self._tensors, self._waits = work, [weakref.ref(one) for one in tensors], waits

    def wait(self) -> None:
        self._waits.append(all(one() is not None for one in self._tensors))
        self._work.wait()


def waits_of_abandoned(rank: int, world_size: int) -> tuple[int, list[bool]]:
    """Messages of exchanges that nobody waits for, and for each wait whether their memory was there."""
    _apart(rank)
    group = wrap_full_duplex_group(new_group())
    sent = torch.zeros(2 * world_size)
    for _ in range(3):
        dist.all_to_all_single(torch.empty_like(sent), sent.clone(), group=group, async_op=True)
    waits: list[bool] = []
    messages = 0
    for number, (works, tensors) in _abandoned(group).items():
        messages += len(works)
        _abandoned(group)[number] = [Waited(work, tensors, waits) for work in works], tensors
    del works, tensors
    dist.all_to_all_single(torch.empty_like(sent), sent, group=group)
    return messages, waits


def test_those_that_nobody_waits_for_have_ended_before_their_memory_is_freed() -> None:
    # To two others, and from two.
    assert run_ranks(waits_of_abandoned, 3) == [(3 * 4, [True] * 12)] * 3


def where(rank: int, world_size: int) -> list[bool]:
    group = new_group()
    found = [is_multi_host_gloo_group(group), wrap_full_duplex_group(group) is not group]
    object_collectives.host_id = lambda: (f"machine {rank // 2}", 0)
    found += [is_multi_host_gloo_group(group), wrap_full_duplex_group(group) is not group]
    return found


def test_processes_of_one_machine_keep_gloos(tmp_path: Path) -> None:
    assert run_ranks(where, 2) == [[False, False, False, False]] * 2
    assert run_ranks(where, 3) == [[False, False, True, True]] * 3
    # Which looks at each collective.
    assert run_ranks(with_detailed_debugging, 3, where, tmp_path) == [[False] * 4] * 3


def left(rank: int, world_size: int) -> str:
    _apart(rank)
    plain = new_group()
    group = wrap_full_duplex_group(plain)
    if rank == 1:
        dist.destroy_process_group(plain)
        return ""
    with pytest.raises(RuntimeError) as raised:
        dist.all_to_all_single(torch.empty(2), torch.empty(2), group=group)
    return str(raised.value)


def test_a_rank_that_has_left_is_an_error_at_once() -> None:
    assert "onnection" in run_ranks(left, 2)[0]
