"""``python -m lightning_pipe.check_installation`` says whether torch, torchrec and fbgemm fit and can be imported."""

from __future__ import annotations

import sys

from lightning_pipe.engine.common.errors import SetupError
from lightning_pipe.environment import describe_versions, import_torchrec


def main() -> int:
    """Print one sentence on success; otherwise print the problem and return 1."""
    try:
        import_torchrec()
    except SetupError as error:
        print(error, file=sys.stderr)
        return 1
    print(f"These versions fit together and can be imported: {describe_versions()}.")
    return 0


if __name__ == "__main__":
    sys.exit(main())
