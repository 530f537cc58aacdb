"""The one limit for everything that tests wait for: it ends hangs, and decides nothing on a busy machine.

What a test waits for takes seconds on a quiet machine, and many minutes among a hundred other processes. A test that
needs something to happen before something else orders it by events and barriers, not by time.
"""

from __future__ import annotations

import os

# Seconds. A developer who looks for a deadlock sets less.
HANG = float(os.environ.get("LIGHTNING_PIPE_TEST_HANG", "2400"))
