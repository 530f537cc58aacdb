"""An elastic torchrun over nodes that die, vanish and join: each sample of an epoch is trained once."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch

from lightning_pipe.strategies import export_checkpoint
from tests.patience import HANG
from tests.scenarios.cluster.elastic_program import BATCH
from tests.scenarios.cluster.namespaces import Nodes, why_not
from tests.scenarios.cluster.slurm import ROOT
from tests.scenarios.faults.launched import Launched

pytestmark = [pytest.mark.exhaustive, pytest.mark.skipif(bool(why_not()), reason=why_not())]

PROGRAM = "tests.scenarios.cluster.elastic_program"
Line = dict[str, Any]


class Job:
    """A job on several nodes."""

    def __init__(self, folder: Path, nodes: Nodes, most: int, arguments: list[int], **environment: str) -> None:
        self.folder, self._nodes, self._most = folder, nodes, most
        self._arguments, self._environment = [str(one) for one in arguments], environment
        self._running: dict[int, Launched] = {}

    def start(self, node: int) -> None:
        options = [
            f"--nnodes=1:{self._most}",
            "--nproc-per-node=1",
            "--max-restarts=100",
            f"--rdzv-conf=last_call_timeout=5,is_host={int(node == 0)}",
        ]
        self._running[node] = self._nodes.launch(
            node, options, PROGRAM, str(self.folder), *self._arguments, **self._environment
        )

    def kill(self, node: int) -> None:
        self._nodes.kill(node)
        self._running.pop(node).wait(HANG)

    def open(self, gate: int) -> None:
        (self.folder / f"open_{gate}").touch()

    def log(self) -> list[Line]:
        file = self.folder / "log"
        # A process may be killed while it writes a line.
        lines = file.read_text().splitlines() if file.exists() else []
        return [json.loads(line) for line in lines if line.endswith("}")]

    def until(self, holds: Callable[[Line], bool]) -> None:
        """Wait for a line in the log."""
        end = time.monotonic() + HANG
        while not any(map(holds, self.log())):
            if time.monotonic() > end:
                said = "\n".join(job.output()[-3000:] for job in self._running.values())
                raise AssertionError(f"it does not come so far: {self.log()[-3:]}\n{said}")
            time.sleep(0.02)  # a file of another process has no event

    def until_gate(self, gate: int, world: int) -> None:
        self.until(lambda line: line["what"] == f"gate {gate}" and line["world"] == world)

    def wait(self) -> None:
        for node, job in self._running.items():
            code, output = job.wait(HANG)
            assert code == 0, f"node {node}:\n{output}"

    def end(self) -> None:
        for job in self._running.values():
            job.end()

    def visits(self) -> list[int]:
        """Number of times that the values of the last checkpoint have seen each sample."""
        export_checkpoint(self.folder / "end.ckpt", self.folder / "end.pt")
        end = torch.load(self.folder / "end.pt", weights_only=True)
        table = end["state_dict"]["tables.embedding_bags.sample.weight"]
        assert torch.equal(table, table[:, :1].expand_as(table).round())
        return [int(count) for count in table[:, 0]]


@pytest.fixture
def nodes() -> Iterator[Nodes]:
    with Nodes(4) as made:
        yield made


def test_a_node_dies_and_others_join(nodes: Nodes, tmp_path: Path) -> None:
    steps, every = 60, 3
    job = Job(tmp_path, nodes, 3, [steps, every, steps * BATCH // 3, 2 * steps * BATCH // 3])
    try:
        job.start(0)
        job.until_gate(0, world=1)
        job.start(1)
        job.until_gate(0, world=2)
        job.kill(1)
        job.open(0)
        job.until_gate(1, world=1)
        job.start(2)
        job.start(3)
        job.until_gate(1, world=3)
        job.open(1)
        job.wait()
    finally:
        job.end()
    assert job.visits() == [1] * (steps * BATCH)


def test_a_node_vanishes_without_a_word(nodes: Nodes, tmp_path: Path) -> None:
    """The others wait for the strategy's timeout, and no longer."""
    steps = 40
    job = Job(tmp_path, nodes, 2, [steps, 3, steps * BATCH // 2], ELASTIC_TIMEOUT="60")
    try:
        job.start(0)
        job.start(1)
        job.until_gate(0, world=2)
        nodes.cut(1)
        job.open(0)
        cut = time.time()
        job.until(lambda line: line["what"] == "start" and line["world"] == 1 and line["seen"] > 0)
        print(f"trained again {job.log()[-1]['time'] - cut:.1f} s after the cut")
        job.kill(1)
        job.wait()
    finally:
        job.end()
    assert job.visits() == [1] * (steps * BATCH)


def test_the_example_continues_without_a_node(nodes: Nodes, tmp_path: Path) -> None:
    script, config = (ROOT / "examples" / part for part in ("cluster/torchrun.sh", "recsys_movielens/two_nodes.yaml"))
    running = []
    for node in range(2):
        rendezvous = f"--local-addr={nodes.address(node)} --rdzv-conf=last_call_timeout=5,is_host={int(node == 0)}"
        environment = {
            **os.environ,
            "PYTHONPATH": str(ROOT),
            "PATH": os.pathsep.join([str(Path(sys.executable).parent), os.environ["PATH"]]),
            "GLOO_SOCKET_IFNAME": "eth0",
            "OMP_NUM_THREADS": "1",
            "NODES": "1:2",
            "EVERY": "5",
            "TORCHRUN_OPTIONS": rendezvous,
        }
        command = [*nodes.before(node), str(script), nodes.address(0), str(config), "--trainer.max_epochs", "2"]
        with (tmp_path / f"output_{node}").open("wb") as output:
            running.append(subprocess.Popen(command, cwd=tmp_path, env=environment, stdout=output, stderr=output))
    said = tmp_path / "output_0"
    try:
        end = time.monotonic() + HANG
        while (
            "MEMBER: 1/2" not in said.read_text() + (tmp_path / "output_1").read_text()
            or not (tmp_path / "logs" / "elastic-two_nodes" / "last.ckpt").exists()
        ):
            assert time.monotonic() < end, said.read_text()
            assert running[0].poll() is None, said.read_text()
            time.sleep(0.02)  # a file of another process has no event
        nodes.kill(1)
        assert running[0].wait(HANG) == 0, said.read_text()
    finally:
        for node, one in enumerate(running):
            nodes.kill(node)
            one.wait(HANG)
    assert "Restored all states from the checkpoint at" in said.read_text()
