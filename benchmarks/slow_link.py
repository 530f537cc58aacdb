"""Two ranks on one machine with a slow network between them.

Each rank runs in a separate network namespace. A pair of virtual devices joins the two, and ``tc tbf`` limits the rate
in both directions::

    rank 0   lp-a  10.77.0.1 ---- tbf ----> <---- tbf ---- 10.77.0.2  lp-b   rank 1

``python -m benchmarks.slow_link --rate 200mbit -- SCRIPT ARGUMENTS`` runs a script on both ranks, as ``torchrun`` does
on two nodes with one process each. Requires root (or CAP_NET_ADMIN and CAP_SYS_ADMIN) and iproute2. The namespaces are
always removed at the end.
"""

from __future__ import annotations

import argparse
import os
import re
import shutil
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from types import FrameType

__all__ = ["SlowLink", "slow_link"]

# Packet size in bytes: jumbo frames. Network cards exchange even larger pieces with the system. With Ethernet's 1500
# bytes, half a megabyte would interrupt the compute on a rank's only core hundreds of times.
_PACKET = 9000
_UNITS = {"": 1.0, "k": 1e3, "m": 1e6, "g": 1e9}


@dataclass(frozen=True)
class SlowLink:
    """Two joined network namespaces.

    Args:
        namespaces: name of each rank's namespace.
        devices: virtual device in each namespace.
        addresses: addresses of the devices.
        rate: bits per second in each direction.
    """

    namespaces: tuple[str, str]
    devices: tuple[str, str]
    addresses: tuple[str, str]
    rate: float

    def environment(self, rank: int, port: int = 29500) -> dict[str, str]:
        """Environment variables that ``torchrun`` sets for *rank*, and the network device for Gloo."""
        return {
            "RANK": str(rank),
            "NODE_RANK": str(rank),
            "GROUP_RANK": str(rank),
            "LOCAL_RANK": "0",
            "WORLD_SIZE": "2",
            "LOCAL_WORLD_SIZE": "1",
            "MASTER_ADDR": self.addresses[0],
            "MASTER_PORT": str(port),
            "GLOO_SOCKET_IFNAME": self.devices[rank],
            "OMP_NUM_THREADS": os.environ.get("OMP_NUM_THREADS", "1"),
        }

    def run(self, command: Sequence[str], timeout: float = 600, more: Mapping[str, str] | None = None) -> None:
        """Run *command* on both ranks. The output of rank 0 is printed, that of rank 1 only after a failure.

        Args:
            command: command with its arguments.
            timeout: time limit in seconds (default 600).
            more: environment variables in addition to the current ones and :meth:`environment`.

        Raises:
            SystemExit: a rank failed or the time limit was exceeded. The remaining processes are then terminated.
        """
        with ExitStack() as stack:
            output = stack.enter_context(tempfile.TemporaryFile())
            ranks: list[subprocess.Popen[bytes]] = []
            for rank, namespace in enumerate(self.namespaces):
                ranks.append(
                    subprocess.Popen(
                        ["ip", "netns", "exec", namespace, *command],
                        env={**os.environ, **self.environment(rank), **(more or {})},
                        stdout=output if rank else None,
                        stderr=subprocess.STDOUT if rank else None,
                        start_new_session=True,
                    )
                )
                stack.callback(_end, ranks[-1])
            until = time.monotonic() + timeout
            while any(process.poll() is None for process in ranks) and not any(process.poll() for process in ranks):
                if time.monotonic() > until:
                    break
                time.sleep(0.05)
            codes = [process.poll() for process in ranks]
            if codes == [0, 0]:
                return
            # The first failure often causes that of the other rank, whose output may be more informative.
            until = time.monotonic() + 5
            while any(process.poll() is None for process in ranks) and time.monotonic() < until:
                time.sleep(0.05)
            output.seek(0)
            print("\n---- rank 1 printed:", output.read().decode(errors="replace"), sep="\n", file=sys.stderr)
            states = ["still running" if code is None else f"exit status {code}" for code in codes]
            late = f" after {timeout:.0f} s" if codes.count(None) == 2 else ""
            raise SystemExit(f"slow_link: rank 0: {states[0]}; rank 1: {states[1]}{late} ({' '.join(command)})")


@contextmanager
def slow_link(rate: str = "200mbit") -> Iterator[SlowLink]:
    """Create two namespaces with a link of *rate* in each direction, and remove them at the end, also after SIGTERM.

    Only the main thread can use this.

    Args:
        rate: rate in the format of ``tc``, such as ``200mbit`` or ``1gbit``.

    Raises:
        SystemExit: the process is not root, iproute2 is missing, or the kernel lacks veth or sch_tbf.
    """
    bits = _bits(rate)
    _check_machine()
    prefix = f"lp{os.getpid()}"
    link = SlowLink((f"{prefix}a", f"{prefix}b"), (f"{prefix}-a", f"{prefix}-b"), ("10.77.0.1", "10.77.0.2"), bits)
    # Maximum burst: a millisecond at the full rate, but at least two packets.
    burst = max(2 * _PACKET, int(bits / 8 / 1000))
    with ExitStack() as stack:
        # By default, SIGTERM ends this process without running the callbacks.
        stack.callback(signal.signal, signal.SIGTERM, signal.signal(signal.SIGTERM, _interrupt))
        for namespace in link.namespaces:
            stack.callback(subprocess.run, ["ip", "netns", "del", namespace], capture_output=True)
            _do("ip", "netns", "add", namespace)
        (first_namespace, second_namespace), (device, its_peer) = link.namespaces, link.devices
        _do(
            "ip",
            "-n",
            first_namespace,
            "link",
            "add",
            device,
            "type",
            "veth",
            "peer",
            "name",
            its_peer,
            "netns",
            second_namespace,
        )
        for namespace, name, address in zip(link.namespaces, link.devices, link.addresses, strict=True):
            _do("ip", "-n", namespace, "address", "add", f"{address}/24", "dev", name)
            _do("ip", "-n", namespace, "link", "set", name, "mtu", str(_PACKET))
            for up in ("lo", name):
                _do("ip", "-n", namespace, "link", "set", up, "up")
            limit = ["tbf", "rate", f"{int(bits)}bit", "burst", str(burst), "latency", "400ms"]
            _do("tc", "-n", namespace, "qdisc", "add", "dev", name, "root", *limit)
        yield link


def _bits(rate: str) -> float:
    match = re.fullmatch(r"(\d+(?:\.\d+)?)([kmg]?)bit", rate)
    if match is None or not float(match[1]):
        raise SystemExit(f"slow_link: the rate is {rate!r}; expected a number and a unit, such as 200mbit or 1gbit")
    return float(match[1]) * _UNITS[match[2]]


def _check_machine() -> None:
    missing = [name for name in ("ip", "tc") if shutil.which(name) is None]
    if missing:
        raise SystemExit(
            f"slow_link: this machine has no {' and no '.join(missing)}. Install iproute2 (apt install iproute2, dnf"
            " install iproute)"
        )
    if os.geteuid() != 0:
        raise SystemExit("slow_link: network namespaces need root, and this process is not root. Run it with sudo")


def _do(*command: str) -> None:
    done = subprocess.run(command, capture_output=True, text=True)
    if done.returncode:
        raise SystemExit(
            f"slow_link: `{' '.join(command)}` failed: {done.stderr.strip()}. This needs CAP_NET_ADMIN and"
            " CAP_SYS_ADMIN (in a container: --privileged), and a kernel with veth and sch_tbf"
        )


def _end(process: subprocess.Popen[bytes]) -> None:
    """Terminate a process and its children, because a namespace exists as long as processes run in it."""
    for sign, seconds in ((signal.SIGTERM, 5.0), (signal.SIGKILL, 5.0)):
        try:
            os.killpg(process.pid, sign)
        except ProcessLookupError:
            return
        try:
            process.wait(seconds)
        except subprocess.TimeoutExpired:
            continue


def _interrupt(number: int, frame: FrameType | None) -> None:
    raise SystemExit(128 + number)


def main() -> None:
    """Run a script on two ranks."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rate", default="200mbit", help="rate per direction, in tc's format")
    parser.add_argument("--timeout", type=float, default=600, help="time limit in seconds")
    parser.add_argument("script", help="file or module name")
    parser.add_argument("arguments", nargs=argparse.REMAINDER)
    options = parser.parse_args()
    with slow_link(options.rate) as link:
        target = [options.script] if options.script.endswith(".py") else ["-m", options.script]
        link.run([sys.executable, *target, *options.arguments], options.timeout)


if __name__ == "__main__":
    main()
