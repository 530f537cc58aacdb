#!/usr/bin/env bash
# Creates .venv from the pinned lists in requirements/. Requires only Python 3.11 or newer with pip.
#
#   scripts/setup.sh train  what the configurations in examples/ train with
#   scripts/setup.sh test   also what tests, documentation and linters need
#
# Environment:
#   PYTHON       interpreter for .venv (default: python3.11, else python3)
#   TORCH_INDEX  URL of a wheel index with PyTorch's CPU build. Set it on a machine without an NVIDIA driver if its package
#                index only has the default build (which also works, but is several GB larger)
set -euo pipefail
cd "$(dirname "${BASH_SOURCE[0]}")/.."

python=${PYTHON:-$(command -v python3.11 || command -v python3)}
"$python" -c 'import sys; sys.exit(sys.version_info < (3, 11))' || {
    echo "setup: $python is $("$python" --version 2>&1); expected Python 3.11 or newer. Run make setup PYTHON=..." >&2
    exit 1
}
"$python" -c 'import sys; sys.exit(sys.version_info > (3, 14))' ||
    echo "setup: $python is $("$python" --version 2>&1); the pinned versions are tested with Python 3.11 to 3.13." >&2

# The interpreter's own pip installs the pinned pip into .venv, so Debian's python3-venv is not required.
if ! .venv/bin/python -m pip --version >/dev/null 2>&1; then
    "$python" -m venv --clear --without-pip .venv
    sed -n '/^pip==/,/[^\\]$/p' requirements/train.txt |
        "$python" -m pip --python .venv/bin/python install --require-hashes --no-deps -r /dev/stdin
fi
# The lists are complete, so pip resolves no dependencies. It builds no packages either, which would download build tools,
# and installs no package without a hash.
hashed() { .venv/bin/python -m pip install -q --require-hashes --no-deps --only-binary=:all: "$@"; }
pip() { .venv/bin/python -m pip "$@"; }

if [ "${1:-}" = test ]; then
    hashed -r requirements/test.txt
    echo "setup: .venv has what tests, documentation and linters need"
    exit
fi

has_nvidia_driver() { [ -e /proc/driver/nvidia/version ] || nvidia-smi -L >/dev/null 2>&1; }

echo "setup: installing the packages of requirements/train.txt, then torch (up to 5 GB)"
hashed -r requirements/train.txt
if has_nvidia_driver; then
    hashed -r requirements/torch.txt -r requirements/torchrec-gpu.txt
else
    if ! pip install -q --no-deps ${TORCH_INDEX:+--extra-index-url "$TORCH_INDEX"} -r requirements/torch-cpu.txt; then
        echo "setup: this package index has no CPU build of torch; installing the default build, which also works but is" \
            "several GB larger. Set TORCH_INDEX=... to an index with the CPU build, such as PyTorch's own." >&2
        hashed -r requirements/torch.txt
    fi
    hashed -r requirements/torchrec-cpu.txt
fi
# Built with the pinned setuptools, without downloads for the build.
pip install -q --no-deps --no-build-isolation --editable .

.venv/bin/python -m lightning_pipe.check_installation
echo "setup: .venv is ready; the command is .venv/bin/lightning-pipe"
