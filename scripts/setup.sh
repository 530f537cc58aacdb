#!/usr/bin/env bash
# Makes .venv from the pinned lists in requirements/, with nothing of the machine but Python 3.11 or newer and its pip.
#
# Environment:
#   PYTHON       the interpreter to make it from (default: python3.11, else python3)
#   TORCH_INDEX  address of a wheel index that has PyTorch's CPU build, for a machine without an NVIDIA driver whose own
#                package index has only the default build (it works too, and is several GB larger)
set -euo pipefail
cd "$(dirname "${BASH_SOURCE[0]}")/.."

python=${PYTHON:-$(command -v python3.11 || command -v python3)}
"$python" -c 'import sys; sys.exit(sys.version_info < (3, 11))' || {
    echo "setup: $python is $("$python" --version 2>&1); Python 3.11 or newer is needed: make setup PYTHON=..." >&2
    exit 1
}
"$python" -c 'import sys; sys.exit(sys.version_info[:2] != (3, 11))' ||
    echo "setup: $python is $("$python" --version 2>&1); the pinned versions are tested with Python 3.11 only." >&2

# The pip that comes with the interpreter fills .venv with the pinned pip, so Debian's python3-venv is not needed.
if ! .venv/bin/python -m pip --version >/dev/null 2>&1; then
    "$python" -m venv --clear --without-pip .venv
    sed -n '/^pip==/,/[^\\]$/p' requirements/pinned.txt |
        "$python" -m pip --python .venv/bin/python install --require-hashes --no-deps -r /dev/stdin
fi
# The lists are complete, so that no dependency is looked for, and nothing is built, for which tools would be fetched: what
# has no hash here is not installed.
hashed() { .venv/bin/python -m pip install --require-hashes --no-deps --only-binary=:all: "$@"; }
pip() { .venv/bin/python -m pip "$@"; }

has_nvidia_driver() { [ -e /proc/driver/nvidia/version ] || nvidia-smi -L >/dev/null 2>&1; }

hashed -r requirements/pinned.txt
if has_nvidia_driver; then
    hashed -r requirements/torch.txt -r requirements/torchrec-gpu.txt
else
    if ! pip install --no-deps ${TORCH_INDEX:+--extra-index-url "$TORCH_INDEX"} -r requirements/torch-cpu.txt; then
        echo "setup: no CPU build of torch on this package index; taking the default build instead. It works, and is" \
            "several GB larger: TORCH_INDEX=... names an index that has the CPU build, such as PyTorch's own." >&2
        hashed -r requirements/torch.txt
    fi
    hashed -r requirements/torchrec-cpu.txt
fi
# With the pinned setuptools, and nothing that is fetched for the build.
pip install --no-deps --no-build-isolation --editable .

.venv/bin/python -c 'from lightning_pipe.environment import import_torchrec; import_torchrec()'
echo "setup: .venv is ready; the command is .venv/bin/lightning-pipe"
