"""Programs started by torchrun, each with all its processes in a session of its own, which always ends."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import tempfile
from collections.abc import Mapping, Sequence
from contextlib import suppress


class Launched:
    """torchrun, at work."""

    def __init__(
        self,
        options: Sequence[str],
        module: str,
        *arguments: str,
        environment: Mapping[str, str] | None = None,
        before: Sequence[str] = (),
    ) -> None:
        # Without the second setting PyTorch 2.13 keeps the store of the attempt before, and Gloo looks there for ranks
        # that have ended (its issue 135712, which is closed).
        fixed = {"OMP_NUM_THREADS": "1", "TORCH_DISABLE_SHARE_RDZV_TCP_STORE": "1", "GLOO_SOCKET_IFNAME": "lo"}
        # A file, since processes that write more than a pipe holds would wait until someone reads it.
        self._output = tempfile.TemporaryFile()  # noqa: SIM115 - as long as this object
        self._process = subprocess.Popen(
            [*before, sys.executable, "-m", "torch.distributed.run", *options, "-m", module, *arguments],
            stdout=self._output,
            stderr=subprocess.STDOUT,
            start_new_session=True,
            env={**os.environ, **fixed, **(environment or {})},
        )

    def wait(self, timeout: float) -> tuple[int, str]:
        """Its exit code and all that its processes wrote."""
        try:
            code = self._process.wait(timeout)
            return code, self.output()
        except subprocess.TimeoutExpired:
            self.end()
            output = self.output()
            raise AssertionError(f"torchrun had not ended after {timeout:g} s and was killed:\n{output}") from None

    def output(self) -> str:
        """All that its processes have written so far."""
        number = self._output.fileno()
        # Not from a position in the file, which its processes share.
        return os.pread(number, os.fstat(number).st_size, 0).decode(errors="replace")

    def end(self) -> None:
        """Ends what is still there of it; ranks, which torchrun puts into sessions of their own, end with it."""
        self._process.terminate()
        with suppress(subprocess.TimeoutExpired):
            self._process.wait(60)
        with suppress(ProcessLookupError):
            os.killpg(self._process.pid, signal.SIGKILL)
