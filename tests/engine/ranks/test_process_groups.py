"""Groups made beside Gloo's default one: groups like any other, which listen in the default one's thread."""

from __future__ import annotations

from datetime import timedelta
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch.distributed._shard import sharded_tensor
from torch.distributed._shard.sharded_tensor import Shard

from lightning_pipe._compat.torch import timeout_of
from lightning_pipe.engine.ranks.process_groups import default_timeout, new_group
from tests.distributed import run_ranks, with_detailed_debugging
from tests.patience import HANG


def _threads() -> list[str]:
    return sorted(path.read_text().strip() for path in Path("/proc/self/task").glob("*/comm"))


def tried(rank: int, world_size: int) -> dict[str, Any]:
    found: dict[str, Any] = {}
    before = _threads()
    every, pair = new_group(), new_group([0, 2], timeout=timedelta(seconds=HANG))
    after = _threads()
    found["threads"] = len(after) - len(before), after.count("gloo_tcp_loop") - before.count("gloo_tcp_loop")
    # Several at once, and finished in another order on different ranks: nobody takes one's messages for another's.
    groups = [every, new_group(backend="gloo"), dist.group.WORLD]
    sums = [torch.tensor([float(10**index * (rank + 1))]) for index in range(len(groups))]
    works = [dist.all_reduce(one, group=group, async_op=True) for one, group in zip(sums, groups, strict=True)]
    for index in range(len(groups)):
        works[(index + rank) % len(groups)].wait()
    found["sums"] = [int(one) for one in sums]
    gathered: list[Any] = [None] * world_size
    dist.all_gather_object(gathered, {"rank": rank}, group=every)
    found["objects"] = gathered
    received = torch.empty(world_size, dtype=torch.int64)
    dist.all_to_all_single(received, torch.arange(world_size) + 10 * rank, group=every)
    found["exchanged"] = received.tolist()
    if rank != 1:
        assert isinstance(pair, dist.ProcessGroup)
        values = torch.tensor([rank])
        dist.all_reduce(values, group=pair)
        found["of two"] = pair.size(), pair.rank(), int(values), dist.get_process_group_ranks(pair)
    else:
        found["of two"] = not isinstance(pair, dist.ProcessGroup)
    for group in groups[:2]:
        dist.destroy_process_group(group)
    dist.barrier()  # the default group's thread goes on listening
    found["left"] = True
    return found


def late(rank: int, world_size: int) -> tuple[timedelta, str]:
    asked = timedelta(seconds=HANG - 1)
    group = new_group(timeout=asked)
    found, said = timeout_of(group), ""
    # Shorter only when the group is made: how long that takes depends on the machine.
    group._get_backend(torch.device("cpu"))._set_default_timeout(timedelta(seconds=1))
    if rank == 0:
        with pytest.raises(RuntimeError) as raised:
            dist.all_reduce(torch.ones(1), group=group)
        said = str(raised.value)
    dist.barrier()
    return found, said


def test_groups_are_separate_and_cost_a_thread_each_and_no_listener() -> None:
    found = run_ranks(tried, 3)
    for rank, one in enumerate(found):
        members = 1 if rank == 1 else 2
        assert one["threads"] == (members, 0)
        assert one["sums"] == [6, 60, 600]
        assert one["objects"] == [{"rank": 0}, {"rank": 1}, {"rank": 2}]
        assert one["exchanged"] == [rank, 10 + rank, 20 + rank]
        assert one["left"]
    assert [one["of two"] for one in found] == [(2, 0, 2, [0, 2]), True, (2, 1, 2, [0, 2])]


def test_their_timeout_is_the_one_asked_for() -> None:
    found = run_ranks(late, 2)
    assert [timeout for timeout, _ in found] == [timedelta(seconds=HANG - 1)] * 2
    assert "imed out" in found[0][1]


def test_under_pytorchs_detailed_debugging_they_are_pytorchs_own(tmp_path: Path) -> None:
    assert all(threads > 1 for threads in run_ranks(with_detailed_debugging, 2, threads_of_one, tmp_path))
    assert run_ranks(threads_of_one, 2) == [1, 1]


def threads_of_one(rank: int, world_size: int) -> int:
    before = len(_threads())
    dist.barrier(new_group())
    return len(_threads()) - before


def test_whoever_asks_takes_them_for_gloos() -> None:
    run_ranks(asked, 2)


def asked(rank: int, world_size: int) -> None:
    group = new_group()
    glooes: Any = dist.new_group()
    assert dist.get_backend(group) == dist.get_backend(glooes) == "gloo"
    for device in ("cpu", "cuda"):
        assert type(group._get_backend(torch.device(device))) is dist.ProcessGroupGloo
    assert dist.distributed_c10d._get_pg_default_device(group) == torch.device("cpu")
    dist.monitored_barrier(group, timeout=timedelta(seconds=HANG))  # of Gloo's groups alone
    tensor = sharded_tensor.init_from_local_shards(_shards_of_first(rank), 4, process_group=group)
    gathered = torch.empty(4) if rank == 0 else None
    tensor.gather(out=gathered)
    assert gathered is None or gathered.tolist() == [1.0] * 4


def _shards_of_first(rank: int) -> list[Shard]:
    """All of a tensor of four ones, on rank 0."""
    return [] if rank else [Shard.from_tensor_and_offsets(torch.ones(4), [0], 0)]


def timeouts(rank: int, world_size: int) -> list[timedelta]:
    with default_timeout():
        of_others = dist.new_group()
    return [timeout_of(group) for group in (None, new_group(), new_group(backend="gloo"), of_others, dist.new_group())]


def test_without_one_they_have_the_default_groups_and_so_can_those_of_other_libraries() -> None:
    for default, *made, outside in run_ranks(timeouts, 2):
        assert made == [default] * 3
        assert outside == dist.distributed_c10d.default_pg_timeout != default
