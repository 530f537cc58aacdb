"""Ranks that may die, forked from a process that has loaded the libraries: that is most of what a rank's start costs.

Unlike those of ``run_ranks``, they are on their own. Nothing keeps a rank that has failed until the others have, and
nobody ends a rank because another has ended: how each ends, and when, is what is tested.
"""

from __future__ import annotations

import faulthandler
import importlib
import multiprocessing
import os
import pickle
import signal
import socket
import sys
import tempfile
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from multiprocessing.connection import Connection, wait
from pathlib import Path
from typing import Any

from tests.distributed import fork_preloaded, keep_fault_handlers
from tests.patience import HANG

# How long (seconds) a process may take to end once it was told to.
END = 60.0
_HOST = "127.0.0.1"


@dataclass(frozen=True)
class Here:
    """What a rank knows of itself."""

    rank: int
    world_size: int
    folder: Path  # of all ranks, empty at the start

    def note_fault(self) -> None:
        """The fault happens now: from here on counts how long ranks take to end."""
        (self.folder / "fault").write_text(repr(time.monotonic()))


@dataclass(frozen=True)
class Raised:
    """What a rank's function raised."""

    kind: str
    text: str
    notes: tuple[str, ...]

    @classmethod
    def of(cls, error: BaseException) -> Raised:
        return cls(type(error).__name__, str(error), tuple(getattr(error, "__notes__", ())))

    def __str__(self) -> str:
        return "\n".join([f"{self.kind}: {self.text}", *self.notes])


@dataclass(frozen=True)
class Ended:
    """How a rank ended."""

    code: int | None  # None where it had to be killed in the end
    seconds: float  # from the fault to its end, or from its start where none was noted
    output: str
    value: Any
    left: bool  # whether processes that it started were still there


class Nursery:
    """Forks ranks; made by :func:`nursery`."""

    def __init__(self, connection: Connection) -> None:
        self._connection = connection

    def run(
        self, fn: Callable[..., Any], world_size: int, *args: Any, timeout: float = HANG, absent: int = 0
    ) -> list[Ended]:
        """Calls ``fn(here, *args)`` in each of *world_size* processes, with an environment as torchrun would set it."""
        self._connection.send((pickle.dumps((fn, args)), world_size, timeout, absent))
        if not self._connection.poll(timeout + 3 * END):
            raise AssertionError(f"the ranks of {fn.__name__} were not collected in time")
        ended: list[Ended] = self._connection.recv()
        return ended


@contextmanager
def nursery(modules: Sequence[str]) -> Iterator[Nursery]:
    """A process that has imported *modules* and forks ranks.

    It is itself a copy of one that has imported what most tests use.
    """
    ours, theirs = multiprocessing.Pipe()
    process = fork_preloaded(_serve, (theirs, list(modules), dict(os.environ)))
    theirs.close()
    try:
        yield Nursery(ours)
    finally:
        ours.close()  # which it takes for the end
        process.join(END)
        if process.is_alive():
            process.kill()
            process.join()
        process.close()


def told(ended: Sequence[Ended]) -> str:
    """All that the ranks wrote, for the message of a failed test."""
    return "\n\n".join(
        f"----- rank {rank}: exit code {one.code} after {one.seconds:.1f} s\n{one.output}"
        for rank, one in enumerate(ended)
    )


# ---------------------------------------------------------------------- in the nursery


def _serve(connection: Connection, modules: list[str], environment: dict[str, str]) -> None:
    os.environ.clear()
    os.environ.update(environment)
    # A rank's own processes start as those of a user's script do, not in the way that this one was started.
    multiprocessing.set_start_method(None, force=True)
    for module in modules:
        importlib.import_module(module)
    while True:
        try:
            call, world_size, timeout, absent = connection.recv()
        except EOFError:
            return
        with tempfile.TemporaryDirectory() as folder:
            ended = _run(connection, call, world_size, timeout, absent, Path(folder))
        with suppress(BrokenPipeError):
            connection.send(ended)


def _run(
    connection: Connection, call: bytes, world_size: int, timeout: float, absent: int, folder: Path
) -> list[Ended]:
    # No thread is here when a rank is forked: what another thread holds would be held in the rank for ever.
    shared = folder / "shared"
    shared.mkdir()
    start = time.monotonic()
    # From now on the port is the ranks' own: rank 0 serves the store with this very socket.
    with socket.create_server((_HOST, 0)) as listening:
        ranks = [
            multiprocessing.get_context("fork").Process(target=_rank, args=(call, rank, world_size, folder, listening))
            for rank in range(world_size - absent)
        ]
        for process in ranks:
            process.start()
    ends: dict[int, float] = {}
    deadline = start + timeout
    while len(ends) < len(ranks) and time.monotonic() < deadline:
        sentinels = {process.sentinel: rank for rank, process in enumerate(ranks) if rank not in ends}
        # The connection is ready where the test run has died.
        ready = wait([*sentinels, connection], max(0.0, deadline - time.monotonic()))
        ends |= {rank: time.monotonic() for sentinel, rank in sentinels.items() if sentinel in ready}
        if connection in ready:
            break
    for rank, process in enumerate(ranks):
        if rank not in ends:
            os.kill(process.pid or 0, signal.SIGUSR2)  # the stacks of its threads, and its end
            process.join(END)
            process.kill()
        process.join()
    fault = float((shared / "fault").read_text()) if (shared / "fault").exists() else start
    return [
        Ended(
            process.exitcode if rank in ends else None,
            ends.get(rank, deadline) - fault,
            (folder / f"output_{rank}").read_text(errors="replace"),
            pickle.loads(found.read_bytes()) if (found := folder / f"value_{rank}").exists() else None,
            _end_group(process.pid or 0),
        )
        for rank, process in enumerate(ranks)
    ]


def _end_group(group: int) -> bool:
    """Ends the processes that a rank has left; whether there were any."""
    try:
        os.killpg(group, signal.SIGKILL)
    except ProcessLookupError:
        return False
    return True


# ---------------------------------------------------------------------- in a rank


def _rank(call: bytes, rank: int, world_size: int, folder: Path, listening: socket.socket) -> None:
    os.setpgid(0, 0)
    output = os.open(folder / f"output_{rank}", os.O_WRONLY | os.O_CREAT | os.O_APPEND)
    for stream in (sys.stdout, sys.stderr):
        os.dup2(output, stream.fileno())
    faulthandler.enable(output)
    faulthandler.register(signal.SIGUSR2, output, chain=True)
    keep_fault_handlers()
    # A shell ignores it for what it starts in the background, and so would these processes.
    signal.signal(signal.SIGINT, signal.default_int_handler)
    port = listening.getsockname()[1]
    os.environ |= _environment(rank, world_size, port)
    _store = _serve_store(listening, port) if rank == 0 else None
    listening.close()
    fn, args = pickle.loads(call)
    value: Any = None
    try:
        value = fn(Here(rank, world_size, folder / "shared"), *args)
    except BaseException as error:
        value = Raised.of(error)
        raise
    finally:
        (folder / f"value_{rank}").write_bytes(pickle.dumps(value))


def _serve_store(listening: socket.socket, port: int) -> Any:
    """The server that PyTorch asks for at this port, in this process, is then this one (multi_tenant)."""
    from torch.distributed import TCPStore

    return TCPStore(
        _HOST,
        port,
        is_master=True,
        wait_for_workers=False,
        multi_tenant=True,
        master_listen_fd=listening.detach(),
    )


def _environment(rank: int, world_size: int, port: int) -> dict[str, str]:
    """What torchrun would set; Gloo's sockets on loopback."""
    return {
        "RANK": str(rank),
        "LOCAL_RANK": str(rank),
        "WORLD_SIZE": str(world_size),
        "LOCAL_WORLD_SIZE": str(world_size),
        "GROUP_RANK": "0",
        "MASTER_ADDR": _HOST,
        "MASTER_PORT": str(port),
        "TORCHELASTIC_RUN_ID": "faults",
        "OMP_NUM_THREADS": "1",
        "GLOO_SOCKET_IFNAME": "lo",
    }
