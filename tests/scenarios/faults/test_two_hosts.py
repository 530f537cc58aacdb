"""Two hosts, which are two network namespaces joined by a virtual cable: training across them, and the cable cut."""

from __future__ import annotations

import ast
import re
import time
from collections.abc import Iterator
from contextlib import ExitStack
from pathlib import Path

import pytest

from tests.patience import HANG
from tests.scenarios.cluster.namespaces import Nodes, why_not
from tests.scenarios.faults.forked_ranks import Here, Nursery, told
from tests.scenarios.faults.training import BOUND, WHERE, fit, module

pytestmark = [pytest.mark.exhaustive, pytest.mark.skipif(bool(why_not()), reason=why_not())]

# How long (seconds) ranks wait for each other: where the link is cut, nothing else says so.
WAIT = 20.0


class Result:
    """What happened on each host, by rank."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.seconds: float | None = None  # from the cut, until both ranks had ended
        self.outputs: list[str] = []

    def of(self, what: str, rank: int) -> str:
        file = self.folder / f"{what}_{rank}"
        assert file.exists(), f"rank {rank} did not get there:\n" + "\n-----\n".join(self.outputs)
        return file.read_text()


def all_there(files: list[Path], seconds: float) -> bool:
    end = time.monotonic() + seconds
    while not all(file.exists() for file in files):
        if time.monotonic() > end:
            return False
        time.sleep(0.05)  # files of other hosts: there is nothing to wait on
    return True


@pytest.fixture(scope="module")
def result(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Result]:
    """Training across the link, and what its cut does."""
    found = Result(tmp_path_factory.mktemp("two_hosts"))
    with Nodes(2) as nodes, ExitStack() as ends:
        jobs = []
        for node in range(2):
            options = ["--nnodes=2", "--nproc-per-node=1", "--max-restarts=0", f"--rdzv-conf=is_host={int(node == 0)}"]
            program = "tests.scenarios.faults.two_hosts_program"
            jobs.append(nodes.launch(node, options, program, str(found.folder), str(WAIT)))
            ends.callback(jobs[-1].end)
        if all_there([found.folder / f"begun_{rank}" for rank in range(2)], HANG):
            nodes.cut(1)
            cut = time.monotonic()
            if all_there([found.folder / f"said_{rank}" for rank in range(2)], WAIT + BOUND):
                found.seconds = time.monotonic() - cut
        for node, job in enumerate(jobs):
            # torchrun of the node without a cable waits for minutes, in a read from a store that it no longer reaches.
            found.outputs.append(job.output())
            nodes.kill(node)
        yield found


def on_loopback(here: Here) -> list[float]:
    trained = module("recsys")
    fit("recsys", 2, trained)
    return list(trained.losses)


def test_losses_are_those_of_one_host(result: Result, ranks: Nursery) -> None:
    ended = ranks.run(on_loopback, 2)
    assert [one.code for one in ended] == [0, 0], told(ended)
    for rank, one in enumerate(ended):
        assert ast.literal_eval(result.of("losses", rank)) == one.value


def test_both_end_soon_after_the_link_was_cut(result: Result) -> None:
    assert result.seconds is not None, "\n-----\n".join(result.outputs)


@pytest.mark.parametrize("rank", [0, 1])
def test_each_says_where_it_was_and_what_it_lost(rank: int, result: Result) -> None:
    said = result.of("said", rank)
    assert re.search("[Tt]imed? ?out|closed|did not respond", said), said
    assert re.search(WHERE.format(rank=rank), said), said
