"""Messages between neighbors, measured."""

from __future__ import annotations

import torch
import torch.distributed as dist

from lightning_pipe.llm.measure.links import Link, measure_links, median_links, neighbor_pairs
from tests.distributed import run_ranks


def test_neighbors_are_a_ring() -> None:
    assert neighbor_pairs(4) == [(0, 1), (1, 2), (2, 3), (3, 0)]
    assert neighbor_pairs(2) == [(0, 1)]
    assert neighbor_pairs(1) == []


def test_of_several_pipelines_each_number_is_the_median() -> None:
    found = [{(0, 1): Link(1.0, 9.0)}, {}, {(0, 1): Link(3.0, 2.0)}, {(0, 1): Link(2.0, 5.0)}]
    assert median_links(found) == {(0, 1): Link(2.0, 5.0)}


def every_pair(rank: int, world: int) -> dict[tuple[int, int], Link]:
    group = dist.group.WORLD
    assert group is not None
    return measure_links(group, torch.device("cpu"))


def test_each_pair_of_neighbors_is_measured_by_its_first_rank() -> None:
    found = run_ranks(every_pair, 3)
    assert [list(one) for one in found] == [[(0, 1)], [(1, 2)], [(2, 0)]]
    links = [link for one in found for link in one.values()]
    assert all(link.latency > 0.0 and link.seconds_per_byte >= 0.0 for link in links)
