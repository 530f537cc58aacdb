"""Groups made beside the default one have its timeout, and so can those of other libraries."""

from __future__ import annotations

from datetime import timedelta

import torch
import torch.distributed as dist

from lightning_pipe._compat.torch import get_process_group_timeout
from lightning_pipe.engine.ranks.process_groups import inherit_default_group_timeout, new_group
from tests.distributed import run_ranks
from tests.patience import HANG


def made(rank: int, world_size: int) -> tuple[int, list[timedelta]]:
    with inherit_default_group_timeout():
        of_others = dist.new_group()
    asked = new_group(timeout=timedelta(seconds=HANG - 1))
    total = torch.tensor(rank + 1)
    dist.all_reduce(total, group=asked)
    groups = [None, new_group(), new_group(backend="gloo"), of_others, asked, dist.new_group()]
    return int(total), [get_process_group_timeout(group) for group in groups]


def test_groups_have_the_default_groups_timeout_and_so_can_those_of_other_libraries() -> None:
    for total, (default, *same, asked, outside) in run_ranks(made, 2):
        assert total == 3
        assert same == [default] * 3
        assert asked == timedelta(seconds=HANG - 1)
        assert outside == dist.distributed_c10d.default_pg_timeout != default
