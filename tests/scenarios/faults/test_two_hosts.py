"""Two hosts, which are two network namespaces joined by a virtual cable: training across them, and the cable cut."""

from __future__ import annotations

import ast
import os
import re
import shutil
import subprocess
import time
from collections.abc import Iterator
from contextlib import ExitStack
from pathlib import Path

import pytest

from tests.patience import HANG
from tests.scenarios.faults.forked_ranks import Here, Nursery, told
from tests.scenarios.faults.launched import Launched
from tests.scenarios.faults.training import BOUND, WHERE, fit, module

pytestmark = pytest.mark.exhaustive

# How long (seconds) ranks wait for each other: where the link is cut, nothing else says so.
WAIT = 20.0


def ip(*arguments: str) -> None:
    done = subprocess.run(["ip", *arguments], capture_output=True, text=True)
    if done.returncode:
        raise OSError(f"ip {' '.join(arguments)}: {done.stderr.strip()}")


class Hosts:
    """Two namespaces with one address each; ``cut`` takes the link between them down."""

    def __init__(self) -> None:
        self.names = [f"lightning-pipe-{os.getpid()}-{number}" for number in range(2)]
        self.cards = [f"lp{os.getpid() % 100_000}v{number}" for number in range(2)]
        self.addresses = ["10.213.77.1", "10.213.77.2"]

    def make(self) -> None:
        for name in self.names:
            ip("netns", "add", name)
        ends = [[card, "netns", name] for card, name in zip(self.cards, self.names, strict=True)]
        ip("link", "add", *ends[0], "type", "veth", "peer", "name", *ends[1])
        for name, card, address in zip(self.names, self.cards, self.addresses, strict=True):
            ip("-n", name, "addr", "add", f"{address}/24", "dev", card)
            ip("-n", name, "link", "set", card, "up")
            ip("-n", name, "link", "set", "lo", "up")

    def remove(self) -> None:
        for name in self.names:
            subprocess.run(["ip", "netns", "del", name], capture_output=True)

    def cut(self) -> None:
        ip("-n", self.names[0], "link", "set", self.cards[0], "down")

    def launch(self, number: int, folder: Path) -> Launched:
        options = ["--nnodes=2", "--nproc-per-node=1", "--max-restarts=0", "--rdzv-backend=c10d", "--rdzv-id=two-hosts"]
        options += [f"--rdzv-endpoint={self.addresses[0]}:29541", f"--rdzv-conf=is_host={int(number == 0)}"]
        options += [f"--local-addr={self.addresses[number]}"]
        return Launched(
            options,
            "tests.scenarios.faults.two_hosts_program",
            str(folder),
            str(WAIT),
            environment={"GLOO_SOCKET_IFNAME": self.cards[number]},
            before=["ip", "netns", "exec", self.names[number]],
        )


@pytest.fixture(scope="module")
def hosts() -> Iterator[Hosts]:
    if shutil.which("ip") is None:
        pytest.skip("two hosts need the command ip of iproute2, to make network namespaces")
    made = Hosts()
    try:
        try:
            made.make()
        except OSError as error:
            pytest.skip(f"two hosts need network namespaces, which cannot be made here: {error}")
        yield made
    finally:
        made.remove()


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
def result(hosts: Hosts, tmp_path_factory: pytest.TempPathFactory) -> Result:
    """Training across the link, and what its cut does."""
    found = Result(tmp_path_factory.mktemp("two_hosts"))
    with ExitStack() as ends:
        jobs = []
        for number in range(2):
            jobs.append(hosts.launch(number, found.folder))
            ends.callback(jobs[-1].end)
        if all_there([found.folder / f"begun_{rank}" for rank in range(2)], HANG):
            hosts.cut()
            cut = time.monotonic()
            if all_there([found.folder / f"said_{rank}" for rank in range(2)], WAIT + BOUND):
                found.seconds = time.monotonic() - cut
    for job in jobs:
        found.outputs.append(job.wait(HANG)[1])
    return found


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
