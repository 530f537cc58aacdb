"""Entry point of ``python -m lightning_pipe.cli``, for launchers that start modules."""

from __future__ import annotations

import sys

from lightning_pipe.cli.main import main

if __name__ == "__main__":
    sys.exit(main())
