"""Nodes on this machine: network namespaces on one virtual switch, with iproute2 as root."""

from __future__ import annotations

import os
import shutil
import subprocess
from contextlib import suppress

from tests.scenarios.faults.launched import Launched

_SWITCH = "switch"


def why_not() -> str:
    """Why there can be no nodes here; empty if there can."""
    if shutil.which("ip") is None:
        return "nodes are network namespaces, which need the command ip of iproute2"
    try:
        with Nodes(1):
            return ""
    except OSError as error:
        return f"network namespaces cannot be made here: {error}"


class Nodes:
    """Nodes 0 to *count* - 1, with an address each; they end with the context."""

    def __init__(self, count: int) -> None:
        self._count = count
        self._switch = self._name(_SWITCH)

    def __enter__(self) -> Nodes:
        try:
            _ip("netns", "add", self._switch)
            _ip("-n", self._switch, "link", "add", "bridge", "type", "bridge")
            _ip("-n", self._switch, "link", "set", "bridge", "up")
            for node in range(self._count):
                self._add(node)
        except OSError:
            self.__exit__()
            raise
        return self

    def __exit__(self, *error: object) -> None:
        for name in (self._switch, *map(self._name, range(self._count))):
            subprocess.run(["ip", "netns", "del", name], capture_output=True, check=False)

    def address(self, node: int) -> str:
        """Address of a node. torchrun numbers nodes by their addresses: rank 0 is not where the rendezvous is."""
        return f"10.213.78.{250 - node}"

    def cut(self, node: int) -> None:
        """Take the cable of a node out: nothing arrives any more, and nothing says so."""
        _ip("-n", self._switch, "link", "set", f"port{node}", "down")

    def before(self, node: int) -> list[str]:
        """The beginning of a command that runs on a node."""
        return ["ip", "netns", "exec", self._name(node)]

    def launch(self, node: int, options: list[str], module: str, *arguments: str, **environment: str) -> Launched:
        """Start torchrun on a node, in whose rendezvous node 0 has the store."""
        rendezvous = [
            "--rdzv-backend=c10d",
            "--rdzv-id=elastic",
            f"--rdzv-endpoint={self.address(0)}:29541",
            f"--local-addr={self.address(node)}",
        ]
        return Launched(
            [*rendezvous, *options],
            module,
            *arguments,
            environment={"GLOO_SOCKET_IFNAME": "eth0", **environment},
            before=self.before(node),
        )

    def kill(self, node: int) -> None:
        """Kill all processes of a node, torchrun too, as a machine ends that loses its power."""
        while found := subprocess.run(
            ["ip", "netns", "pids", self._name(node)], capture_output=True, text=True, check=True
        ).stdout.split():
            for process in found:
                with suppress(ProcessLookupError):
                    os.kill(int(process), 9)

    def _add(self, node: int) -> None:
        name = self._name(node)
        _ip("netns", "add", name)
        port = ["name", f"port{node}", "netns", self._switch]
        _ip("link", "add", "eth0", "netns", name, "type", "veth", "peer", *port)
        _ip("-n", self._switch, "link", "set", f"port{node}", "master", "bridge", "up")
        _ip("-n", name, "addr", "add", f"{self.address(node)}/24", "dev", "eth0")
        for device in ("lo", "eth0"):
            _ip("-n", name, "link", "set", device, "up")

    def _name(self, what: object) -> str:
        return f"lightning-pipe-{os.getpid()}-{what}"


def _ip(*arguments: str) -> None:
    done = subprocess.run(["ip", *arguments], capture_output=True, text=True, check=False)
    if done.returncode:
        raise OSError(f"ip {' '.join(arguments)}: {done.stderr.strip()}")
